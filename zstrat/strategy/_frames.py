"""The stack of entered contexts: the current strategy, and the replica or cross-replica
context that the code is in.

Outside of all scopes the code is in the replica context of the default strategy. A
scope is the cross-replica context of its strategy; the body of ``run`` is in a replica
context; functions that ``extended.update`` calls are in the update context, which is a
cross-replica context that knows which copy it updates. A context variable holds the
stack, so each thread and each asyncio task has its own. Code that has entered no
context is under the strategy that `experimental_set_strategy` made current, if any.

A strategy makes the contexts of its replicas, and a context knows its strategy. The
interfaces of both in this file have the methods that the rest of the package calls, so
that neither file imports the other.

Laws of the file: frames are pushed and popped only here, and popped in reverse order;
anything else is an error that names both strategies. This file imports only the `Team`
from this package, so that every file of the package may import it.
"""

from __future__ import annotations

import abc
import contextlib
import weakref
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from zstrat.program.trace import (
    StrategyFingerprint,
    set_default_fingerprint,
    strategy_fingerprint,
)
from zstrat.variables import creator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import jax

    from zstrat.collectives import ReduceOp
    from zstrat.data import InputContext
    from zstrat.variables import Creator

    from .replica._collective import Team


class AbstractStrategy(abc.ABC):
    """The interface of a strategy that other files of this package use. `zs.Strategy`
    is the only subclass and documents the methods."""

    is_default: bool = False
    """Whether this is the default strategy, which is current where no other is."""

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are summed before they leave a worker."""

    @property
    @abc.abstractmethod
    def extended(self) -> Any:
        """The `StrategyExtended` of this strategy: methods for algorithms that know of
        replicas."""
        # `Any`: that class imports the contexts, which import this file.

    @abc.abstractmethod
    def scope(self) -> AbstractContextManager[AbstractStrategy]:
        """Returns a context manager that makes the strategy current."""

    @property
    @abc.abstractmethod
    def cluster_resolver(self) -> Any:
        """The resolver that the strategy was made from, or None."""

    @abc.abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Any = None,
        options: Any = None,
    ) -> Any:
        """Calls ``fn`` once per local replica."""

    @abc.abstractmethod
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Reduces the values of the replicas to one."""

    @abc.abstractmethod
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns one entry per local replica."""

    @abc.abstractmethod
    def gather(self, value: Any, axis: Any) -> Any:
        """Concatenates the values of the replicas along ``axis``."""

    @abc.abstractmethod
    def experimental_distribute_dataset(
        self, dataset: Any, options: Any = None
    ) -> Iterable[Any]:
        """Distributes a dataset of global batches over all replicas."""

    @abc.abstractmethod
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> Iterable[Any]:
        """Calls a function in each worker that makes the dataset of this worker."""

    @abc.abstractmethod
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[..., Any]
    ) -> Any:
        """Calls ``value_fn`` with the context of each replica; returns a
        `PerReplica`."""

    @abc.abstractmethod
    def _devices(self) -> Sequence[jax.Device]:
        """Returns devices of this process for its replicas, one each; there may be
        fewer than replicas."""

    @abc.abstractmethod
    def _team(self) -> Team:
        """Returns the replicas that compute together."""


class AbstractReplicaContext(abc.ABC):
    """The interface of the context of a replica that other files of this package use.
    `ReplicaContext` is the only subclass."""

    @property
    @abc.abstractmethod
    def replica_id_in_sync_group(self) -> int | jax.Array:
        """The number of the replica; traced where several replicas are one program."""

    @abc.abstractmethod
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``merge_fn(strategy, *args)`` once, in the cross-replica context."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One entered context. ``replica`` is None in the cross-replica context; ``update``
    is the number of the copy that an update context is for."""

    strategy: AbstractStrategy
    replica: AbstractReplicaContext | None = None
    update: int | None = None

    @property
    def fingerprint(self) -> StrategyFingerprint:
        """A key of the context: a step that is called here is traced for this key."""
        side: int | str = "cross-replica"
        if self.replica is not None:
            number = self.replica.replica_id_in_sync_group
            side = number if isinstance(number, int) else "traced"
        # Weakly: a step that was traced under a strategy does not keep it alive.
        return StrategyFingerprint(weakref.ref(self.strategy), (side, self.update))


