"""``python -m zstrat.daemons.fork_server FD``: the process from which the daemons of a
`LocalCluster` are forked (`zstrat.launch._fork_server` is its client).

It imports the modules of the daemons, but starts no thread and no backend of jax, as
neither survives a fork. It ends when the program ends; then the kernel kills the
daemons, which asked for that signal.
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
    REQUEST,
    STOPPED,
    WORD,
    choose_devices,
    kept_for_good,
)
from zstrat.signals import handle

from . import ps, worker
from ._supervision import show_as

MAINS: Final = {"ps": ps.main, "worker": worker.main}


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A request to fork a daemon, with its environment and file descriptors."""

    job: str
    arguments: list[str]
    environment: dict[str, str]
    stdin: int
    output: int
    report: int
    status: int
    folder: int


def main() -> None:
    """Runs the fork server, and a daemon in each process that the fork server forks."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    # Frozen objects are not touched by collections, so their pages stay shared with the
    # forked daemons.
    with kept_for_good():
        # Step functions of users refer to strategies, which a worker then imports.
        from zstrat.strategy import Strategy  # noqa: F401
        from zstrat.worker import WorkerService  # noqa: F401
    daemon = ForkLoop(requests).run()
    # On the empty stack of `main`, so that nothing of the loop lives on in the daemon.
    if daemon is not None:
        _become_daemon(daemon)
        parent = "--parent", str(os.getppid()), "--report", str(daemon.report)
        MAINS[daemon.job]([*daemon.arguments, *parent])


@final
class ForkLoop:
    """Forks the requested daemons, and reports when each of them stops, continues or
    ends. ``requests`` is connected to a `zstrat.launch.ForkServer`."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests, self._running = requests, dict[int, int]()
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        # The socket alone is not enough: a process that the program forked may keep
        # the other end open.
        with contextlib.suppress(OSError):  # a kernel before 5.3
            parent = os.pidfd_open(os.getppid())
            self._selector.register(parent, selectors.EVENT_READ)
        self._wakeups, self._wakeup_writer = os.pipe()
        # Python demands a writer that does not block: a full pipe must not stop the
        # process in a signal handler.
        for end in (self._wakeups, self._wakeup_writer):
            os.set_blocking(end, False)
        # A handler that does nothing: with SIG_DFL the kernel would not wake us, and
        # with SIG_IGN it would reap our children itself. `handle` resets it in the
        # forked processes.
        handle(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        self._selector.register(self._wakeups, selectors.EVENT_READ)

    def run(self) -> ForkRequest | None:
        """Serves requests. Returns the request in each forked process, and None in the
        fork server when the program has ended."""
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._wakeups:
                    # Emptied before the reaping: a signal that comes meanwhile wakes
                    # the selector again.
                    os.read(self._wakeups, 4096)
                    self._reap()
                    continue
                # Otherwise it is a request, its end, or the end of the parent.
                is_request = key.fileobj is self._requests
                daemon = self._receive_request() if is_request else None
                if daemon is None or self._fork(daemon):
                    return daemon

    def _receive_request(self) -> ForkRequest | None:
        head, descriptors, _, _ = socket.recv_fds(self._requests, len(REQUEST), 6)
        if not head:
            return None
        # Its offset is shared with the sender, who has set it back to 0.
        with open(descriptors.pop(), "rb") as text:
            request: dict[str, Any] = json.load(text)
        return ForkRequest(
            request["job"], request["arguments"], request["environment"], *descriptors
        )

    def _fork(self, daemon: ForkRequest) -> bool:
        """Forks this process; returns True in the new process."""
        with warnings.catch_warnings():
            # Python warns because other threads run: those of numpy's BLAS, which
            # starts new ones after a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._close_all()
            _reseed()
            return True
        # Reported before any end of the process: `_reap` runs in this thread, later.
        self._running[pid] = daemon.status
        with contextlib.suppress(BrokenPipeError):  # the program closed its end
            os.write(daemon.status, WORD.pack(pid))
        for descriptor in (daemon.stdin, daemon.output, daemon.report, daemon.folder):
            os.close(descriptor)
        return False

    def _close_all(self) -> None:
        """Closes, in a forked process, the descriptors of the fork server."""
        for key in list(self._selector.get_map().values()):
            # The socket is an object, which would close its number a second time, when
            # that may be another file's.
            if key.fileobj is not self._requests:
                os.close(key.fd)
        os.close(self._wakeup_writer)
        self._selector.close()
        self._requests.close()
        # Of the daemons before this one: an open writer would hide the end of the fork
        # server from the program.
        for status in self._running.values():
            os.close(status)

    def _reap(self) -> None:
        """Reports to the program which daemons stopped, continued or ended."""
        # SIGCHLD is not counted, so each child is asked, until it has nothing to say:
        # it may have stopped, continued and ended since.
        for pid, status_pipe in list(self._running.items()):
            while True:
                flags = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
                changed, status = os.waitpid(pid, flags)
                if not changed:
                    break
                with contextlib.suppress(BrokenPipeError):
                    os.write(status_pipe, WORD.pack(_word(status)))
                if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                    del self._running[pid]
                    os.close(status_pipe)
                    break


def _reseed() -> None:
    """Seeds numpy's global generator, or all forked processes would draw the same
    numbers. Python's `random` and `uuid` seed themselves after a fork."""
    if (module := sys.modules.get("numpy.random")) is not None:
        module.set_bit_generator(module.MT19937())


def _word(status: int) -> int:
    if os.WIFSTOPPED(status):
        return STOPPED
    if os.WIFCONTINUED(status):
        return CONTINUED
    return os.waitstatus_to_exitcode(status)


def _become_daemon(daemon: ForkRequest) -> None:
    """Gives the forked process the name, session, folder, streams and environment that
    a newly started daemon has."""
    show_as(f"zstrat-{daemon.job}", *daemon.arguments)
    # Ctrl-C in the terminal is for the program, which then ends its daemons.
    os.setsid()
    os.fchdir(daemon.folder)
    # The given descriptors are above 2, which `occupy_descriptors` ensured in the
    # program; so none is overwritten before it is copied.
    for number, descriptor in enumerate((daemon.stdin, daemon.output, daemon.output)):
        os.dup2(descriptor, number)
    for descriptor in {daemon.stdin, daemon.output, daemon.status, daemon.folder}:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(daemon.environment)
    # jax is imported here already, and has read the platforms of the fork server.
    choose_devices({"JAX_PLATFORMS": daemon.environment.get("JAX_PLATFORMS", "")})


if __name__ == "__main__":
    main()
