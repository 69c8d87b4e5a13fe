"""TF's ``Server``: a task that a program serves itself, on a separate thread.

SIGTERM and SIGHUP drain the servers of a program before it ends. zstrat handles these
signals only if the program has no handler of its own, does not ignore the signal, and
starts its servers on the main thread, the only one on which Python can set handlers. If
the main thread is in `Server.join`, that call returns and the program continues, as
when a coordinator ends the servers. Otherwise the signal ends the program after the
drain.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from zstrat.cluster import ClusterSpec
from zstrat.config import environment, settings_from
from zstrat.signals import handle
from zstrat.threads import Promise, SteadyThread
from zstrat.transport import close_portals
from zstrat.transport import run as run_loop

from ._task import TaskAddress, serve

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

    from zstrat.config import Settings

    from ._task import Task


_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


class ShutdownSignals:
    """Handles SIGTERM and SIGHUP in a program that has servers."""

    def __init__(self) -> None:
        self._joins = 0

    def install(self) -> None:
        """Sets handlers for signals for which the program has none. Idempotent."""
        # Python sets handlers on the main thread only. A server that is started on
        # another one is drained only if the program exits by itself.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # Not for SIG_IGN, which nohup sets for SIGHUP.
                if signal.getsignal(number) is signal.SIG_DFL:
                    handle(number, self._received)

    def uninstall(self) -> None:
        """Restores the default handlers when no server is left."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # Not a handler that the program has set since.
                if signal.getsignal(number) == self._received:
                    signal.signal(number, signal.SIG_DFL)

    def __enter__(self) -> None:
        """Marks the main thread as waiting in `Server.join`."""
        if threading.current_thread() is threading.main_thread():
            self._joins += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._joins -= 1

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.uninstall()  # a second signal ends the process at once
        handle(signal.SIGHUP, signal.SIG_IGN)  # shell and terminal may both send it
        # All begin to drain before the first one is waited for, so that several servers
        # take the time of one.
        for server in list(_running):
            if server._run is not None:
                name = signal.Signals(number).name
                server._run.end_soon(f"{name} (once more ends at once)")
        # In `join` the handler need not wait: `join` does, and then the program cleans
        # up. Elsewhere nothing else would end the program.
        if not self._joins:
            for server in list(_running):
                server.stop()  # within its drain
            # By the signal itself, not by sys.exit: the parent sees what ended us.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


PROTOCOLS: Final = ("tcp", "zmq", "grpc")
"""Accepted values of ``protocol``; "grpc" is for programs written for TensorFlow. All
of them mean ZeroMQ."""


@dataclass(frozen=True, slots=True)
class ServerDef:
    """The cluster of a server, and its task in it."""

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str = "tcp"

    @property
    def address(self) -> str:
        """The address of this task in the cluster."""
        return str(self.cluster.task_address(self.job_name, self.task_index))


class Server:
    """Serves one ps or worker from this process until the server is stopped, or the
    program ends.

    SIGTERM and SIGHUP drain the server, if it was started on the main thread and the
    program has no handlers of its own. Then `join` returns, or if the main thread is
    not in `join`, the program ends by the signal. A second SIGTERM ends the program at
    once.

    Args:
        server_or_cluster_def: A `ServerDef`, or a `ClusterSpec` or its dictionary.
        job_name, task_index: The task; optional if the cluster has only one.
        protocol: "tcp" (default) or, as in TensorFlow, "grpc"; both use ZeroMQ.
        config: `zstrat.config.Settings`; default: from ``ZSTRAT_*``.
        start: Whether to serve at once.

    Raises:
        ValueError: The task is ambiguous or not in the cluster.
        TypeError: The first argument does not describe a cluster.
    """

    def __init__(
        self,
        server_or_cluster_def: ServerDef | ClusterSpec | Mapping[str, Any],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Settings | None = None,
        start: bool = True,
    ) -> None:
        self._def = _definition_of(
            server_or_cluster_def, job_name, task_index, protocol
        )
        self._settings = config or settings_from(environment())
        self._run: ServerRun | None = None
        if start:
            self.start()

    @staticmethod
    def create_local_server(
        config: Settings | None = None, start: bool = True
    ) -> Server:
        """Makes a worker of a cluster of one task, on a free loopback port."""
        local = ClusterSpec({"worker": ["127.0.0.1:0"]})
        return Server(local, protocol="tcp", config=config, start=start)

    @property
    def server_def(self) -> ServerDef:
        return self._def

    @property
    def target(self) -> str:
        """The address of this server, such as "tcp://127.0.0.1:2222"."""
        task = None if self._run is None else self._run.task
        address = task.address if task is not None else self._def.address
        if "://" in address:
            return address
        return f"{self._def.protocol}://{address}"

    def start(self) -> None:
        """Starts to serve, also after `stop`; returns when the task answers. Does
        nothing if the server serves already.

        Cancellation: Ctrl-C stops the server again, then raises.

        Raises:
            ZstratError, OSError: The address cannot be bound. The call may be repeated.
        """
        try:
            if self._run is None or self._run.is_over:
                self._run = ServerRun(self._def, self._settings)
                # First: if Ctrl-C strikes in `start`, `stop` and the exit find it.
                _running.add(self)
                self._run.thread.start()
            self._run.started.get()
            _shutdown_signals.install()
        except Exception:  # to the caller, who may try again
            _running.discard(self)
            self._run = None
            raise
        except BaseException:  # Ctrl-C: the caller of the constructor has no server
            self.stop()
            self._run = None
            raise

    def join(self) -> None:
        """Blocks until `stop` or a coordinator stops the server.

        TensorFlow's ``join`` never returns; here the program can clean up afterwards.
        """
        if self._run is None:
            raise RuntimeError("this server is not started: call start() first")
        with _shutdown_signals:
            self._run.thread.join()

    def stop(self) -> None:
        """Finishes the accepted requests and closes the server; then `join` returns.
        Idempotent."""
        if self._run is None:
            return
        self._run.end_soon("stopped by its program")
        # False as well if Ctrl-C came before the thread was started.
        if self._run.thread.is_alive():
            self._run.thread.join()
        _running.discard(self)
        if not _running:
            _shutdown_signals.uninstall()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@final
