"""The strategies: where variables live, where steps run, how results meet."""

from ._between_graph import BetweenGraphStrategy as BetweenGraphStrategy
from ._context import ReplicaContext as ReplicaContext
from ._cross_device import CrossDeviceOps as CrossDeviceOps
from ._cross_device import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from ._cross_device import NcclAllReduce as NcclAllReduce
from ._cross_device import ReductionToOneDevice as ReductionToOneDevice
from ._default import experimental_set_strategy as experimental_set_strategy
from ._default import get_cross_replica_context as get_cross_replica_context
from ._default import get_loss_reduction as get_loss_reduction
from ._default import get_replica_context as get_replica_context
from ._default import get_strategy as get_strategy
from ._default import get_update_replica_id as get_update_replica_id
from ._default import has_strategy as has_strategy
from ._default import in_cross_replica_context as in_cross_replica_context
from ._extended import StrategyExtended as StrategyExtended
from ._inputs import DistributedDataset as DistributedDataset
from ._multi_step import MultiStepContext as MultiStepContext
from ._multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from ._options import CommunicationImplementation as CommunicationImplementation
from ._options import CommunicationOptions as CommunicationOptions
from ._options import RunOptions as RunOptions
from ._parameter_server import ParameterServerStrategy as ParameterServerStrategy
from ._placement import ServerVariables as ServerVariables
from ._strategy import Strategy as Strategy
from ._values import PerReplica as PerReplica
from ._values import ValueContext as ValueContext
