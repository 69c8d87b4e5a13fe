from zstrat.program import KerasWarning as KerasWarning

from ._context import ReplicaContext as ReplicaContext
from ._default import experimental_set_strategy as experimental_set_strategy
from ._default import get_cross_replica_context as get_cross_replica_context
from ._default import get_loss_reduction as get_loss_reduction
from ._default import get_replica_context as get_replica_context
from ._default import get_strategy as get_strategy
from ._default import get_update_replica_id as get_update_replica_id
from ._default import has_strategy as has_strategy
from ._default import in_cross_replica_context as in_cross_replica_context
from ._extended import StrategyExtended as StrategyExtended
from ._frames import require_cross_replica as require_cross_replica
from ._local_strategy import CentralStorageStrategy as CentralStorageStrategy
from ._local_strategy import MirroredStrategy as MirroredStrategy
from ._local_strategy import OneDeviceStrategy as OneDeviceStrategy
from ._options import CommunicationImplementation as CommunicationImplementation
from ._options import CommunicationOptions as CommunicationOptions
from ._options import InputOptions as InputOptions
from ._options import InputReplicationMode as InputReplicationMode
from ._options import RunOptions as RunOptions
from ._strategy import Strategy as Strategy
from ._tpu import TPUStrategy as TPUStrategy
from ._v1 import MultiStepContext as MultiStepContext
from .input._distributed_dataset import DistributedDataset as DistributedDataset
from .input._distributed_dataset import DistributedIterator as DistributedIterator
from .input._inputs import ProcessInputs as ProcessInputs
from .input._replica_batches import Share as Share
from .input._replica_batches import per_replica as per_replica
from .mirrored._multi_worker import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from .mirrored._replicated_variable import SyncOnReadVariable as SyncOnReadVariable
from .reduce._cross_device import CrossDeviceOps as CrossDeviceOps
from .reduce._cross_device import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from .reduce._cross_device import NcclAllReduce as NcclAllReduce
from .reduce._cross_device import ReductionToOneDevice as ReductionToOneDevice
from .reduce._values import ValueContext as ValueContext
from .replica._per_replica import DistributedValues as DistributedValues
from .replica._per_replica import Mirrored as Mirrored
from .replica._per_replica import PerReplica as PerReplica
from .replica._per_replica import regroup as regroup
from .server._between_graph import BetweenGraphStrategy as BetweenGraphStrategy
from .server._parameter_server import ParameterServerStrategy as ParameterServerStrategy
from .server._server_variables import ServerVariables as ServerVariables
