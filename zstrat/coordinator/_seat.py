"""What one worker holds of ours, and how more of it gets there.

Code and arguments are shipped once per connection, before the first closure that needs
them: the order of messages on a link does the rest. The law of this file: what is in
the sets of a seat was sent on the present connection.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zstrat.wire import (
    Batch,
    Dispatch,
    DropArguments,
    DropResources,
    DropResults,
    Layout,
    Message,
    PutArguments,
    PutCode,
)

log = logging.getLogger("zstrat.coordinator")

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from ._calls import Arguments, Call, Code
    from ._lane import Lane
    from ._members import Member
    from ._queue import Closure


@dataclass(slots=True, eq=False)
class Seat:
    """One worker, as the dispatcher sees it."""

    session: int
    lane: Lane
    member: Member
    codes: set[bytes] = field(default_factory=set)
    arguments: set[int] = field(default_factory=set)
    resources: set[int] = field(default_factory=set)
    layouts: dict[int, Layout] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    """Resources that could not be built there, by number."""

    def clear(self) -> None:
        """A new connection: nothing is there yet."""
        for held in (self.codes, self.arguments, self.resources):
            held.clear()
        for told in (self.layouts, self.failed):
            told.clear()

    def put_code(self, code: Code) -> None:
        """Ships the code, unless it is there."""
        if code.digest in self.codes:
            return
        self.codes.add(code.digest)
        message = PutCode(self.session, code.digest, code.code)
        self.lane.link.submit(message).add_done_callback(self._told)

    def put_arguments(self, arguments: Arguments | None) -> int:
        """Ships the arguments, unless they are there; returns their number."""
        if arguments is None:
            return 0
        number = arguments.number
        if number not in self.arguments:
            self.arguments.add(number)
            self.lane.link.notify(
                PutArguments(self.session, number, arguments.code, arguments.arrays)
            )
        return number

    def dispatch(self, closures: Iterable[Closure], low_water: int) -> None:
        """Ships what the closures need, and then all of them in one message."""
        batches: list[Batch] = []
        call: object = None
        attempt, steps = 0, []
        for closure in closures:
            if closure.call is not call or closure.attempt != attempt:
                call, attempt, steps = closure.call, closure.attempt, []
                batches.append(self._batch(closure.call, attempt, steps))
            steps.append(closure.step)
        self.lane.link.notify(Dispatch(self.session, low_water, batches))

    def forget(
        self, arguments: Iterable[int], resources: Iterable[int], results: Iterable[int]
    ) -> None:
        """Tells the worker what nobody needs any more."""
        link, session = self.lane.link, self.session
        if gone := sorted(self.arguments.intersection(arguments)):
            self.arguments.difference_update(gone)
            link.notify(DropArguments(session, gone))
        if gone := sorted(self.resources.intersection(resources)):
            self.resources.difference_update(gone)
            link.notify(DropResources(session, gone))
        if gone := sorted(results):
            link.notify(DropResults(session, gone))

    def _batch(self, call: Call, attempt: int, steps: list[int]) -> Batch:
        self.put_code(call.function)
        return Batch(
            call.function.digest, self.put_arguments(call.arguments), attempt, steps
        )

    def _told(self, answer: asyncio.Future[Message]) -> None:
        """Code that cannot be loaded fails each closure that needs it, with the reason
        that the worker gives there."""
        if not answer.cancelled() and (error := answer.exception()) is not None:
            log.warning("%s did not take code: %s", self.member.name, error)