_frames: Final[ContextVar[tuple[Frame, ...]]] = ContextVar("zstrat_frames", default=())


_default: Frame | None = None
"""The context of code that has entered none; set by `install`."""


def current() -> Frame | None:
    """Returns the innermost entered context, or None outside of all."""
    frames = _frames.get()
    return frames[-1] if frames else _default


def push(frame: Frame) -> None:
    """Enters a context: pushes its frame."""
    _frames.set((*_frames.get(), frame))
    # Steps are on a lower floor: they know this context by its fingerprint alone.
    strategy_fingerprint.set(frame.fingerprint)


def pop(frame: Frame) -> None:
    """Leaves the context that was entered last: pops its frame.

    Raises:
        RuntimeError: Another context was entered last.
    """
    frames = _frames.get()
    if not frames or frames[-1] is not frame:
        inner = frames[-1].strategy if frames else None
        raise RuntimeError(
            f"a context of {frame.strategy!r} is left while one of {inner!r} is the "
            "innermost: leave scopes in the reverse order of entering them, in the "
            "same thread and task"
        )
    _frames.set(frames[:-1])
    strategy_fingerprint.set(frames[-2].fingerprint if len(frames) > 1 else None)


def leave_for(before: Context) -> None:
    """Restores zstrat's context variables to their values in ``before``, even if a
    scope that was entered since then has not ended. Context variables of the program
    are not changed."""
    for variable in copy_context():
        if variable.name.startswith("zstrat"):
            is_known = variable in before
            # In an empty context each variable has its default.
            was = before[variable] if is_known else Context().run(variable.get)
            if variable.get() is not was:
                variable.set(was)


def install(strategy: AbstractStrategy | None, own: Creator | None) -> None:
    """Makes the strategy current for all threads and tasks that have entered no
    context; None makes the default strategy current.

    Raises:
        RuntimeError: This code has entered a context.
    """
    if _frames.get():
        raise RuntimeError(
            "Must not be called inside a `tf.distribute.Strategy` scope: "
            "experimental_set_strategy is for programs that enter none"
        )
    global _default
    _default = None if strategy is None else Frame(strategy)
    set_default_fingerprint(None if _default is None else _default.fingerprint)
    creator.install(own)


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """Enters the context of a frame, as a context manager."""
    push(frame)
    try:
        yield
    finally:
        pop(frame)


def in_real_replica_context() -> bool:
    """Returns whether this code is in a replica function of a strategy other than the
    default one."""
    frame = current()
    return (
        frame is not None
        and frame.replica is not None
        and not frame.strategy.is_default
    )


def require_cross_replica(strategy: AbstractStrategy, what: str) -> None:
    """Refuses an operation between replicas inside of one replica, or in the scope of
    another strategy. Code that has entered no context may call it.

    Args:
        what: Name of the operation, for errors.

    Raises:
        RuntimeError: The code is in such a context; the error says in which.
    """
    frame = current()
    if frame is None or frame.strategy.is_default:
        return
    if frame.strategy is not strategy:
        refuse_mixing(strategy, frame.strategy)
    if frame.replica is not None:
        refuse_replica_context(what)


def require_scope(strategy: AbstractStrategy, what: str) -> None:
    """Refuses an operation outside of the scope of the strategy.

    Raises:
        RuntimeError: The code is in another context; the error says in which.
    """
    frame = current()
    if frame is None or frame.strategy.is_default:
        raise RuntimeError(
            f'Need to be inside "with strategy.scope()" for {strategy!r}: {what} is '
            "used there"
        )
    if frame.strategy is not strategy:
        refuse_mixing(strategy, frame.strategy)


def refuse_mixing(strategy: AbstractStrategy, other: AbstractStrategy) -> NoReturn:
    """Raises the error for using a strategy in the scope of another one."""
    raise RuntimeError(
        f"Mixing different tf.distribute.Strategy objects: {strategy!r} is not "
        f"{other!r}, whose scope this code is in: leave that scope first"
    )


def refuse_replica_context(what: str) -> NoReturn:
    """Raises the error for calling a method in a replica context that needs the
    cross-replica context."""
    raise RuntimeError(
        f"{what} requires being in cross-replica context, but it is called inside a "
        "replica function (the body of strategy.run): call it before or after run, or "
        "in get_replica_context().merge_call(); inside, use "
        "get_replica_context().all_reduce"
    )
