"""Parameter servers: variables with versions, updates that apply once and whole."""

from ._service import PsService as PsService
from ._thread import JobThread as JobThread
from .client._client import PsClient as PsClient
from .client._line import ServerLine as ServerLine
from .client._pushing import PsUpdate as PsUpdate
from .client._reading import Clocks as Clocks
from .client._reading import Ref as Ref
from .client._reading import RowsRef as RowsRef
from .client._snapshot_client import PinnedTensor as PinnedTensor
from .engine._engine import OptimizerEngine as OptimizerEngine
from .handover._handover import Handover as Handover
from .handover._handover import Inherited as Inherited
from .handover._handover import LeftStore as LeftStore
from .handover._handover import StoreRole as StoreRole
from .replication._hosting import HostedStores as HostedStores
from .replication._hosting import backup_links as backup_links
from .store._parts import EagerRun as EagerRun
from .store._parts import ordinal as ordinal
from .store._parts import require_same as require_same
from .store._store import Store as Store
