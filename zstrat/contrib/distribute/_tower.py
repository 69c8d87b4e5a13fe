"""The context of a tower, and the current strategy: the names of TF 1.12 for
`zstrat.ReplicaContext` and related functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, final

from zstrat.strategy import (
    get_cross_replica_context,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)

from ._strategy import DistributionStrategy, face_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax

    from zstrat.strategy import ReplicaContext, Strategy


@final
class TowerContext:
    """The tower that a function runs in. Get it from `get_tower_context`."""

    __slots__ = ("_replica",)

    def __init__(self, replica: ReplicaContext) -> None:
        self._replica = replica

    @property
    def distribution_strategy(self) -> DistributionStrategy:
        """The strategy that runs the tower."""
        return face_of(cast("Strategy", self._replica.strategy))

    @property
    def tower_id(self) -> int | jax.Array:
        """From 0 to ``num_towers - 1``; traced where all towers are one program."""
        return self._replica.replica_id_in_sync_group

    @property
    def num_towers(self) -> int:
        return self._replica.num_replicas_in_sync

    @property
    def is_single_tower(self) -> bool:
        """Whether there is only this one."""
        return self.num_towers == 1

    @property
    def device(self) -> str:
        """TF's name of the device that the tower runs on. A function that asks for it
        runs sequentially, tower by tower."""
        (device,) = self._replica.devices
        return device

    def merge_call(
        self, merge_fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls ``merge_fn(distribution, *args, **kwargs)`` once, in the cross-tower
        context, when all towers have come so far; each gets its part of the result.

        Args:
            args, kwargs: Of each one ``merge_fn`` gets the values of all towers.

        Raises:
            RuntimeError: Another tower makes fewer of these calls, or this tower is not
                the one that runs.
        """
        distribution = self.distribution_strategy

        def merge(_: object, *merged: Any, **named: Any) -> Any:
            return merge_fn(distribution, *merged, **named)

        return self._replica.merge_call(merge, args, kwargs)


def get_tower_context() -> TowerContext | None:
    """Returns the tower that this code runs in; None in the cross-tower context.
    Outside of all scopes it is the one tower of the default strategy."""
    replica = get_replica_context()
    return None if replica is None else TowerContext(replica)


def get_cross_tower_context() -> DistributionStrategy | None:
    """Returns the strategy whose cross-tower context this code is in, or None."""
    strategy = get_cross_replica_context()
    return None if strategy is None else face_of(strategy)


def in_cross_tower_context() -> bool:
    """Returns whether this code is in a scope, and not in a tower."""
    return in_cross_replica_context()


def get_distribution_strategy() -> DistributionStrategy:
    """Returns the current strategy, the default one outside of all scopes."""
    return face_of(get_strategy())


def has_distribution_strategy() -> bool:
    """Returns whether a strategy other than the default one is current."""
    return has_strategy()


def require_tower_context(tower_ctx: TowerContext) -> None:
    """Refuses code that is not in the tower of this context.

    Raises:
        RuntimeError: This code is not in it.
    """
    found = get_replica_context()
    if found is None:
        raise RuntimeError("Need to be inside `call_for_each_tower()`")
    if found is not tower_ctx._replica:
        raise RuntimeError("Mismatching TowerContext: this code runs in another tower")
