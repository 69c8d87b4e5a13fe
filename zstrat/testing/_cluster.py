"""A cluster on this machine, each task behind a relay, and what can befall its tasks.

The program under test reaches every task through its relay, and so do the workers,
which learn the addresses from it. `DaemonCluster` has real daemons: they can be killed
and frozen. `ThreadCluster` has servers on threads of this process: it starts faster, a
debugger sees all of it, and only its lines can break.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar, final

from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.config import environment, settings_from
from zstrat.launch import LocalCluster, Server
from zstrat.transport import on_own_thread

from ._process import frozen
from ._relay import Relay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from zstrat.config import Settings

T = TypeVar("T")


@contextlib.asynccontextmanager
async def in_thread(
    context: contextlib.AbstractContextManager[T],
) -> AsyncIterator[T]:
    """Any of this package's context managers, or another blocking one, for ``async
    with``: it is entered and left on a thread, and the loop goes on meanwhile.

        async with in_thread(DaemonCluster()) as cluster:
            async with in_thread(cluster.killed("worker:0")):
                ...

    Cancellation: on the way in, waits until the context is entered, and leaves it; on
    the way out it is left all the same.
    """
    stack = contextlib.ExitStack()
    entering = asyncio.ensure_future(asyncio.to_thread(stack.enter_context, context))
    try:
        value = await asyncio.shield(entering)
    except asyncio.CancelledError:
        await asyncio.wait([entering])
        await on_own_thread(stack.close)
        raise
    try:
        yield value
    except BaseException as error:  # the context judges it, as in a `with`
        if not await _leave(stack, error):
            raise
    else:
        await _leave(stack, None)


async def _leave(stack: contextlib.ExitStack, error: BaseException | None) -> bool:
    kind = None if error is None else type(error)
    trace = None if error is None else error.__traceback__
    return bool(await on_own_thread(partial(stack.__exit__, kind, error, trace)))


class RelayedCluster(abc.ABC):
    """Parameter servers and workers; starts on the way into ``with``.

        with DaemonCluster(num_ps=2, num_workers=2) as cluster:
            strategy = zs.ParameterServerStrategy(cluster.resolver)
            ...
            with cluster.blackholed("ps:1"):
                ...

    Args:
        num_ps, num_workers: How many of each.
        settings: Timeouts of the tasks; default: from ``ZSTRAT_*``. A test that waits
            for a loss wants short ones, and gives its strategy the same.
    """

    def __init__(
        self,
        num_ps: int = 1,
        num_workers: int = 1,
        *,
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or settings_from(environment())
        self._counts = {"ps": num_ps, "worker": num_workers}
        self._relays: dict[str, Relay] = {}
        self._stack = contextlib.ExitStack()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names such as "ps:0", parameter servers first."""
        return tuple(self._relays)

    @property
    def spec(self) -> ClusterSpec:
        """Where the relays listen."""
        jobs: dict[str, list[str]] = {}
        for task, relay in self._relays.items():
            jobs.setdefault(task.partition(":")[0], []).append(relay.address)
        return ClusterSpec(jobs)

    @property
    def resolver(self) -> SimpleClusterResolver:
        """What a strategy is given to reach the cluster through its relays."""
        return SimpleClusterResolver(self.spec)

    def relay(self, task: str) -> Relay:
        """The relay in front of ``task``, such as "worker:1".

        Raises:
            ValueError: There is no such task; names those that there are.
        """
        try:
            return self._relays[task]
        except KeyError:
            known = ", ".join(self._relays) or "none: it was not started"
            raise ValueError(f"no task {task!r} in this cluster: {known}") from None

    def reset(self, task: str) -> None:
        """Resets all connections of a task; they may be made anew at once."""
        self.relay(task).reset()

    @contextlib.contextmanager
    def blackholed(self, task: str) -> Iterator[None]:
        """Nothing passes between a task and all others, and nobody is told."""
        with self.relay(task).blackholed():
            yield

    @abc.abstractmethod
    def _start(self, stack: contextlib.ExitStack) -> Mapping[str, str]:
        """Starts all tasks, ps first, and puts on the stack what ends them; "host:port"
        of each."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for task, address in self._start(stack).items():
                self._relays[task] = stack.enter_context(Relay(address))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._relays.clear()


@final
class DaemonCluster(RelayedCluster):
    """Real daemons, as `zstrat.launch.LocalCluster` starts them.

    ``local`` is that cluster: logs, process ids, and faults without a relay's help.
    """

    local: LocalCluster

    def _start(self, stack: contextlib.ExitStack) -> Mapping[str, str]:
        # Relays speak TCP; and what goes through shared memory could not be cut.
        self.local = stack.enter_context(
            LocalCluster(
                self._counts["ps"],
                self._counts["worker"],
                transport="tcp",
                settings=self.settings,
            )
        )
        return {task: self._address(task) for task in self.local.tasks}

    def _address(self, task: str) -> str:
        job, _, index = task.partition(":")
        return str(self.local.spec.task_address(job, int(index)))

    @contextlib.contextmanager
    def killed(self, task: str) -> Iterator[None]:
        """Ends a task as a power cut does (SIGKILL), and starts it again on the way
        out, at its address and with nothing of what it held.

        Raises:
            UnavailableError, DeadlineExceededError: It does not start again.
        """
        self.local.kill(task)
        try:
            yield
        finally:
            self.local.restart(task)

    @contextlib.contextmanager
    def frozen(self, task: str) -> Iterator[None]:
        """Stops a task (SIGSTOP), and lets it go on with all that it held."""
        with frozen(self.local.pid(task)):
            yield


@final
class ThreadCluster(RelayedCluster):
    """Servers on threads of this process, as `zstrat.launch.Server` runs them."""

    def _start(self, stack: contextlib.ExitStack) -> Mapping[str, str]:
        addresses: dict[str, str] = {}
        for job, count in self._counts.items():
            for index in range(count):
                any_port = ClusterSpec({job: {index: "127.0.0.1:0"}})
                server = Server(any_port, job, index, config=self.settings)
                stack.enter_context(server)
                addresses[f"{job}:{index}"] = server.target.rpartition("/")[2]
        return addresses
