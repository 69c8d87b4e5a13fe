"""The moment at which a program connects: all parameter servers and one worker answer.

The log says which tasks are awaited, so that nobody looks at silence. Its law: one
warning names all tasks that are awaited; it comes after `FIRST_WORD` seconds and then
every `NEXT_WORD`, and never after `Arrival.stop`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, TypeAlias, final

from zstrat.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotPrimaryError,
    UnavailableError,
    ZstratError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from zstrat.errors import PeerLostError
    from zstrat.transport import MakeTaskLink, TaskLink
    from zstrat.wire import Hello, SessionOpened

    from ._task_session import TaskSession

log = logging.getLogger("zstrat.coordinator")

FIRST_WORD: Final = 2.0
"""Seconds: all tasks of a cluster that is up answer in much less."""
NEXT_WORD: Final = 10.0


AnyTask: TypeAlias = "TaskSession | ProbedTask"
"""A task by a link of ours: with a session on it, or only probed."""


@final
class Arrival:
    """Watches the tasks of a cluster until all parameter servers and one worker are
    there. On the loop thread."""

    def __init__(
        self,
        ps: Sequence[AnyTask],
        workers: Sequence[AnyTask],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        self._ps, self._workers, self._call_later = ps, workers, call_later
        self._timer: asyncio.TimerHandle | None = None
        self._said: list[str] = []

    def start(self) -> None:
        self._timer = self._call_later(FIRST_WORD, self._tell)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def awaited(self) -> list[AnyTask]:
        """The tasks that connecting waits for now; one of the workers will do."""
        ps = [task for task in self._ps if not task.is_ready]
        if any(task.is_ready for task in self._workers):
            return ps
        return [*ps, *self._workers]

    def _tell(self) -> None:
        awaited = [
            f"{task.name} at {task.address} ({task.state})" for task in self.awaited
        ]
        if awaited and awaited == self._said:
            names = ", ".join(task.name for task in self.awaited)
            log.warning("connecting: still waiting for %s, as before", names)
        elif awaited:
            log.warning("connecting: still waiting for %s", ", ".join(awaited))
        self._said = awaited
        self._timer = self._call_later(NEXT_WORD, self._tell)


async def arrive(
    ps: Sequence[AnyTask], workers: Sequence[AnyTask], deadline: float
) -> None:
    """Starts all, and waits for all parameter servers and one of the workers, if there
    are any.

    Args:
        deadline: Loop time.

    Raises:
        DeadlineExceededError: Tasks did not answer in time; each one is named.
        ZstratError: What one of them said.

    Cancellation: those that were started go on.
    """
    arrival = Arrival(ps, workers, asyncio.get_running_loop().call_later)
    arrival.start()
    try:
        for task in (*ps, *workers):
            task.start()
        missing = await asyncio.gather(
            *(task.wait_ready(deadline) for task in ps), return_exceptions=True
        )
        _raise_all([item for item in missing if isinstance(item, BaseException)])
        await _any_of(workers, deadline)
    finally:
        arrival.stop()


async def all_joined(workers: Sequence[TaskSession], deadline: float) -> None:
    """Waits until ``deadline`` (loop time) for workers that are connected already and
    enter the session; others are not waited for. A worker that is late joins later.
    """
    joining = [
        task.wait_ready(deadline)
        for task in workers
        if task.link.is_open and not task.is_ready and task.refusal is None
    ]
    await asyncio.gather(*joining, return_exceptions=True)


async def _any_of(workers: Sequence[AnyTask], deadline: float) -> None:
    async def outcome(task: AnyTask) -> Exception | None:
        try:
            await task.wait_ready(deadline)
        except Exception as error:  # goes to the caller, if no worker comes
            return error
        return None

    async with asyncio.TaskGroup() as tasks:
        coming = [
            tasks.create_task(outcome(task), name=f"wait for {task.name}")
            for task in workers
        ]
        for one in asyncio.as_completed(coming):
            if await one is None:
                for other in coming:
                    # One worker will do: the others join later.
                    other.cancel()
                return
    _raise_all([error for one in coming if (error := one.result())])


def _raise_all(errors: Sequence[BaseException]) -> None:
    """One error as it is; several as one that has the words of all."""
    if not errors:
        return
    telling = [e for e in errors if not isinstance(e, DeadlineExceededError)]
    if len(errors) == 1 or telling:
        raise (telling or errors)[0]
    words = "; ".join(str(error) for error in errors)
    kind: type[ZstratError] = DeadlineExceededError
    if all(isinstance(error, UnavailableError) for error in errors):
        kind = UnavailableError
    raise kind(words)


@final
class ProbedTask:
    """A task that is greeted over a link of its own, without a session: to see whether
    it is there, or to ask the backup of a store what it does. What it says unasked is
    told to whoever has a session.

    Args:
        name: What it is called in errors; left out: the job and the number.
        incarnation: That of the process that has to be there; 0: any may be.
    """

    def __init__(
        self,
        job: str,
        task_number: int,
        address: str,
        make_link: MakeTaskLink,
        name: str = "",
        incarnation: int = 0,
    ) -> None:
        self.name = name or f"/job:{job}/task:{task_number}"
        self.address, self._incarnation = address, incarnation
        self._loss = ""
        self.link: TaskLink = make_link(
            address,
            name=self.name,
            expect=(job, task_number),
            on_notice=_ignored,
            on_open=_ignored,
            on_lost=self._lost,
        )

    @property
    def hello(self) -> Hello | None:
        """Its greeting, while the link is open."""
        return self.link.peer

    @property
    def is_ready(self) -> bool:
        return self.link.is_open

    @property
    def state(self) -> str:
        """Words for why it is not open."""
        return self._loss or self.link.trouble

    def start(self) -> None:
        self.link.start()

    async def wait_ready(self, deadline: float) -> None:
        """Waits until it has greeted; raises as `TaskLink.wait_open`, and

        Raises:
            NotPrimaryError: Another process is there by now.
        """
        hello = await self.link.wait_open(deadline)
        if self._incarnation not in (0, hello.incarnation):
            raise NotPrimaryError(f"another process is at {self.address}")

    def _lost(self, error: PeerLostError) -> None:
        self._loss = f"lost: {error}"


async def probe(
    ps: Sequence[str],
    workers: Mapping[int, str],
    make_link: MakeTaskLink,
    timeout: float,
) -> None:
    """Whether a program could have this cluster: all parameter servers and one worker
    greet, over links of their own, which are closed again. No session is opened, so
    nothing changes for the program that has the cluster.

    Args:
        timeout: Seconds.

    Raises:
        DeadlineExceededError: Tasks did not answer in time; each one is named.
        VersionMismatchError, PermissionDeniedError: A task will never take us.

    Cancellation: the links are closed.
    """
    servers = [ProbedTask("ps", n, at, make_link) for n, at in enumerate(ps)]
    others = [ProbedTask("worker", n, at, make_link) for n, at in workers.items()]
    deadline = asyncio.get_running_loop().time() + timeout
    try:
        await arrive(servers, others, deadline)
    finally:
        await asyncio.gather(*(task.link.close() for task in (*servers, *others)))


def _ignored(_: object) -> None:
    pass


def devices_of(workers: Iterable[TaskSession]) -> SessionOpened | None:
    """What all workers that are there say about their devices.

    Raises:
        ValueError: They differ; TF's words.
    """
    there = {task.name: task.opened for task in workers if task.opened is not None}
    if len({opened.devices for opened in there.values()}) > 1:
        each = ", ".join(f"{name} has {o.devices}" for name, o in there.items())
        raise ValueError(
            f"Mismatched number of devices per worker: {each}. All of them compute the "
            "same number of replicas: start the workers with equally many devices"
        )
    return next(iter(there.values()), None)


def objection_to(
    task: TaskSession,
    hello: Hello,
    opened: SessionOpened | None,
    workers: Iterable[TaskSession],
    planned: SessionOpened | None,
) -> ZstratError | None:
    """Why a worker is not taken: it is one of the others by another address, or has
    more or fewer devices than steps are planned for."""
    for other in workers:
        if other is task or other.is_closed or not other.is_ready:
            continue
        if other.hello is not None and other.hello.incarnation == hello.incarnation:
            return AlreadyExistsError(
                f"the process at {task.address} is {other.name} of the cluster, "
                f"which has it by the address {other.address} already"
            )
    if planned is None or opened is None or planned.devices == opened.devices:
        return None
    return InvalidArgumentError(
        f"it has {opened.devices} devices, and steps are planned for workers with "
        f"{planned.devices} (num_replicas_in_sync): start it with as many as the others"
    )
