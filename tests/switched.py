"""Machines that are network namespaces on one switch, and what befalls their lines."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess

NOWHERE = "02:00:00:00:00:99"
"""The address of a card that no machine has."""


class NotHereError(Exception):
    """No namespaces can be made here; says why, in words."""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Machines:
    """``count`` machines, 10.99.0.1 and so on. The switch is in one more namespace, the
    *hub*, which has no address. They are there between `make` and `remove`, for all
    processes that know their ``name``."""

    def __init__(self, count, name):
        self.name = name
        self.hub = f"{name}-hub"
        self.names = [f"{name}-{n}" for n in range(count)]
        self.addresses = [f"10.99.0.{n + 1}" for n in range(count)]

    def inside(self, name):
        """What a command begins with that runs on that machine."""
        return ["ip", "netns", "exec", name]

    def make(self):
        """
        Raises:
            subprocess.CalledProcessError: It is not permitted; some may be there.
        """
        for name in (*self.names, self.hub):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.hub, "link", "add", "switch", "type", "bridge")
        ip("-n", self.hub, "link", "set", "switch", "up")
        for n, name in enumerate(self.names):
            peer = ("type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self.hub, "link", "add", f"port{n}", *peer)
            self._port(n, "master", "switch", "up")
            ip("-n", name, "addr", "add", f"{self.addresses[n]}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def remove(self):
        for name in (*self.names, self.hub):
            with contextlib.suppress(subprocess.CalledProcessError):  # never made
                ip("netns", "del", name)

    # ---- faults

    def plug(self, n, is_in):
        """The cable of a machine; while it is out, its card says that there is none."""
        self._port(n, "up" if is_in else "down")

    def switch(self, n, passes):
        """Whether the switch passes on what a machine sends and is sent, or loses all
        of it; nobody is told."""
        self._port(n, *(["master", "switch"] if passes else ["nomaster"]))

    def mute(self, n, is_heard):
        """Whether what a machine sends arrives; what it is sent does."""
        for address in self.addresses:
            at = (address, "dev", "eth0")
            if address != self.addresses[n] and is_heard:
                self._neighbour(n, "del", *at)
            elif address != self.addresses[n]:
                self._neighbour(n, "replace", *at, "lladdr", NOWHERE)

    def _port(self, n, *words):
        ip("-n", self.hub, "link", "set", f"port{n}", *words)

    def _neighbour(self, n, verb, *words):
        last = ("nud", "permanent") if verb == "replace" else ()
        ip("-n", self.names[n], "neigh", verb, *words, *last)


@contextlib.contextmanager
def switched(count):
    """Makes machines, and removes them.

    Raises:
        NotHereError: We may not, or there is no program for it.
    """
    if os.geteuid() or shutil.which("ip") is None:
        raise NotHereError("network namespaces need root and the program ip")
    machines = Machines(count, f"zs{os.getpid()}")
    try:
        try:
            machines.make()
        except subprocess.CalledProcessError as error:
            words = error.stderr.decode(errors="replace").strip()
            raise NotHereError(f"no network namespaces: {words}") from error
        yield machines
    finally:
        machines.remove()
