"""Says who is awaited while a program connects, so that nobody looks at silence.

The law of this file: one warning names all tasks that are awaited; it comes after
`FIRST_WORD` seconds and then every `NEXT_WORD`, and never after `stop`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._lane import TaskSession

log = logging.getLogger("zstrat.coordinator")

FIRST_WORD: Final = 2.0
"""Seconds: all tasks of a cluster that is up answer in much less."""
NEXT_WORD: Final = 10.0


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class CallLater(Protocol):
    """`asyncio.AbstractEventLoop.call_later`."""

    def __call__(
        self, delay: float, callback: Callable[[], None], /
    ) -> Cancellable: ...


@final
class Arrival:
    """Watches the lanes of a cluster until all parameter servers and one worker are in
    the session. On the loop thread."""

    def __init__(
        self,
        ps: Sequence[TaskSession],
        workers: Sequence[TaskSession],
        call_later: CallLater,
    ) -> None:
        self._ps, self._workers, self._call_later = ps, workers, call_later
        self._timer: Cancellable | None = None

    def start(self) -> None:
        self._timer = self._call_later(FIRST_WORD, self._tell)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def awaited(self) -> list[TaskSession]:
        """The tasks that connecting waits for now; one of the workers will do."""
        ps = [lane for lane in self._ps if not lane.is_ready]
        if any(lane.is_ready for lane in self._workers):
            return ps
        return [*ps, *self._workers]

    def _tell(self) -> None:
        awaited = [
            f"{lane.name} at {lane.address} ({lane.state})" for lane in self.awaited
        ]
        if awaited:
            log.warning("connecting: still waiting for %s", ", ".join(awaited))
        self._timer = self._call_later(NEXT_WORD, self._tell)
