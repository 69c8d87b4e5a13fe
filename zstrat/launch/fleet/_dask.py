"""A fleet on Dask: an actor in a worker of Dask for each task.

Dask has no place that is kept: when one of its workers is gone, its nanny starts
another one, at another address, and its actors are lost. So a task that is started
again goes to the same machine, to its port, as long as Dask has a worker there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.errors import UnavailableError

from ._engine import End, distribute_tasks
from ._fleet import Fleet
from ._piped import TaskHost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zstrat.config import Settings

    from ._engine import FleetTask, RunningTask, TaskEvents, TaskLaunch

ARRIVAL: Final = 60.0
"""Seconds for Dask to have a worker again: its nanny starts one within some."""
AT_ONCE: Final = 5.0
"""Seconds for an order to reach an actor."""


def host_of(address: str) -> str:
    """The machine of ``tcp://10.0.0.7:40123``; of this process for ``inproc://...``."""
    scheme, _, rest = address.partition("://")
    return rest.rpartition(":")[0].strip("[]") if scheme != "inproc" else "127.0.0.1"


@final
class _DaskTask:
    """One actor and the thread that listens to it."""

    def __init__(
        self, engine: DaskEngine, launch: TaskLaunch, hear: TaskEvents
    ) -> None:
        self._engine, self._launch, self._hear = engine, launch, hear
        self._actor: Any = None
        self._is_ending = threading.Event()
        name = f"zstrat hears {launch.task.name}"
        threading.Thread(target=self._live, name=name, daemon=True).start()

    def drain(self) -> None:
        self._tell("drain")

    def kill(self) -> None:
        self._tell("kill")

    def _tell(self, what: str) -> None:
        self._is_ending.set()
        if (actor := self._actor) is not None:
            order = actor.drain if what == "drain" else actor.kill
            work = threading.Thread(target=_quietly, args=(order,), daemon=True)
            work.start()

    def _live(self) -> None:
        try:
            end = self._lived()
        except Exception as error:
            # To the fleet. It is Dask's, of many kinds: the actor was lost.
            words = " ".join(f"{type(error).__name__} {error}".split())
            end = End("was lost with its worker of Dask", why=words)
        self._hear.ended(end)

    def _lived(self) -> End:
        held = self._engine.hold(self._launch)
        self._actor = actor = held.result()
        if self._is_ending.is_set():
            self.kill()
        if address := actor.address().result():
            self._hear.bound(address)
        end: End = actor.over().result()
        held.release()
        return end


def _quietly(order: Any) -> None:
    # An actor that is gone has ended, and whoever listens to it says so.
    with contextlib.suppress(Exception):
        order().result(AT_ONCE)


@final
class DaskEngine:
    """Starts each task in an actor on a machine of Dask."""

    name = "Dask"

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        """How many tasks each worker of Dask was given."""
        self._places: dict[str, str] = {}
        """The machine that each task was put on last."""

    def start(self, launch: TaskLaunch, hear: TaskEvents) -> RunningTask:
        return _DaskTask(self, launch, hear)

    def close(self) -> None:
        """Nothing is left: the actors are forgotten with their tasks."""

    def hold(self, launch: TaskLaunch) -> Any:
        """A future of an actor that has begun to start the task. Blocks until there is
        a worker of Dask."""
        before = host_of(f"tcp://{launch.bind}") if launch.bind else launch.task.where
        worker = self._worker(before)
        host = host_of(worker)
        return self._client.submit(
            TaskHost,
            self._beside(launch, host),
            host,
            actor=True,
            workers=[worker],
            allow_other_workers=False,
            pure=False,
        )

    def _beside(self, launch: TaskLaunch, host: str) -> TaskLaunch:
        """The launch on that machine; on another one than was planned the task is one
        more beside those of its job that are there."""
        task = launch.task
        with self._lock:
            self._places[task.name] = host
            if host == task.where:
                return launch
            there = [name for name, at in self._places.items() if at == host]
        count = sum(name.startswith(f"{task.job}:") for name in there)
        return dataclasses.replace(launch, beside=count, place=count - 1)

    def _worker(self, host: str) -> str:
        """The address of that on ``host`` with the fewest tasks, or of any."""
        self._client.wait_for_workers(1, timeout=ARRIVAL)
        there: list[str] = list(self._client.nthreads())
        near = [each for each in there if host_of(each) == host]
        with self._lock:
            chosen = min(near or there, key=lambda each: self._counts[each])
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
    """Parameter servers and workers on the machines of a cluster of Dask.

        with zs.launch.dask(client, num_ps=2, num_workers=8) as cluster:
            strategy = zs.ParameterServerStrategy(cluster)

    The tasks are processes of their own beside the workers of Dask, which go on with
    what they have to do; they are distributed to these in turn, and each run has keys
    of its own. What they log is where the workers of Dask log.

    Args:
        client: A `distributed.Client`, a synchronous one.
        num_ps, num_workers: How many of each.
        restarts, window: A task that ends by itself, or is lost with its worker of
            Dask, is started again on its machine, at its address, so often at most
            within so many seconds. On another machine, if Dask has no worker there any
            more: then ``cluster.resolver`` tells its new address.
        env: Variables for the tasks.
        settings: Timeouts; default: from ``ZSTRAT_*``.

    Raises:
        ImportError: Dask's ``distributed`` is not installed.
        TypeError: ``client`` is something else.
        ValueError: A number cannot be.
        UnavailableError: Dask has no worker, or a task ended before it was ready.
        DeadlineExceededError: A task was not ready in ``timeouts.connect``.
    """
    try:
        import distributed
    except ImportError as error:
        raise ImportError(
            "Dask is not installed here: pip install 'zstrat[dask]'"
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
        _distribute_tasks(client.nthreads(), num_ps, num_workers),
        restarts=restarts,
        window=window,
        env=env,
        logs="terminal",
        settings=settings,
    )


def _distribute_tasks(
    workers: Iterable[str], num_ps: int, num_workers: int
) -> list[FleetTask]:
    """The tasks, to the machines of Dask's workers in turn.

    Raises:
        UnavailableError: There is no worker.
    """
    hosts = [host_of(each) for each in workers]
    if not hosts:
        raise UnavailableError(
            "the cluster of Dask has no worker: start one (dask worker ADDRESS), or "
            "scale the cluster and wait for it (client.wait_for_workers(1))"
        )
    return distribute_tasks(num_ps, num_workers, itertools.cycle(hosts))
