"""Waits until all parameter servers and one worker answer, when a program connects.

The log names the tasks that are still missing. The law of this file: one warning names
all of them; it comes after `FIRST_WARNING` seconds and then every `NEXT_WARNING`, and
never after `Arrival.stop`.
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

FIRST_WARNING: Final = 2.0
"""Seconds until the first warning: all tasks of a cluster that is up answer in much
less."""
NEXT_WARNING: Final = 10.0


AnyTask: TypeAlias = "TaskSession | ProbedTask"
"""A task to which this program has a link: with a session on it, or only probed."""


@final
class Arrival:
    """Logs which tasks are missing, until all parameter servers and one worker answer.
    On the loop thread."""

    def __init__(
        self,
        ps: Sequence[AnyTask],
        workers: Sequence[AnyTask],
        call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle],
    ) -> None:
        self._ps, self._workers, self._call_later = ps, workers, call_later
        self._timer: asyncio.TimerHandle | None = None
        self._logged: list[str] = []

    def start(self) -> None:
        self._timer = self._call_later(FIRST_WARNING, self._warn)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def awaited(self) -> list[AnyTask]:
        """The tasks that are missing now. If no worker has answered these include all
        workers, of which one is enough."""
        ps = [task for task in self._ps if not task.is_ready]
        if any(task.is_ready for task in self._workers):
            return ps
        return [*ps, *self._workers]

    def _warn(self) -> None:
        awaited = [
            f"{task.name} at {task.address} ({task.state})" for task in self.awaited
        ]
        # The addresses and states were logged before, and may be long.
        if awaited and awaited == self._logged:
            names = ", ".join(task.name for task in self.awaited)
            log.warning("connecting: still waiting for %s, as before", names)
        elif awaited:
            log.warning("connecting: still waiting for %s", ", ".join(awaited))
        self._logged = awaited
        self._timer = self._call_later(NEXT_WARNING, self._warn)


async def arrive(
    ps: Sequence[AnyTask], workers: Sequence[AnyTask], deadline: float
) -> None:
    """Starts to connect to all tasks, and waits for all parameter servers and one of
    the workers, if there are any.

    Args:
        deadline: Loop time.

    Raises:
        DeadlineExceededError: Tasks did not answer in time; names each of them.
        ZstratError: A task has refused this program.

    Cancellation: the tasks stay started.
    """
    arrival = Arrival(ps, workers, asyncio.get_running_loop().call_later)
    arrival.start()
    try:
        for task in (*ps, *workers):
            task.start()
        # All are awaited, so that one error names every task that is missing.
        missing = await asyncio.gather(
            *(task.wait_ready(deadline) for task in ps), return_exceptions=True
        )
        _raise_all([item for item in missing if isinstance(item, BaseException)])
        await _any_of(workers, deadline)
    finally:
        arrival.stop()


async def all_joined(workers: Sequence[TaskSession], deadline: float) -> None:
    """Waits until ``deadline`` (loop time) for the workers that are connected already
    to enter the session. Other workers join later."""
    joining = [
        task.wait_ready(deadline)
        for task in workers
        # Those that refuse, or do not answer, are not waited for: one worker is enough.
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
    """Raises the first refusal of a task, if any; else one error with the texts of all.
    Does nothing without errors."""
    if not errors:
        return
    # A refusal says more than that others are late.
    refusals = [e for e in errors if not isinstance(e, DeadlineExceededError)]
    if len(errors) == 1 or refusals:
        raise (refusals or errors)[0]
    words = "; ".join(str(error) for error in errors)
    kind: type[ZstratError] = DeadlineExceededError
    if all(isinstance(error, UnavailableError) for error in errors):
        kind = UnavailableError
    raise kind(words)


@final
class ProbedTask:
    """A task with a link but without a session: to see whether the task answers, or to
    send a request to the backup of a store. Its notices are ignored: they are for
    sessions.

    Args:
        name: The name of the task in errors; default: the job and the number.
        incarnation: The process that is expected there; 0: any.
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
        """The greeting of the task, while the link is open; else None."""
        return self.link.peer

    @property
    def is_ready(self) -> bool:
        return self.link.is_open

    @property
    def state(self) -> str:
        """Why the link is not open, for messages."""
        return self._loss or self.link.trouble

    def start(self) -> None:
        self.link.start()

    async def wait_ready(self, deadline: float) -> None:
        """Waits for the greeting of the task. Raises as `TaskLink.wait_open`, and:

        Raises:
            NotPrimaryError: Another process answers at the address.
        """
        hello = await self.link.wait_open(deadline)
        if self._incarnation not in (0, hello.incarnation):
            raise NotPrimaryError(f"another process answers at {self.address}")

    def _lost(self, error: PeerLostError) -> None:
        self._loss = f"lost: {error}"


async def probe(
    ps: Sequence[str],
    workers: Mapping[int, str],
    make_link: MakeTaskLink,
    timeout: float,
) -> None:
    """Checks that all parameter servers and one worker answer, over links that are
    closed again. Opens no session, so nothing changes for a program that uses the
    cluster now.

    Args:
        timeout: Seconds.

    Raises:
        DeadlineExceededError: Tasks did not answer in time; names each of them.
        VersionMismatchError, PermissionDeniedError: A task will never accept us.

    Cancellation: the links are closed.
    """
    servers = [ProbedTask("ps", n, at, make_link) for n, at in enumerate(ps)]
    others = [ProbedTask("worker", n, at, make_link) for n, at in workers.items()]
    deadline = asyncio.get_running_loop().time() + timeout
    try:
        await arrive(servers, others, deadline)
    finally:
        # Also when some did not answer: these links would connect for as long as the
        # loop runs.
        await asyncio.gather(*(task.link.close() for task in (*servers, *others)))


def _ignored(_: object) -> None:
    pass


def devices_of(workers: Iterable[TaskSession]) -> SessionOpened | None:
    """Returns the devices that all connected workers report; None if no worker is
    connected.

    Raises:
        ValueError: The workers' devices differ (the text is TensorFlow's).
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
    tasks: Iterable[TaskSession],
    planned: SessionOpened | None,
) -> ZstratError | None:
    """Returns the error with which a task is refused, or None: the same process is one
    of ``tasks`` at a second address, or a worker has another number of devices than
    ``planned``."""
    for other in tasks:
        if other is task or other.is_closed or not other.is_ready:
            continue
        # By the incarnation, as a host may be known by several names and addresses.
        if other.hello is not None and other.hello.incarnation == hello.incarnation:
            return AlreadyExistsError(
                f"the process at {task.address} is already in the cluster: it is "
                f"{other.name} at {other.address}"
            )
    if planned is None or opened is None or planned.devices == opened.devices:
        return None
    return InvalidArgumentError(
        f"it has {opened.devices} devices, expected {planned.devices} as the other "
        "workers (num_replicas_in_sync): start it with as many devices as they have"
    )
