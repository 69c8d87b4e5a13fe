"""Simulated processes: parameter servers and workers, made of the parts of real ones.

A process has a name and an address, and one life after the other: each with a loop, an
incarnation and empty memory. The law of the file: what belongs to a life is reached
from its loop alone, so that killing it is to never run that loop again.

The work of its threads is done on its loop, later: the order on each thread stays, and
between two of its jobs the loop runs, as it does beside a real one.
"""

from __future__ import annotations

import abc
import traceback
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, final

from zstrat.config import Limits, Settings, Timeouts
from zstrat.errors import ClosedError
from zstrat.program import load
from zstrat.ps import RESTART, PsProcess, PsService
from zstrat.transport import Endpoint, Link
from zstrat.wire import PROTOCOL, Hello, Job
from zstrat.worker import Compilations, WorkerService, work

from ._world import START, VirtualLoop

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from pathlib import Path

    from zstrat.worker import StepRunner

    from ._script import Scripts
    from ._sockets import Network
    from ._world import World

    Main = Callable[[VirtualLoop, Callable[[int], Callable[..., Link]]], Any]

T = TypeVar("T")

HOST: Final = "simulated"
TIMES: Final = Timeouts(
    beat=0.5,
    liveness=1.8,
    reconnect=0.5,
    handshake=1.0,
    connect=20.0,
    turn=3.0,
    request=12.0,
    drain=2.0,
    handover=8.0,
)
"""Shorter than the real ones, in the same order: virtual seconds cost real ones."""

INLINE: Final = 256
"""Bytes of a result that travels with the end of its step."""

_COMPILATIONS: Final = Compilations()
"""One for all simulated workers: each would listen to jax for ever."""


def settings_with(chunk: int, state: Path | None) -> Settings:
    """Of all processes; bodies above ``chunk`` bytes travel in pieces. ``state``: where
    servers that are told to stop leave what they hold."""
    limits = Limits(chunk=chunk, window=4, inline=INLINE)
    return Settings(TIMES, limits, transport="tcp", insecure=True, state=state)


