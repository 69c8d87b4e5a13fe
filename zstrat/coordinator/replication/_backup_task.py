"""A way of its own to the backup of a store: to ask it what it does, or to make it the
primary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from zstrat.errors import NotPrimaryError

if TYPE_CHECKING:
    from zstrat.coordinator.connecting import MakeTaskLink
    from zstrat.errors import PeerLostError
    from zstrat.wire import Hello, Message

    from ._orders import Copy


@final
class BackupTask:
    """One backup, by a link that nobody else uses. On the loop.

    Args:
        name: What it is called in errors.
    """

    def __init__(
        self, name: str, store: int, copy: Copy, make_link: MakeTaskLink
    ) -> None:
        self.name: Final = name
        self.hello: Hello | None = None
        self.state = "connecting"
        self.is_ready = False
        self._copy = copy
        self.link: Final = make_link(
            copy.address,
            name=name,
            expect=("ps", store),
            on_notice=_unheeded,
            on_open=_unheeded,
            on_lost=self._lost,
        )

    async def wait_ready(self, deadline: float) -> None:
        """Connects. Called once.

        Raises:
            DeadlineExceededError: It does not answer until then (loop time).
            NotPrimaryError: Another process is there by now.

        Cancellation: it goes on connecting until `close`.
        """
        self.link.start()
        hello = await self.link.wait_open(deadline)
        if hello.incarnation != self._copy.incarnation:
            raise NotPrimaryError(f"another process is at {self._copy.address}")
        self.hello, self.is_ready, self.state = hello, True, "open"

    async def close(self) -> None:
        """Ends the link. Cancellation: as without."""
        await self.link.close()

    def _lost(self, error: PeerLostError) -> None:
        self.is_ready, self.state = False, f"lost: {error}"


def _unheeded(_: Hello | Message) -> None:
    """Does nothing: what a backup says unasked it tells its primary, too."""
