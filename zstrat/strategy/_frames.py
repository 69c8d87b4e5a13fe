"""Which strategy is current, and on which side of it the code runs.

Outside everything the code is in the replica context of the default strategy. A scope
is the cross-replica context of its strategy; the body of ``run`` is the replica
context; what ``extended.update`` calls is in the update context, which is a
cross-replica context that knows its copy. A context variable holds the stack, so each
thread and each asyncio task has its own. Code that has entered nothing is under the
strategy that `experimental_set_strategy` made current, if any.

Law of the file: frames are pushed and popped here alone, and popped in reverse order;
anything else is an error that names both strategies.
"""

from __future__ import annotations

import contextlib
import weakref
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from zstrat.program.trace import (
    StrategyFingerprint,
    set_default_fingerprint,
    strategy_fingerprint,
)
from zstrat.variables import creator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.variables import Creator

    from ._abstract import AbstractReplicaContext, AbstractStrategy


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One entered context; ``replica`` is None in the cross-replica context, ``update``
    is the copy that an update context is for."""

    strategy: AbstractStrategy
    replica: AbstractReplicaContext | None = None
    update: int | None = None

    @property
    def fingerprint(self) -> StrategyFingerprint:
        """The context that a step called here is traced for."""
        side: int | str = "cross-replica"
        if self.replica is not None:
            number = self.replica.replica_id_in_sync_group
            side = number if isinstance(number, int) else "traced"
        return StrategyFingerprint(weakref.ref(self.strategy), (side, self.update))


_frames: Final[ContextVar[tuple[Frame, ...]]] = ContextVar("zstrat_frames", default=())


_default: Frame | None = None
"""The current context of code that has entered none; see `install`."""


def current() -> Frame | None:
    """Returns the innermost context, or None outside of all."""
    frames = _frames.get()
    return frames[-1] if frames else _default


def push(frame: Frame) -> None:
    """Enters a context."""
    _frames.set((*_frames.get(), frame))
    strategy_fingerprint.set(frame.fingerprint)


def pop(frame: Frame) -> None:
    """Leaves the context that was entered last.

    Raises:
        RuntimeError: Another one was entered last.
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
    """Restores our context variables as they were in ``before``, whatever kept a scope
    from ending. The variables of the program stay as they are."""
    for variable in copy_context():
        if variable.name.startswith("zstrat"):
            is_known = variable in before
            was = before[variable] if is_known else Context().run(variable.get)
            if variable.get() is not was:
                variable.set(was)


def install(strategy: AbstractStrategy | None, own: Creator | None) -> None:
    """Makes the strategy current for all threads and tasks that have entered nothing;
    None makes the default strategy current.

    Raises:
        RuntimeError: This code has entered something.
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
    """Makes the context the innermost one inside."""
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
    another strategy. Code that has entered nothing may do it.

    Raises:
        RuntimeError: Says where this code is.
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
        RuntimeError: Says where this code is.
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
    """Raises the error of one strategy in the scope of another one."""
    raise RuntimeError(
        f"Mixing different tf.distribute.Strategy objects: {strategy!r} is not "
        f"{other!r}, whose scope this code is in: leave that scope first"
    )


def refuse_replica_context(what: str) -> NoReturn:
    """Raises the error of a method that needs the cross-replica context."""
    raise RuntimeError(
        f"{what} requires being in cross-replica context, but it is called inside a "
        "replica function (the body of strategy.run): call it before or after run, or "
        "in get_replica_context().merge_call(); inside, use "
        "get_replica_context().all_reduce"
    )
