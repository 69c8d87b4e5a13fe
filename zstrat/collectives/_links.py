"""How a task makes its links to others: as whom, by which lane, with which keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zstrat.transport import Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.config import Settings
    from zstrat.errors import PeerLostError
    from zstrat.transport import Security
    from zstrat.wire import Hello

    from ._membership import GroupSeat


class LinkMaker:
    """Makes links of this task; implements `_mesh.MakeLink`."""

    def __init__(
        self, me: Hello, settings: Settings, security: Security | None
    ) -> None:
        self._me, self._settings, self._security = me, settings, security

    def __call__(
        self,
        seat: GroupSeat,
        *,
        on_open: Callable[[Hello], None] = lambda hello: None,
        on_lost: Callable[[PeerLostError], None] = lambda error: None,
        on_flushed: Callable[[], None] | None = None,
    ) -> Link:
        return Link(
            seat.address,
            self._me,
            name=seat.task,
            settings=self._settings,
            on_open=on_open,
            on_lost=on_lost,
            on_flushed=on_flushed,
            security=self._security,
            expect=(seat.job, seat.number),
        )
