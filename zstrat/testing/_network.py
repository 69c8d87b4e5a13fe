"""A network of namespaces on one switch, with faults of its cables and switch.

Only for Linux, with root and the program ``ip``. Packets pass through the kernel, so
that faults are realistic: connections are not reset but become silent, as with a broken
cable or switch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
        """Creates the namespaces.

        Raises:
            subprocess.CalledProcessError: A command failed; some namespaces may exist.
        """
        for name in (*self.names, self._hub):
            _ip("netns", "add", name)
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

    @contextlib.contextmanager
    def unplugged(self, n: int) -> Iterator[None]:
        """Unplugs the cable of a machine, which its network card notices."""
        with self._fault(self._plug, n):
            yield

    @contextlib.contextmanager
    def lossy(self, n: int) -> Iterator[None]:
        """Makes the switch silently drop all packets from and to a machine."""
        with self._fault(self._forward, n):
            yield

    @contextlib.contextmanager
    def mute(self, n: int) -> Iterator[None]:
        """Drops all packets from a machine, but not those to it."""
        with self._fault(self._unmute, n):
            yield

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
