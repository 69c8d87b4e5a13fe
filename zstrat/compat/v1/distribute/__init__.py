"""``tf.compat.v1.distribute``: every name is the public one of zstrat.

Names are fetched when they are first used, as zstrat's own are.
"""

from __future__ import annotations

import importlib
from typing import Final

import zstrat

_NAMES: Final = frozenset(
    {
        "CrossDeviceOps",
        "DistributedValues",
        "HierarchicalCopyAllReduce",
        "InputContext",
        "InputReplicationMode",
        "MirroredStrategy",
        "NcclAllReduce",
        "OneDeviceStrategy",
        "ReduceOp",
        "ReductionToOneDevice",
        "ReplicaContext",
        "RunOptions",
        "Server",
        "Strategy",
        "StrategyExtended",
        "experimental_set_strategy",
        "get_loss_reduction",
        "get_replica_context",
        "get_strategy",
        "has_strategy",
        "in_cross_replica_context",
    }
)

_MODULES: Final = {
    "cluster_resolver": "zstrat.compat.v1.distribute.cluster_resolver",
    "experimental": "zstrat.compat.v1.distribute.experimental",
}


def __getattr__(name: str) -> object:
    value: object
    if name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif name in _NAMES:
        value = getattr(zstrat, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, *_MODULES})
