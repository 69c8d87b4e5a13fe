"""The log of the changes of a store, from which another process keeps a backup.

A change is logged as the message that made it, or as one that replays it on a store
that had all changes before it. A replay decides nothing: refused and duplicate requests
are not logged. Changes that cannot be replayed are logged as the new values.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeVar, final

import numpy as np

from zstrat.wire import (
    BindOptimizer,
    CreateOptimizer,
    CreateTables,
    CreateVariables,
    Message,
    VariableEntry,
)

from ._creating import CreatePlan, InitializePlan, TablesPlan
from ._plans import BindPlan, OptimizerPlan

T = TypeVar("T", bound=Message)


class ChangeLog(Protocol):
    """Receives the changes of a store, to keep a backup of it."""

    def append(self, change: Message) -> None:
        """Receives a change after it was made, as a message that replays it. The
        session in the message is 0."""

    def mark_diverged(self, why: str) -> None:
        """Marks the backup as diverged: the store has changed in a way that no message
        describes."""

    def hold(self, message: Message) -> Message | asyncio.Future[Message]:
        """Returns the answer to a change, or, if the answer must wait, a future of it
        that is done when the backup has the change."""

    def answer(self, future: asyncio.Future[Message], message: Message) -> None:
        """Sets the future to the answer when the backup has the change; as `hold`, for
        an answer that a caller awaits already."""


@final
class TwoLogs:
    """Passes changes to two logs; an answer is sent when both logs allow it."""

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
        left = {answer for answer in held if isinstance(answer, asyncio.Future)}
        if not left:
            # Both have it: nobody waits, and no callback would ever be called.
            future.set_result(message)

        def passed_on(held: asyncio.Future[Message]) -> None:
            left.discard(held)
            error = None if held.cancelled() else held.exception()
            # The other log may have failed, or the sender of the request is gone.
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            elif not left:
                future.set_result(message)

        for waiting in list(left):
            waiting.add_done_callback(passed_on)


def with_log(present: ChangeLog | None, log: ChangeLog) -> ChangeLog:
    """Returns a log that passes changes to the log ``present`` (if there is one) and to
    ``log``."""
    return log if present is None else TwoLogs(present, log)


def without_log(present: ChangeLog | None, log: ChangeLog) -> ChangeLog | None:
    """Removes ``log`` from the change logs ``present``, if it is among them; None if no
    log is left."""
    if present is log:
        return None
    # Two at most: one log is wanted for good and one while a copy moves.
    if isinstance(present, TwoLogs) and log in present.logs:
        (present,) = [other for other in present.logs if other is not log]
    return present


async def acknowledged(log: ChangeLog | None, answer: T) -> T:
    """Returns the answer when the log allows it to be sent. Cancellation: the answer is
    given up."""
    held = answer if log is None else log.hold(answer)
    if isinstance(held, asyncio.Future):
        await held
    return answer


def log_plan(
    log: ChangeLog,
    plan: CreatePlan | InitializePlan | TablesPlan | OptimizerPlan | BindPlan,
) -> None:
    """Logs the change that a committed plan has made."""
    match plan:
        case CreatePlan(entries=entries, arrays=arrays):
            if entries:
                log.append(CreateVariables(0, list(entries), tuple(arrays)))
        case InitializePlan(entries=initial, cells=cells):
            # One at a time, and as values: an initializer may draw them at random.
            for entry, cell in zip(initial, cells, strict=True):
                created = VariableEntry(*entry[:4])
                log.append(CreateVariables(0, [created], (cell.lease(),)))
        case TablesPlan(entries=tables, code=code, session=session):
            if tables:
                log.append(CreateTables(session, list(tables), code))
        case OptimizerPlan(optimizer=optimizer, name=name, code=code):
            log.append(CreateOptimizer(0, optimizer, name, code))
        case BindPlan(optimizer=known, data=data):
            tree = np.frombuffer(data, np.uint8)
            log.append(BindOptimizer(0, known.optimizer, (tree,)))
