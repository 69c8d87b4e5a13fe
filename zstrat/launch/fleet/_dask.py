"""A fleet on Dask: each task is started by an actor in a Dask worker.

When a Dask worker ends, its nanny starts another one at another address, and its actors
are lost. A restarted task goes to the same machine and port as long as there is a Dask
worker on that machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.errors import UnavailableError

from ._fleet import Fleet
from ._piped import TaskHost
from .state import TaskEnd, assign

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zstrat.config import Settings

    from .state import FleetTask, RunningTask, TaskEvents, TaskLaunch

ARRIVAL: Final = 60.0
"""Seconds to wait for a Dask worker; a nanny starts one within seconds."""
CALL_TIMEOUT: Final = 5.0
"""Seconds for a call of an actor's method."""


def host_of(address: str) -> str:
    """Returns the host of ``tcp://10.0.0.7:40123``; loopback for ``inproc://...``."""
    scheme, _, rest = address.partition("://")
    return rest.rpartition(":")[0].strip("[]") if scheme != "inproc" else "127.0.0.1"


@final
class _DaskTask:
    """One task: an actor in a Dask worker, and the thread that waits for the actor's
    results."""

    def __init__(
        self, engine: DaskEngine, launch: TaskLaunch, events: TaskEvents
    ) -> None:
        self._engine, self._launch, self._events = engine, launch, events
        self._actor: Any = None
        self._is_ending = threading.Event()
        name = f"zstrat reads {launch.task.name}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def drain(self) -> None:
        self._call("drain")

    def kill(self) -> None:
        self._call("kill")

    def _call(self, name: str) -> None:
        self._is_ending.set()
        # A call blocks until the actor answers, and a lost one never does: not on the
        # thread of the fleet.
        if (actor := self._actor) is not None:
            method = actor.drain if name == "drain" else actor.kill
            thread = threading.Thread(
                target=_ignore_errors, args=(method,), daemon=True
            )
            thread.start()

    def _run(self) -> None:
        try:
            end = self._run_actor()
        except Exception as error:
            # Reported to the fleet: any error of Dask means that the actor is lost.
            words = " ".join(f"{type(error).__name__} {error}".split())
            end = TaskEnd("was lost with its Dask worker", why=words)
        self._events.ended(end)

    def _run_actor(self) -> TaskEnd:
        future = self._engine.submit(self._launch)
        self._actor = actor = future.result()
        # `drain` or `kill` came before the actor was there.
        if self._is_ending.is_set():
            self.kill()
        if address := actor.address().result():
            self._events.bound(address)
        end: TaskEnd = actor.over().result()
        # Dask keeps an actor as long as its future is referenced.
        future.release()
        return end


def _ignore_errors(method: Any) -> None:
    # A lost actor has ended already, which its thread reports.
    with contextlib.suppress(Exception):
        method().result(CALL_TIMEOUT)


@final
class DaskEngine:
    """Starts each task by an actor in a Dask worker."""

    name = "Dask"

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        """Number of tasks that were given to each Dask worker."""
        self._hosts: dict[str, str] = {}
        """The last host of each task."""

    def start(self, launch: TaskLaunch, events: TaskEvents) -> RunningTask:
        return _DaskTask(self, launch, events)

    def close(self) -> None:
        """Does nothing: actors are released with their tasks."""

    def submit(self, launch: TaskLaunch) -> Any:
        """Submits an actor that starts the task; returns its future. Blocks until there
        is a Dask worker."""
        before = host_of(f"tcp://{launch.bind}") if launch.bind else launch.task.where
        worker = self._worker(before)
        host = host_of(worker)
        return self._client.submit(
            TaskHost,
            self._launch_on(host, launch),
            host,
            actor=True,
            # The launch is adapted to this host.
            workers=[worker],
            allow_other_workers=False,
            # Otherwise equal arguments are one result, of an attempt before.
            pure=False,
        )

    def _launch_on(self, host: str, launch: TaskLaunch) -> TaskLaunch:
        """Adapts the launch of a task to its host: on another host than planned, counts
        the task with the tasks of its job there."""
        task = launch.task
        with self._lock:
            self._hosts[task.name] = host
            if host == task.where:
                return launch
            names = [name for name, other in self._hosts.items() if other == host]
        count = sum(name.startswith(f"{task.job}:") for name in names)
        return dataclasses.replace(launch, on_host=count, rank=count - 1)

    def _worker(self, host: str) -> str:
        """Chooses the Dask worker on ``host`` with the fewest tasks, or else on any."""
        # After a lost worker its nanny takes a moment to start the next one.
        self._client.wait_for_workers(1, timeout=ARRIVAL)
        workers: list[str] = list(self._client.nthreads())
        on_host = [worker for worker in workers if host_of(worker) == host]
        # Counted at once: the threads of several tasks choose at the same time.
        with self._lock:
            chosen = min(on_host or workers, key=lambda worker: self._counts[worker])
            self._counts[chosen] += 1
        return chosen


def dask(
    client: Any,
    num_ps: int = 1,
    num_workers: int = 1,
    *,
    restarts: int = 5,
    window: float = 600.0,
    env: Mapping[str, str] | None = None,
    settings: Settings | None = None,
) -> Fleet:
    """Starts parameter servers and workers on the machines of a Dask cluster.

        with zs.launch.dask(client, num_ps=2, num_workers=8) as cluster:
            strategy = zs.ParameterServerStrategy(cluster)

    The tasks run as separate processes on the machines of the Dask workers, which can
    still be used for other work. Each run has its own keys. The tasks log where the
    Dask workers log.

    Args:
        client: A synchronous `distributed.Client`.
        num_ps, num_workers: Number of parameter servers and workers.
        restarts, window: A task that fails or is lost with its Dask worker is restarted
            at its address, at most ``restarts`` times within ``window`` seconds. If its
            machine has no Dask worker, it moves to another machine, and
            ``cluster.resolver`` returns its new address.
        env: Variables for the tasks.
        settings: Timeouts; default: from ``ZSTRAT_*``.

    Raises:
        ImportError: Dask's ``distributed`` is not installed.
        TypeError: ``client`` is not a synchronous client.
        ValueError: A number is below 1.
        UnavailableError: Dask has no worker, or a task ended before it was ready.
        DeadlineExceededError: A task was not ready within ``timeouts.connect``.
    """
    try:
        import distributed
    except ImportError as error:
        raise ImportError(
            "Dask is not installed: pip install 'zstrat[dask]'"
        ) from error
    if not isinstance(client, distributed.Client) or client.asynchronous:
        raise TypeError(
            f"client: expected a synchronous distributed.Client, got {client!r:.80}"
        )
    if num_ps < 1 or num_workers < 1:
        raise ValueError(
            f"num_ps={num_ps}, num_workers={num_workers}: expected 1 or more of each"
        )
    return Fleet(
        DaskEngine(client),
        _tasks(client.nthreads(), num_ps, num_workers),
        restarts=restarts,
        window=window,
        env=env,
        logs="terminal",
        settings=settings,
    )


def _tasks(workers: Iterable[str], num_ps: int, num_workers: int) -> list[FleetTask]:
    """Assigns the tasks round robin to the machines of the Dask workers.

    Raises:
        UnavailableError: There is no Dask worker.
    """
    hosts = [host_of(worker) for worker in workers]
    if not hosts:
        raise UnavailableError(
            "the Dask cluster has no workers: start one (dask worker ADDRESS), or "
            "scale the cluster and wait for it (client.wait_for_workers(1))"
        )
    return assign(num_ps, num_workers, itertools.cycle(hosts))