class ServerRun:
    """The thread of a server and the task that it serves."""

    def __init__(self, definition: ServerDef, settings: Settings) -> None:
        self.started: Promise[None] = Promise()
        self.task: Task | None = None
        """The task, once it serves; None before."""
        self._def, self._settings = definition, settings
        self._reason = ""
        name = f"zstrat server {definition.job_name}:{definition.task_index}"
        self.thread = SteadyThread(self._run, name=name)

    @property
    def is_over(self) -> bool:
        """Whether the task has ended, or could not be served."""
        return self.started.is_there and not self.thread.is_alive()

    def end_soon(self, reason: str) -> None:
        """Requests the end of the task, even before it serves."""
        self._reason = reason  # before reading `task`, which `_serve` sets first
        if self.task is not None:
            self.task.end_soon(reason)

    def _run(self) -> None:
        if self._reason:
            self.started.settle(None)  # stopped before it began: `start` must return
            return
        try:
            run_loop(self._serve())
        except BaseException as error:
            # `start` raises it again. Once `start` has returned, the thread reports it
            # through `threading.excepthook`, like any other thread.
            if self.started.is_there:
                raise
            self.started.fail(error)

    async def _serve(self) -> None:
        definition = self._def
        address = TaskAddress(
            definition.job_name, definition.task_index, definition.address
        )
        async with serve(address, self._settings) as task:
            self.task = task
            # `end_soon` may have run before `task` was there.
            if self._reason:
                task.end(self._reason)
            self.started.settle(None)
            await task.wait_end()


def _definition_of(
    given: ServerDef | ClusterSpec | Mapping[str, Any],
    job: str | None,
    index: int | None,
    protocol: str | None,
) -> ServerDef:
    if protocol is not None and protocol not in PROTOCOLS:
        raise ValueError(f"protocol={protocol!r}: expected one of {PROTOCOLS}")
    if isinstance(given, ServerDef):
        definition = replace(
            given,
            job_name=given.job_name if job is None else job,
            task_index=given.task_index if index is None else index,
            protocol=given.protocol if protocol is None else protocol,
        )
    else:
        cluster = ClusterSpec(given)
        job = _given_or_only("job_name", job, cluster.jobs)
        index = _given_or_only("task_index", index, cluster.task_indices(job))
        definition = ServerDef(cluster, job, index, protocol or "tcp")
    _ = definition.address  # raises if there is no such task
    # The index may be an integer of numpy.
    return replace(definition, task_index=int(definition.task_index))


_running: Final[weakref.WeakSet[Server]] = weakref.WeakSet()


_shutdown_signals: Final = ShutdownSignals()


def _end_all() -> None:
    """Stops all servers at exit, after the sessions of this program that use them. At a
    later time the interpreter would kill threads inside the C++ code of jax, which
    aborts the process."""
    running = list(_running)
    # Portals close at exit by themselves. With servers they close first, as sessions
    # of this program would wait for answers of a server that has stopped.
    if running:
        close_portals()
    for server in running:
        server.stop()


# `atexit` is too late: jax clears its backends there, and thread pools are closed
# already. The thread pools themselves use this hook.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]

T = TypeVar("T", str, int)


def _given_or_only(name: str, given: T | None, choices: Iterable[T]) -> T:
    """Returns ``given``, or if it is None the only one of the choices."""
    known = list(choices)
    if given is not None:
        return given
    if len(known) != 1:
        raise ValueError(f"must specify an explicit `{name}`: the cluster has {known}")
    return known[0]
