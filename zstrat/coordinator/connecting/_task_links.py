"""What whoever comes to a task needs of the link to it, and of whoever makes links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zstrat.errors import PeerLostError
    from zstrat.wire import Hello, Message


class TaskLink(Protocol):
    """What a task session needs of `zstrat.transport.Link`."""

    @property
    def is_open(self) -> bool: ...

    @property
    def is_refused(self) -> bool: ...

    @property
    def trouble(self) -> str: ...

    @property
    def peer(self) -> Hello | None: ...

    def start(self) -> None: ...

    async def wait_open(self, deadline: float) -> Hello: ...

    def submit(
        self, message: Message, *, deadline: float | None = None
    ) -> asyncio.Future[Message]: ...

    def notify(self, message: Message) -> None: ...

    async def close(self) -> None: ...


class MakeTaskLink(Protocol):
    """Makes the link to one task; it is not started yet."""

    def __call__(
        self,
        address: str,
        *,
        name: str,
        expect: tuple[str, int],
        on_notice: Callable[[Message], None],
        on_open: Callable[[Hello], None],
        on_lost: Callable[[PeerLostError], None],
    ) -> TaskLink: ...
