"""``python -m zstrat.daemons.fork_server FD``: the process that the daemons of a
`LocalCluster` are forked from (`zstrat.launch._fork_server` has the other side).

It imports what they need, and starts no thread and no backend of jax: what is forked is
a process that has imported, and nothing else. It ends when the program does, and the
kernel kills the daemons then, which have asked for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Final, final

from zstrat.launch import (
    CONTINUED,
    ORDER,
    STOPPED,
    WORD,
    choose_devices,
    kept_for_good,
)
from zstrat.signals import handle

from . import ps, worker
from ._process_name import show_as

MAINS: Final = {"ps": ps.main, "worker": worker.main}


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """A process that is to be forked: what it finds, and its descriptors."""

    job: str
    arguments: list[str]
    environment: dict[str, str]
    stdin: int
    output: int
    report: int
    told: int
    folder: int


def main() -> None:
    """Entry point; of each daemon, too."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    with kept_for_good():
        # What the code of a step function brings with it stands for a strategy.
        from zstrat.strategy import Strategy  # noqa: F401
        from zstrat.worker import WorkerService  # noqa: F401
    daemon = Forks(requests).forked()
    if daemon is not None:
        _take_place(daemon)
        MAINS[daemon.job]([*daemon.arguments, *_ties(daemon)])


@final
class Forks:
    """Forks what it is asked for, and tells how each has ended. ``requests`` is the end
    of a socket of which a `zstrat.launch.ForkServer` has the other."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests, self._running = requests, dict[int, int]()
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        # Where a process that the program has forked keeps the other end open.
        with contextlib.suppress(OSError):  # an old kernel
            parent = os.pidfd_open(os.getppid())
            self._selector.register(parent, selectors.EVENT_READ)
        self._ends, told = os.pipe()
        for end in (self._ends, told):
            os.set_blocking(end, False)
        handle(signal.SIGCHLD, lambda number, frame: None)  # not in what is forked
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        self._selector.register(self._ends, selectors.EVENT_READ)
        self._own = self._ends, told

    def forked(self) -> ForkOrder | None:
        """Returns in each process that it forks with what that is; None when the
        program has ended."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._ends:
                    os.read(self._ends, 4096)
                    self._reap()
                    continue
                is_asked = key.fileobj is self._requests
                daemon = self._asked() if is_asked else None
                if daemon is None or self._fork(daemon):
                    return daemon

    def _asked(self) -> ForkOrder | None:
        head, descriptors, _, _ = socket.recv_fds(self._requests, len(ORDER), 6)
        if not head:
            return None
        with open(descriptors.pop(), "rb") as text:
            order: dict[str, Any] = json.load(text)
        return ForkOrder(
            order["job"], order["arguments"], order["environment"], *descriptors
        )

    def _fork(self, daemon: ForkOrder) -> bool:
        """Whether this is the daemon."""
        with warnings.catch_warnings():
            # Python warns of other threads: numpy has those of its BLAS, which starts
            # new ones behind a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._forget()
            _reseed()
            return True
        self._running[pid] = daemon.told
        with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
            os.write(daemon.told, WORD.pack(pid))
        for each in (daemon.stdin, daemon.output, daemon.report, daemon.folder):
            os.close(each)
        return False

    def _forget(self) -> None:
        """What only the fork server needs."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._requests:
                os.close(key.fd)
        os.close(self._own[1])
        self._selector.close()
        self._requests.close()
        for told in self._running.values():
            os.close(told)

    def _reap(self) -> None:
        """Tells what has become of daemons."""
        for pid, told in list(self._running.items()):
            while True:
                flags = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
                changed, status = os.waitpid(pid, flags)
                if not changed:
                    break
                with contextlib.suppress(BrokenPipeError):
                    os.write(told, WORD.pack(_word(status)))
                if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                    del self._running[pid]
                    os.close(told)
                    break


def _reseed() -> None:
    """Gives numpy's global generator the state of a process that has just imported it:
    all that are forked would have the same. Python's `random` and what draws names and
    ids do so by themselves."""
    if (module := sys.modules.get("numpy.random")) is not None:
        module.set_bit_generator(module.MT19937())


def _word(status: int) -> int:
    if os.WIFSTOPPED(status):
        return STOPPED
    if os.WIFCONTINUED(status):
        return CONTINUED
    return os.waitstatus_to_exitcode(status)


def _take_place(daemon: ForkOrder) -> None:
    """Makes this process what the daemon would be if it were started."""
    show_as(f"zstrat-{daemon.job}", *daemon.arguments)
    # Ctrl-C at the terminal is for the program; it then ends its daemons.
    os.setsid()
    os.fchdir(daemon.folder)
    for number, descriptor in enumerate((daemon.stdin, daemon.output, daemon.output)):
        os.dup2(descriptor, number)
    for each in {daemon.stdin, daemon.output, daemon.told, daemon.folder}:
        os.close(each)
    os.environ.clear()
    os.environ.update(daemon.environment)
    choose_devices({"JAX_PLATFORMS": daemon.environment.get("JAX_PLATFORMS", "")})


def _ties(daemon: ForkOrder) -> tuple[str, ...]:
    return "--parent", str(os.getppid()), "--report", str(daemon.report)


if __name__ == "__main__":
    main()
