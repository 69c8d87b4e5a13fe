"""The strategies: where variables live, where steps run, how results meet."""

from ._context import ReplicaContext as ReplicaContext
from ._cross_device import CrossDeviceOps as CrossDeviceOps
from ._cross_device import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from ._cross_device import NcclAllReduce as NcclAllReduce
from ._cross_device import ReductionToOneDevice as ReductionToOneDevice
from ._default import get_cross_replica_context as get_cross_replica_context
from ._default import get_replica_context as get_replica_context
from ._default import get_strategy as get_strategy
from ._default import has_strategy as has_strategy
from ._default import in_cross_replica_context as in_cross_replica_context
from ._distributed_dataset import DistributedDataset as DistributedDataset
from ._distributed_dataset import DistributedIterator as DistributedIterator
from ._input_options import InputOptions as InputOptions
from ._input_options import InputReplicationMode as InputReplicationMode
from ._inputs import Inputs as Inputs
from ._multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from ._options import CommunicationImplementation as CommunicationImplementation
from ._options import CommunicationOptions as CommunicationOptions
from ._parameter_server import ParameterServerStrategy as ParameterServerStrategy
from ._placement import ServerVariables as ServerVariables
from ._shares import Share as Share
from ._shares import per_replica as per_replica
from ._strategy import Extended as Extended
from ._strategy import Strategy as Strategy
from ._values import PerReplica as PerReplica
from ._values import ValueContext as ValueContext
