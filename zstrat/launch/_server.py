"""A task served inside this process: TF's ``Server``, on a thread of its own.

SIGTERM and SIGHUP make the servers of a program drain, and then it ends. Nothing
happens where the program has a handler of its own, or ignores a signal, or makes its
servers on another thread than its main one, as Python lets no other handle signals:
then the program decides. A program whose main thread is in `Server.join` goes on behind
it, as if its coordinator had ended the servers. Any other ends by the signal, as it
would have without servers.
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
    from collections.abc import Callable, Iterable, Mapping
    from types import FrameType

    from zstrat.config import Settings

    from ._task import Task


_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


class Departure:
    """Takes the signals of a program that has servers.

    Args:
        ask: Asks all servers to end; returns at once.
        wait: Waits until all have ended, within their drain.
    """

    def __init__(self, ask: Callable[[str], None], wait: Callable[[], None]) -> None:
        self._ask, self._wait = ask, wait
        self._joins = 0

    def listen(self) -> None:
        """From now on, if nobody else does; may be repeated."""
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                if signal.getsignal(each) is signal.SIG_DFL:
                    handle(each, self._told)

    def leave(self) -> None:
        """There are no servers any more: the signals are as they were."""
        if threading.current_thread() is threading.main_thread():
            for each in _SIGNALS:
                if signal.getsignal(each) == self._told:
                    signal.signal(each, signal.SIG_DFL)

    def __enter__(self) -> None:
        """The main thread waits for a server, and goes on once that has ended."""
        if threading.current_thread() is threading.main_thread():
            self._joins += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._joins -= 1

    def _told(self, number: int, frame: FrameType | None) -> None:
        self.leave()  # the second one ends the process at once
        handle(signal.SIGHUP, signal.SIG_IGN)  # shell and terminal may both go
        self._ask(f"{signal.Signals(number).name} (once more ends at once)")
        if not self._joins:
            self._wait()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


PROTOCOLS: Final = ("tcp", "zmq", "grpc")
"""Words for the wire; "grpc" is what programs that come from TensorFlow say. They all
mean ZeroMQ."""


@dataclass(frozen=True, slots=True)
class ServerDef:
    """Which task of which cluster a server is."""

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str = "tcp"

    @property
    def address(self) -> str:
        """Where the cluster expects this task."""
        return str(self.cluster.task_address(self.job_name, self.task_index))


class Server:
    """Serves one ps or worker from this process until it is stopped, or the program
    ends.

    SIGTERM and SIGHUP drain it, if it was started on the main thread and the program
    has no handlers of its own: `join` returns, or else the program ends by the signal
    behind the drain. A second SIGTERM ends it at once.

    Args:
        server_or_cluster_def: A `ServerDef`, a `ClusterSpec` or what makes one.
        job_name, task_index: Which task; may be left out if there is only one.
        protocol: "tcp" (default), or "grpc" as TensorFlow says; ZeroMQ either way.
        config: `zstrat.config.Settings`; default: from ``ZSTRAT_*``.
        start: Whether to serve at once.

    Raises:
        ValueError: It is not clear which task this is, or that task is not there.
        TypeError: The cluster is none.
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
        self._def = _define(server_or_cluster_def, job_name, task_index, protocol)
        self._settings = config or settings_from(environment())
        self._run: ServerRun | None = None
        if start:
            self.start()

    @staticmethod
    def create_local_server(
        config: Settings | None = None, start: bool = True
    ) -> Server:
        """A worker of a cluster of its own, on a free loopback port."""
        local = ClusterSpec({"worker": ["127.0.0.1:0"]})
        return Server(local, protocol="tcp", config=config, start=start)

    @property
    def server_def(self) -> ServerDef:
        return self._def

    @property
    def target(self) -> str:
        """Where this server is reached, such as "tcp://127.0.0.1:2222"."""
        task = None if self._run is None else self._run.task
        address = task.address if task is not None else self._def.address
        if "://" in address:
            return address
        return f"{self._def.protocol}://{address}"

    def start(self) -> None:
        """Binds and serves; returns when the task answers. Once started, does nothing.

        Cancellation: Ctrl-C ends what has begun, and is raised when it has ended.

        Raises:
            ZstratError, OSError: The address cannot be bound; says why. It may be
                tried again.
        """
        try:
            if self._run is None:
                self._run = ServerRun(self._def, self._settings)
                _running.add(self)
                self._run.thread.start()
            self._run.started.get()
            _departure.listen()
        except Exception:  # to the caller, who may try again
            _running.discard(self)
            self._run = None
            raise
        except BaseException:  # Ctrl-C: the caller of the constructor has no server
            self.stop()
            self._run = None
            raise

    def join(self) -> None:
        """Blocks until the server is stopped: by `stop`, or by its coordinator.

        TensorFlow's never returns; a program here can go on and clean up.
        """
        if self._run is None:
            raise RuntimeError("this server was not started: call start() first")
        with _departure:
            self._run.thread.join()

    def stop(self) -> None:
        """Finishes what was accepted, closes, lets `join` return. May be repeated."""
        if self._run is None:
            return
        self._run.end_soon("stopped by its program")
        if self._run.thread.is_alive():
            self._run.thread.join()
        _running.discard(self)
        if not _running:
            _departure.leave()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@final
