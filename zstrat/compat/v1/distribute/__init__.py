"""``tf.compat.v1.distribute``: every name is the public one of zstrat.

Names are fetched when they are first used, as zstrat's own are.
"""

from __future__ import annotations

from typing import Final

from zstrat.doors import by_name, fetched_late

_NAMES: Final = by_name(
    {
        "zstrat": "CrossDeviceOps DistributedValues HierarchicalCopyAllReduce "
        "InputContext InputReplicationMode MirroredStrategy NcclAllReduce "
        "OneDeviceStrategy ReduceOp ReductionToOneDevice ReplicaContext RunOptions "
        "Server Strategy StrategyExtended experimental_set_strategy "
        "get_loss_reduction get_replica_context get_strategy has_strategy "
        "in_cross_replica_context"
    }
)

_MODULES: Final = {
    "cluster_resolver": "zstrat.compat.v1.distribute.cluster_resolver",
    "experimental": "zstrat.compat.v1.distribute.experimental",
}

__getattr__, __dir__ = fetched_late(__name__, _NAMES, _MODULES)