class Surroundings:
    """What all processes of one run share.

    Args:
        quick: Draws seconds of a short piece of work.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        settings: Settings,
        quick: Callable[[], float],
    ) -> None:
        self.world, self.network, self.settings = world, network, settings
        self.quick = quick
        self.defects: list[str] = []
        """What no process should ever meet: errors that nobody handles."""

    def blame(self, name: str, context: dict[str, Any]) -> None:
        """A loop was left with something that nobody handles."""
        words = str(context.get("message"))
        if "never retrieved" in words or "was destroyed" in words:
            return  # told when memory is collected, which is no matter of the seed
        at = self.world.now - START
        error = context.get("exception")
        where = ""
        if isinstance(error, BaseException):
            frames = traceback.extract_tb(error.__traceback__)
            where = " < ".join([f"{f.name}:{f.lineno}" for f in reversed(frames)])
        self.defects.append(f"{at:.6f} {name}: {words}: {error!r} at {where}")

    def draw(self) -> int:
        """A number that no other start, or session, has."""
        return self.world.random.getrandbits(62) | 1


class Process(abc.ABC):
    """One process, with its lives."""

    def __init__(self, surroundings: Surroundings, job: str, index: int) -> None:
        self.around: Final = surroundings
        self.job, self.index = job, index
        self.name: Final = f"{job}{index}"
        self.loop: VirtualLoop | None = None
        self.lives = 0

    @property
    def is_alive(self) -> bool:
        return self.loop is not None

    def start(self) -> None:
        """Begins a life, with empty memory."""
        assert self.loop is None, f"{self.name} lives"
        around = self.around
        self.lives += 1
        blame = partial(around.blame, self.name)
        self.loop = VirtualLoop(around.world, self.name, blame)
        incarnation = around.draw()
        me = Hello(PROTOCOL, self.job, self.index, incarnation, HOST, self.lives)
        sockets = around.network.sockets(self.name, self.loop)
        self.loop.arrive(around.world.now, self.begin, me, sockets)

    def start_again(self) -> None:
        """Begins a life, unless it lives."""
        if self.loop is None:
            self.start()

    def kill(self, *, silently: bool = False) -> None:
        """SIGKILL; or the machine loses its power, and nobody hangs up for it."""
        if self.loop is not None:
            self.around.network.vanish(self.loop, silently)
            self.loop.end()
            self.loop = None

    def freeze(self) -> None:
        """SIGSTOP."""
        if self.loop is not None:
            self.loop.freeze()

    def thaw(self) -> None:
        """SIGCONT."""
        if self.loop is not None:
            self.loop.thaw()

    def retire(self, until: float) -> None:
        """SIGTERM, once; started again at ``until``, or when it has ended."""
        raise NotImplementedError(f"{self.name} is not told to stop in a simulation")

    @abc.abstractmethod
    def begin(self, me: Hello, sockets: Any) -> None:
        """What the process does first, on its loop."""

    def work_on(self, work: Any, name: str) -> None:
        """Runs a coroutine; what it raises is a defect."""
        assert self.loop is not None
        task = self.loop.create_task(work, name=name)
        task.add_done_callback(partial(self._worked, name))

    def _worked(self, name: str, task: Any) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.around.blame(self.name, {"message": name, "exception": error})


class Daemon(Process):
    """A process that listens at an address."""

    def __init__(
        self, surroundings: Surroundings, job: str, index: int, address: str
    ) -> None:
        super().__init__(surroundings, job, index)
        self.address: Final = address
        surroundings.network.hosts[f"tcp://{address}"] = self.name

    def endpoint(
        self,
        me: Hello,
        service: Any,
        absorb: Any,
        sockets: Any,
        handle: Callable[[Any, Any], Any] | None = None,
    ) -> Endpoint:
        """Serves when it is bound; ``handle``: who is asked before the service."""
        return Endpoint(
            me,
            handle or service.handle,
            settings=self.around.settings,
            absorb=absorb,
            on_lost=service.lost,
            sockets=sockets,
        )


@final
class ServerProcess(Daemon):
    """A parameter server, which keeps copies of others if it is asked to, and leaves
    what it holds when it is told to stop, if there is a folder for that."""

    def begin(self, me: Hello, sockets: Any) -> None:
        loop, around = self.loop, self.around
        assert loop is not None

        def make_thread(_: str) -> VirtualThread:
            return VirtualThread(loop, around.quick)

        self._ps = ps = PsProcess(
            me,
            self.address,
            load_code=load,
            settings=around.settings,
            make_service=partial(PsService, clock=loop.time, make_thread=make_thread),
            make_thread=make_thread,
            draw=around.draw,
            sockets=sockets,
        )
        self._is_leaving = False
        loop.validate = ps.validate
        service = ps.service
        self._endpoint = self.endpoint(
            ps.me, service, service.absorb, sockets, ps.handle
        )
        self.work_on(self._serve(), f"bind {self.name}")

    async def _serve(self) -> None:
        """Begins to serve, as `zstrat.launch.Task.start` does."""
        kept = await self._ps.inherit()
        assert kept, "no address is taken in a simulation"
        await self._endpoint.bind(self.address)
        self._ps.take_over()

    def retire(self, until: float) -> None:
        if self.loop is not None and not self._is_leaving:
            self._is_leaving = True
            self.work_on(self._leave(until), f"{self.name} leaves")

    async def _leave(self, until: float) -> None:
        """Hands over and ends, as `zstrat.launch.Task.stop` does."""
        drained = await self._ps.service.drain()
        returns = await self._ps.leave(self._endpoint, drained=drained)
        await self._endpoint.close(RESTART, returns)
        self.kill()
        self.around.world.at(max(until, self.around.world.now), self.start_again)


@final
class WorkerProcess(Daemon):
    """A worker, which runs the steps of ``scripts``."""

    def __init__(
        self,
        surroundings: Surroundings,
        index: int,
        address: str,
        scripts: Scripts,
    ) -> None:
        super().__init__(surroundings, Job.WORKER, index, address)
        self._scripts = scripts

    def begin(self, me: Hello, sockets: Any) -> None:
        loop, around = self.loop, self.around
        assert loop is not None

        service = WorkerService(
            around.settings,
            me,
            partial(Link, me=me, settings=around.settings, sockets=sockets),
            on_crash=self._crashed,
            load=partial(self._scripts.load, self.name),
            prepare=cast("Any", self._scripts.prepare),  # what it makes is duck-typed
            clock=loop.time,
            make_executor=partial(VirtualExecutor, loop=loop, duration=around.quick),
            compilations=_COMPILATIONS,
            find_devices=_one_device,
        )
        endpoint = self.endpoint(me, service, None, sockets)
        self.work_on(endpoint.bind(self.address), f"bind {self.name}")

    def _crashed(self, error: BaseException) -> None:
        self.around.blame(self.name, {"message": "executor", "exception": error})


@final
class ProgramProcess(Process):
    """The user's program: ``main`` is a coroutine function. In each life it is called
    with the loop, and with what makes links for the number of a session."""

    def __init__(self, surroundings: Surroundings, main: Main) -> None:
        super().__init__(surroundings, Job.CHIEF, 0)
        self._main = main

    def begin(self, me: Hello, sockets: Any) -> None:
        def link(session: int) -> Callable[..., Link]:
            mine = Hello(PROTOCOL, me.job, 0, session, HOST, self.lives)
            return partial(
                Link, me=mine, settings=self.around.settings, sockets=sockets
            )

        assert self.loop is not None
        self.work_on(self._main(self.loop, link), "program")


def _one_device() -> tuple[str, int]:
    return "cpu", 1


@final
class VirtualThread:
    """Stands for `zstrat.ps.JobThread`.

    Args:
        duration: Draws how long a job takes, in seconds.
    """

    def __init__(self, loop: VirtualLoop, duration: Callable[[], float]) -> None:
        self._loop, self._duration = loop, duration
        self._free_at = 0.0
        self.waiting = 0
        self._is_closed = False

    def submit(self, job: Callable[[], None]) -> asyncio.Future[None]:
        if self._is_closed:
            raise ClosedError("the thread was closed")
        done = self._loop.create_future()
        self._free_at = max(self._free_at, self._loop.time()) + self._duration()
        self.waiting += 1
        self._loop.call_at(self._free_at, self._do, job, done)
        return done

    async def close(self, deadline: float) -> bool:
        """At once: whatever waits is done all the same."""
        del deadline
        self._is_closed = True
        return not self.waiting

    def _do(self, job: Callable[[], None], done: asyncio.Future[None]) -> None:
        self.waiting -= 1
        _settle(job, done)


@final
class VirtualExecutor:
    """Stands for `zstrat.worker.Executor`, on the loop that runs.

    Args:
        duration: Draws how long a piece of work takes, in seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        on_crash: Callable[[BaseException], None],
        loop: VirtualLoop,
        duration: Callable[[], float],
    ) -> None:
        del name
        self._loop, self._duration, self._on_crash = loop, duration, on_crash
        self._inbox: deque[Callable[[], None]] = deque()
        self._source: StepRunner | None = None
        self._is_awake = self._is_closed = False

    def tell(self, event: Callable[[], None]) -> None:
        self._inbox.append(event)
        self._wake()

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self._loop.create_future()
        self.tell(partial(_settle, job, done))
        return done

    def work_for(self, source: StepRunner | None) -> None:
        self._source = source

    async def close(self, timeout: float) -> bool:
        """Closes the thread at once."""
        del timeout
        self._is_closed = True
        return True

    def _wake(self) -> None:
        if not self._is_awake and not self._is_closed:
            self._is_awake = True
            self._loop.call_later(self._duration(), self._turn)

    def _turn(self) -> None:
        """Events first, as on the thread; or else one piece of work."""
        self._is_awake = False
        try:
            if self._inbox:
                while self._inbox:
                    self._inbox.popleft()()
                self._wake()
            elif self._source is not None:
                now = work(self._source, self._loop.time(), self._loop.call_soon)
                if now is not None:
                    self._wake()
        except BaseException as error:  # as on the thread: a defect of zstrat's own
            self._on_crash(error)


def _settle(job: Callable[[], T], done: asyncio.Future[T]) -> None:
    try:
        result = job()
    except BaseException as error:  # goes to whoever awaits the job
        if not done.done():
            done.set_exception(error)
    else:
        if not done.done():
            done.set_result(result)