class ServerRun:
    """The thread of a server, and what it serves."""

    def __init__(self, definition: ServerDef, settings: Settings) -> None:
        self.started: Promise[None] = Promise()
        self.task: Task | None = None
        """Once it serves."""
        self._def, self._settings = definition, settings
        self._reason = ""
        name = f"zstrat server {definition.job_name}:{definition.task_index}"
        self.thread = SteadyThread(self._live, name=name)

    def end_soon(self, reason: str) -> None:
        """Asks it to end, also one that does not serve yet."""
        self._reason = reason  # before the look: see `_serve`
        if self.task is not None:
            self.task.end_soon(reason)

    def _live(self) -> None:
        if self._reason:
            self.started.settle(None)  # it is over: `start` must not wait for it
            return
        try:
            run_loop(self._serve())
        except BaseException as error:
            # Raised again where `start` waits; after that nobody waits, and the
            # thread reports it as any thread does.
            if self.started.is_there:
                raise
            self.started.fail(error)

    async def _serve(self) -> None:
        mine = self._def
        place = TaskAddress(mine.job_name, mine.task_index, mine.address)
        async with serve(place, self._settings) as task:
            self.task = task
            if self._reason:
                task.end(self._reason)
            self.started.settle(None)
            await task.wait_end()


def _define(
    given: ServerDef | ClusterSpec | Mapping[str, Any],
    job: str | None,
    index: int | None,
    protocol: str | None,
) -> ServerDef:
    if protocol is not None and protocol not in PROTOCOLS:
        raise ValueError(f"protocol={protocol!r}: expected one of {PROTOCOLS}")
    if isinstance(given, ServerDef):
        made = replace(
            given,
            job_name=given.job_name if job is None else job,
            task_index=given.task_index if index is None else index,
            protocol=given.protocol if protocol is None else protocol,
        )
    else:
        cluster = ClusterSpec(given)
        job = _only("job_name", job, cluster.jobs)
        index = _only("task_index", index, cluster.task_indices(job))
        made = ServerDef(cluster, job, index, protocol or "tcp")
    _ = made.address  # raises if there is no such task
    return replace(made, task_index=int(made.task_index))  # one of numpy is one, too


_running: Final[weakref.WeakSet[Server]] = weakref.WeakSet()


def _ask_all(reason: str) -> None:
    for server in list(_running):
        if server._run is not None:
            server._run.end_soon(reason)


def _wait_for_all() -> None:
    for server in list(_running):
        server.stop()


_departure: Final = Departure(_ask_all, _wait_for_all)


def _end_all() -> None:
    """At the program's end, while threads may still end as threads do. Later the
    interpreter would tear those that compute out of jax's C++, which aborts the
    process. Who uses the servers from this program leaves first."""
    running = list(_running)
    if running:
        close_portals()
    for server in running:
        server.stop()


# `atexit` is too late: jax clears its backends there, and the pools of threads are
# closed. This is what those pools themselves use.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]

T = TypeVar("T", str, int)


def _only(name: str, given: T | None, choices: Iterable[T]) -> T:
    """What was given, or else the only choice there is."""
    known = list(choices)
    if given is not None:
        return given
    if len(known) != 1:
        raise ValueError(f"must specify an explicit `{name}`: the cluster has {known}")
    return known[0]
