"""A TCP relay in front of a task, which can reset or silence its connections.

It runs on a thread and a loop of its own, so that it works while the test, or the
program under test, blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

T = TypeVar("T")

_PIECE: Final = 65536
"""Bytes that are forwarded at a time."""
_TIMEOUT: Final = 30.0
"""Seconds for a call on the relay's loop; all calls are short."""
_LAST: Final = 1.0
"""Seconds for reset connections to end; one to a task that does not answer may not."""


class Relay:
    """Forwards all bytes between clients of ``address`` and ``target``.

    A context manager; without ``with``, call `close`. All methods may be called from
    any thread, and have taken effect when they return.

    Args:
        target: "host:port" of the task. It need not run yet; until then connections are
            closed at once.
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._pairs: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}
        self._is_refusing = False
        self._loop = asyncio.new_event_loop()
        # A daemon thread: a relay that was not closed does not block the end of the
        # program. `leak_check` finds it by its name.
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="zstrat relay", daemon=True
        )
        self._thread.start()
        self.address: Final[str] = self._call(self._start())
        """"host:port" of the relay, on loopback."""

    def reset(self, every: int = 1) -> None:
        """Resets connections on both sides: all, or every second, third, ... one."""
        self._call(self._reset(every))

    @contextlib.contextmanager
    def blackholed(self) -> Iterator[None]:
        """Stops forwarding without closing connections; new ones get no answer.

        Bytes in flight are forwarded afterwards, in order.
        """
        self._call(self._gate(is_open=False))
        try:
            yield
        finally:
            self._call(self._gate(is_open=True))

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Resets all connections, and closes new ones at once."""
        self._is_refusing = True
        self.reset()
        try:
            yield
        finally:
            self._is_refusing = False

    def close(self) -> None:
        """Resets all connections and ends the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_TIMEOUT)

    async def _start(self) -> str:
        self._open = asyncio.Event()
        self._open.set()
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._open.wait()
        try:
            source, sink = await asyncio.open_connection(self._host, self._port)
        except OSError:  # the task does not run: closes the client's connection
            writer.transport.abort()
            return
        if self._is_refusing:
            writer.transport.abort()
            sink.transport.abort()
            return
        self._pairs[writer] = sink
        try:
            await asyncio.gather(self._copy(reader, sink), self._copy(source, writer))
        finally:
            del self._pairs[writer]

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_PIECE):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        sink.close()

    async def _reset(self, every: int) -> None:
        for here, there in list(self._pairs.items())[::every]:
            here.transport.abort()
            there.transport.abort()

    async def _gate(self, *, is_open: bool) -> None:
        if is_open:
            self._open.set()
        else:
            self._open.clear()

    async def _end(self) -> None:
        self._server.close()
        self._is_refusing = True  # also closes connections that are being opened
        await self._gate(is_open=True)
        await self._reset(1)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            _, left = await asyncio.wait(left, timeout=_LAST)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
