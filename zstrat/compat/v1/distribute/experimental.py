"""``tf.compat.v1.distribute.experimental``: strategies with their old arguments.

Law of the file: old arguments are converted to those of zstrat's strategies; nothing
else happens here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import zstrat
from zstrat.cluster import detect, query_cluster_spec
from zstrat.strategy import (
    BetweenGraphStrategy,
    CommunicationImplementation,
    CommunicationOptions,
)
from zstrat.strategy import CentralStorageStrategy as CentralStorageStrategy
from zstrat.strategy import (
    MultiWorkerMirroredStrategy as _MultiWorkerMirroredStrategy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.cluster import ClusterResolver
    from zstrat.strategy import Strategy

CollectiveCommunication = CommunicationImplementation
CollectiveHints = CommunicationOptions


class StrategyOfOld:
    """Represents a class of TF: calling it makes a strategy of another class, and
    `isinstance` accepts the result as an instance of it."""

    def __init__(self, make: Callable[..., Strategy], kinds: Sequence[str]) -> None:
        self._make = make
        self._kinds = kinds
        # `help` and `inspect.signature` show the function's arguments.
        functools.update_wrapper(self, make)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._make(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        # By name, so that only the strategies that somebody uses are imported.
        return isinstance(instance, tuple([getattr(zstrat, k) for k in self._kinds]))


def _making(*kinds: str) -> Callable[[Callable[..., Strategy]], Any]:
    """Decorates a function that makes strategies of the given classes: returns a
    `StrategyOfOld`."""
    return lambda make: StrategyOfOld(make, kinds)


@_making("MultiWorkerMirroredStrategy")
def MultiWorkerMirroredStrategy(  # a class of TF
    communication: CommunicationImplementation = CommunicationImplementation.AUTO,
    cluster_resolver: ClusterResolver | None = None,
) -> _MultiWorkerMirroredStrategy:
    """Makes a `zstrat.MultiWorkerMirroredStrategy` with the implementation of
    collectives that ``communication`` names."""
    options = CommunicationOptions(implementation=communication)
    return _MultiWorkerMirroredStrategy(cluster_resolver, options)


@_making("BetweenGraphStrategy", "CentralStorageStrategy")
def ParameterServerStrategy(  # a class of TF
    cluster_resolver: ClusterResolver | None = None,
) -> Strategy:
    """Makes a `zstrat.BetweenGraphStrategy`, or a `zstrat.CentralStorageStrategy`
    without a cluster."""
    resolver = cluster_resolver or detect()
    if query_cluster_spec(resolver):
        return BetweenGraphStrategy(resolver)
    return CentralStorageStrategy()


@_making("TPUStrategy")
def TPUStrategy(  # a class of TF
    tpu_cluster_resolver: ClusterResolver | None = None,
    steps_per_run: int | None = None,
    device_assignment: Any = None,
) -> Strategy:
    """Makes a `zstrat.TPUStrategy`. ``steps_per_run`` has no effect, as in TF when a
    program runs its steps itself: a loop of steps on the device is `jax.lax.scan`."""
    del steps_per_run
    return zstrat.TPUStrategy(tpu_cluster_resolver, device_assignment)
