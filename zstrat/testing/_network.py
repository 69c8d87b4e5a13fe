"""Faults of the network: a TCP relay, and namespaces on one switch.

A relay in front of a task resets or silences the task's connections. It runs on a
separate thread and loop, so that it works while the test, or the program under test,
blocks.

A network of namespaces simulates machines on one switch, with faults of cables and
switch. Only for Linux, with root and the program ``ip``. Packets pass through the
kernel, so that faults are realistic: connections are not reset but become silent, as
with a broken cable or switch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from contextlib import AbstractContextManager


T = TypeVar("T")

_PIECE: Final = 65536
"""Bytes that are forwarded at a time."""
_TIMEOUT: Final = 30.0
"""Seconds that a call on the relay's loop may take; all calls are short."""
_LAST: Final = 1.0
"""Seconds that reset connections have to end; one to a task that does not answer may
not end."""


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
        """Resets connections on both sides: all of them, or every second, third, ...
        one."""
        self._call(self._reset(every))

    @contextlib.contextmanager
    def blackholed(self) -> Iterator[None]:
        """Stops forwarding without closing connections; new connections get no answer.

        Bytes in flight are forwarded afterwards, in order.
        """
        self._call(self._gate(is_open=False))
        try:
            yield
        finally:
            self._call(self._gate(is_open=True))

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Resets all connections, and closes new ones at once, until the end of the
        block."""
        # First, or a peer that reconnects at once would get in.
        self._is_refusing = True
        self.reset()
        try:
            yield
        finally:
            self._is_refusing = False

    def close(self) -> None:
        """Resets all connections and ends the relay's thread. Idempotent."""
        if self._loop.is_closed():
            return
        # All tasks end in the loop; one that is dropped with it would warn.
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
        # In a blackhole the kernel still accepts connections; no byte passes.
        await self._open.wait()
        try:
            source, sink = await asyncio.open_connection(self._host, self._port)
        except OSError:  # the task does not run: closes the client's connection
            writer.transport.abort()
            return
        # Looked at after the connection is open: `refusing` may have begun meanwhile.
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
                # What was read waits here, so nothing is lost when the gate opens.
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        sink.close()

    async def _reset(self, every: int) -> None:
        # Every n-th, so that a peer with several connections loses only some of them.
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


_NOWHERE: Final = "02:00:00:00:00:99"
"""A hardware address that no machine has."""


class NoNamespacesError(Exception):
    """Network namespaces cannot be created on this machine."""


class SwitchedNetwork:
    """``count`` machines, 10.99.0.1 and so on, on one switch.

    The machines exist between `make` and `remove`, for all processes that know their
    ``name``; `switched_network` calls both. The switch is in an additional namespace,
    the *hub*, without an address.
    """

    def __init__(self, count: int, name: str) -> None:
        self.name: Final = name
        self.names: Final = [f"{name}-{n}" for n in range(count)]
        """The namespaces of the machines."""
        self.addresses: Final = [f"10.99.0.{n + 1}" for n in range(count)]
        self._hub = f"{name}-hub"

    def inside(self, name: str) -> list[str]:
        """Returns a prefix for commands to run on a machine."""
        return ["ip", "netns", "exec", name]

    def make(self) -> None:
        """Creates the namespaces, cables and switch.

        Raises:
            subprocess.CalledProcessError: A command failed; some namespaces may exist.
        """
        for name in (*self.names, self._hub):
            _ip("netns", "add", name)
            # A new namespace has even its loopback down.
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._hub, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "switch", "up")
        for n, name in enumerate(self.names):
            peer = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._hub, "link", "add", f"port{n}", *peer)
            self._port(n, "master", "switch", "up")
            _ip("-n", name, "addr", "add", f"{self.addresses[n]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def remove(self) -> None:
        """Removes the namespaces, also after a failed `make`."""
        for name in (*self.names, self._hub):
            with contextlib.suppress(subprocess.CalledProcessError):  # never made
                _ip("netns", "del", name)

    def unplugged(self, n: int) -> AbstractContextManager[None]:
        """Unplugs the cable of machine ``n`` during the block, which its network card
        notices."""
        return self._fault(self._plug, n)

    def lossy(self, n: int) -> AbstractContextManager[None]:
        """Makes the switch silently drop all packets from and to machine ``n`` during
        the block."""
        return self._fault(self._forward, n)

    def mute(self, n: int) -> AbstractContextManager[None]:
        """Drops all packets from machine ``n``, but not those to it, during the
        block."""
        return self._fault(self._unmute, n)

    @contextlib.contextmanager
    def _fault(self, set_line: Callable[[int, bool], None], n: int) -> Iterator[None]:
        set_line(n, False)
        try:
            yield
        finally:
            set_line(n, True)

    def _plug(self, n: int, is_in: bool) -> None:
        self._port(n, "up" if is_in else "down")

    def _forward(self, n: int, passes: bool) -> None:
        self._port(n, *(["master", "switch"] if passes else ["nomaster"]))

    def _unmute(self, n: int, is_heard: bool) -> None:
        # Its packets go to a hardware address that nobody has, while those to it arrive
        # as before. No firewall is needed for that.
        for address in self.addresses:
            at = (address, "dev", "eth0")
            if address != self.addresses[n] and is_heard:
                self._neighbour(n, "del", *at)
            elif address != self.addresses[n]:
                self._neighbour(n, "replace", *at, "lladdr", _NOWHERE)

    def _port(self, n: int, *words: str) -> None:
        _ip("-n", self._hub, "link", "set", f"port{n}", *words)

    def _neighbour(self, n: int, verb: str, *words: str) -> None:
        last = ("nud", "permanent") if verb == "replace" else ()
        _ip("-n", self.names[n], "neigh", verb, *words, *last)


@contextlib.contextmanager
def switched_network(count: int) -> Iterator[SwitchedNetwork]:
    """Creates ``count`` machines, and removes them after the block.

    Raises:
        NoNamespacesError: This process is not root, or the program ``ip`` is missing.
    """
    if os.geteuid() or shutil.which("ip") is None:
        raise NoNamespacesError("network namespaces need root and the program ip")
    # By process: tests of several processes may have networks side by side.
    network = SwitchedNetwork(count, f"zs{os.getpid()}")
    try:
        try:
            network.make()
        except subprocess.CalledProcessError as error:
            words = error.stderr.decode(errors="replace").strip()
            raise NoNamespacesError(f"no network namespaces: {words}") from error
        yield network
    finally:
        network.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
