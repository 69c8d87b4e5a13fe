"""A TCP relay on a thread of its own, whose connections are cut or held on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Relay:
    """Stands before ``target`` ("host:port"); ``address`` is its own."""

    def __init__(self, target):
        self._target = target
        self._pairs, self._tasks = {}, set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay")
        self._thread.start()
        self._do(self._start())

    def cut(self, every=1):
        """Resets connections: all, or every second, third, ... one."""
        self._do(self._cut(every))

    @contextlib.contextmanager
    def held(self):
        """Nothing passes, nobody is told, and who connects gets no answer."""
        self._do(self._gate(False))
        try:
            yield
        finally:
            self._do(self._gate(True))

    def close(self):
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- on the loop of the relay

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self):
        self._open = asyncio.Event()
        self._open.set()
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _join(self, reader, writer):
        await self._open.wait()
        host, port = self._target.rsplit(":", 1)
        try:
            there = await asyncio.open_connection(host, int(port))
        except OSError:  # the task was killed
            writer.transport.abort()
            return
        ways = (reader, there[1]), (there[0], writer)
        tasks = {self._loop.create_task(self._copy(*way)) for way in ways}
        self._pairs[writer] = there[1]
        self._tasks |= tasks
        await asyncio.wait(tasks)
        self._tasks -= tasks
        del self._pairs[writer]

    async def _copy(self, source, sink):
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        sink.close()

    async def _cut(self, every):
        for here, there in list(self._pairs.items())[::every]:
            here.transport.abort()
            there.transport.abort()

    async def _gate(self, is_open):
        if is_open:
            self._open.set()
        else:
            self._open.clear()

    async def _end(self):
        self._server.close()
        self._open.set()
        await self._cut(1)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
