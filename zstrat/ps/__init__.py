"""Parameter servers: variables with versions, updates that apply once and whole."""

from typing import TYPE_CHECKING

from zstrat.doors import by_name, fetched_late

if TYPE_CHECKING:
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
else:
    __getattr__, __dir__ = fetched_late(
        __name__,
        by_name(
            {
                "._service": "PsService",
                "._thread": "JobThread",
                ".client._client": "PsClient",
                ".client._line": "ServerLine",
                ".client._pushing": "PsUpdate",
                ".client._reading": "Clocks Ref RowsRef",
                ".client._snapshot_client": "PinnedTensor",
                ".engine._engine": "OptimizerEngine",
                ".handover._handover": "Handover Inherited LeftStore StoreRole",
                ".replication._hosting": "HostedStores backup_links",
                ".store._parts": "EagerRun ordinal require_same",
                ".store._store": "Store",
            }
        ),
    )
