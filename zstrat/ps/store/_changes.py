"""What is told of the changes of a store to whoever keeps a second copy of it.

A change is told by the message that makes it, or by one that makes the same again on a
store that had all changes before it, without being decided anew: what was refused, or
was a duplicate, is not told. What nobody can make again is shipped as values.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeVar, final

import numpy as np

from zstrat.wire import (
    BindOptimizer,
    CreateOptimizer,
    CreateVariables,
    Message,
    VariableEntry,
)

from ._creating import CreatePlan, InitializePlan
from ._plans import BindPlan, OptimizerPlan

T = TypeVar("T", bound=Message)


class ChangeLog(Protocol):
    """Who is told of the changes of a store, to keep a second copy of it."""

    def append(self, change: Message) -> None:
        """Hears of a change when it has become true, by a message that makes it again
        on a store that had all changes before it, without deciding anything anew. The
        session in such a message is 0."""

    def mark_diverged(self, why: str) -> None:
        """Notes that the store has changed in a way that no message describes."""

    def hold(self, message: Message) -> Message | asyncio.Future[Message]:
        """Passes on the answer to a change: at once, or by a future that has it when
        the second copy has the change, too."""

    def answer(self, future: asyncio.Future[Message], message: Message) -> None:
        """`hold`, for an answer that is awaited already."""


@final
class TwoLogs:
    """Tells two logs of the changes of a store: an answer leaves when both let it."""

    def __init__(self, *logs: ChangeLog) -> None:
        self.logs = logs

    def append(self, change: Message) -> None:
        for log in self.logs:
            log.append(change)

    def mark_diverged(self, why: str) -> None:
        for log in self.logs:
            log.mark_diverged(why)

    def hold(self, message: Message) -> Message | asyncio.Future[Message]:
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.answer(answer, message)
        return message if answer.done() else answer

    def answer(self, future: asyncio.Future[Message], message: Message) -> None:
        held = [log.hold(message) for log in self.logs]
        left = {each for each in held if isinstance(each, asyncio.Future)}
        if not left:
            future.set_result(message)

        def passed_on(held: asyncio.Future[Message]) -> None:
            left.discard(held)
            error = None if held.cancelled() else held.exception()
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            elif not left:
                future.set_result(message)

        for each in list(left):
            each.add_done_callback(passed_on)


def with_log(told: ChangeLog | None, log: ChangeLog) -> ChangeLog:
    """A log that passes changes on to both."""
    return log if told is None else TwoLogs(told, log)


def without_log(told: ChangeLog | None, log: ChangeLog) -> ChangeLog | None:
    """What is left of ``told`` without ``log``, which need not be part of it."""
    if told is log:
        return None
    if isinstance(told, TwoLogs) and log in told.logs:
        (told,) = [each for each in told.logs if each is not log]
    return told


async def acknowledged(log: ChangeLog | None, answer: T) -> T:
    """The answer, when it may leave. Cancellation: it is given up."""
    held = answer if log is None else log.hold(answer)
    if isinstance(held, asyncio.Future):
        await held
    return answer


def tell(
    log: ChangeLog, plan: CreatePlan | InitializePlan | OptimizerPlan | BindPlan
) -> None:
    """Tells the log of a plan that was committed."""
    match plan:
        case CreatePlan(entries=entries, arrays=arrays):
            if entries:
                log.append(CreateVariables(0, list(entries), tuple(arrays)))
        case InitializePlan(entries=initial, cells=cells):
            # One at a time, and as values: an initializer may draw them at random.
            for entry, cell in zip(initial, cells, strict=True):
                made = VariableEntry(*entry[:4])
                log.append(CreateVariables(0, [made], (cell.lease(),)))
        case OptimizerPlan(optimizer=optimizer, name=name, code=code):
            log.append(CreateOptimizer(0, optimizer, name, code))
        case BindPlan(optimizer=known, data=data):
            tree = np.frombuffer(data, np.uint8)
            log.append(BindOptimizer(0, known.optimizer, (tree,)))
