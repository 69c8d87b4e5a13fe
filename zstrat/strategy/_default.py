"""The default strategy, for code that entered no other: one replica, variables in this
process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, cast, final

from zstrat.collectives import ReduceOp

from ._context import ReplicaContext
from ._extended import StrategyExtended
from ._frames import current, install
from ._strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    import jax

    from zstrat.variables import AbstractVariable, Creator

_DEVICE: Final = "/job:localhost/replica:0/task:0/device:CPU:0"


@final
class DefaultExtended(StrategyExtended):
    """``extended`` of the default strategy: everything is on one device."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(
            strategy, (_DEVICE,), (_DEVICE,), lambda part: part.device == _DEVICE
        )

    def colocate_vars_with(
        self, colocate_with_variable: AbstractVariable
    ) -> AbstractContextManager[None]:
        """Changes nothing: all variables are in one place."""
        del colocate_with_variable
        return contextlib.nullcontext()


@final
class DefaultStrategy(Strategy):
    """The strategy that is current when no other is. This module makes its only
    instance."""

    is_default = True

    def __init__(self) -> None:
        self._extended = DefaultExtended(self)
        self.replica_context: Final = ReplicaContext(self, 0)
        """The replica context of code outside of every strategy."""

    @property
    def num_replicas_in_sync(self) -> int:
        return 1

    @property
    def extended(self) -> DefaultExtended:
        """The methods for algorithms that know of replicas, for the one device."""
        return self._extended

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Returns a scope that changes nothing.

        Raises (on entering):
            RuntimeError: Another strategy is current.
        """
        if has_strategy():
            raise RuntimeError(
                "Must not nest tf.distribute.Strategy scopes: that of the default "
                f"strategy in that of {get_strategy()!r}"
            )
        yield self

    def _creator(self) -> Creator | None:
        return None

    def _devices(self) -> Sequence[jax.Device]:
        return ()

    def __repr__(self) -> str:
        return "<zstrat default strategy>"

    def __reduce__(self) -> str:
        return "_DEFAULT"  # by name: where it is unpickled, the one of that process


_DEFAULT: Final = DefaultStrategy()


def get_strategy() -> Strategy:
    """Returns the current strategy: outside of every scope the default one."""
    frame = current()
    # No other class is an `AbstractStrategy`.
    return _DEFAULT if frame is None else cast("Strategy", frame.strategy)


def has_strategy() -> bool:
    """Returns whether a strategy other than the default one is current."""
    return not get_strategy().is_default


def in_cross_replica_context() -> bool:
    """Returns whether this code is in a scope and not in a replica function."""
    frame = current()
    return frame is not None and frame.replica is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes a strategy current without ``with strategy.scope()``, for all threads and
    tasks that enter no scope. None makes the default one current.

    Raises:
        RuntimeError: Called inside a scope or a replica function.
        TypeError: ``strategy`` is not a strategy.
    """
    if strategy is None or strategy is _DEFAULT:
        install(None, None)
    elif isinstance(strategy, Strategy):
        install(strategy, strategy._own_creator())
    else:
        raise TypeError(f"expected a strategy or None, got {type(strategy).__name__}")


def get_loss_reduction() -> ReduceOp:
    """Returns the reduction of a loss over the replicas: SUM. (In TF's estimators it is
    MEAN.)"""
    return ReduceOp.SUM


def get_update_replica_id() -> int | None:
    """Returns, in a function that ``extended.update`` calls, the number of the
    variable's component that it updates; None elsewhere."""
    frame = current()
    return None if frame is None else frame.update


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica function that runs, or None directly in a
    scope. Outside of every scope, returns the context of the default strategy."""
    frame = current()
    if frame is None:
        return _DEFAULT.replica_context
    return cast("ReplicaContext | None", frame.replica)  # the only class of contexts


def get_cross_replica_context() -> Strategy | None:
    """Returns the current strategy if the code is in its cross-replica context, or
    None."""
    return get_strategy() if in_cross_replica_context() else None
