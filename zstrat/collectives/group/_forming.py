"""From a list of tasks to a generation that can work: who sits where, and on what lane
all agree."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zstrat.cluster import cluster_spec_of
from zstrat.collectives.memory._engines import host_memory
from zstrat.wire import JoinGroup, MemberEntry

from ._connecting import all_agree, connect_data, shares_memory
from ._executors import MessageExecutor
from ._keys import FORMING
from ._rendezvous import GroupSeat, listed
from ._runtime import only_daemon
from ._scheduler import OperationScheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.cluster import ClusterResolver, ClusterSpec
    from zstrat.collectives._engine import Between, CollectiveEngine
    from zstrat.collectives.memory._engines import SharedMemory
    from zstrat.collectives.schedules._choice import Choices

    from ._generation import Generation
    from ._runtime import GroupRuntime

log = logging.getLogger("zstrat.collectives")

JOBS: Final = ("chief", "worker")
"""Whose tasks are members if nobody says which, in this order."""

ALONE: Final = GroupSeat("worker", 0, "")
"""The one seat of a program that is in no cluster."""


@dataclass(frozen=True, slots=True)
class FormingRequest:
    """The generation that a rank wants to be a member of."""

    group: str
    generation: int
    seats: tuple[GroupSeat, ...]
    rank: int
    lane: str
    patience: float
    choices: Choices
    """Of algorithms; that of rank 0 is everybody's."""

    @property
    def words(self) -> str:
        """What is under way, for people."""
        return f"forming group {self.group!r}"


def seats_of(
    resolver: ClusterResolver, tasks: Sequence[str] | None
) -> tuple[GroupSeat, ...]:
    """The members of a group in the order of ranks.

    Args:
        tasks: Names such as "worker:0" or "/job:worker/task:0"; None: all of `JOBS`.

    Raises:
        ValueError: There is no such task, one is named twice, or nobody is a member.
    """
    spec = cluster_spec_of(resolver)
    if not spec:
        return (ALONE,)
    if tasks is None:
        found = tuple(
            GroupSeat(job, index, spec.task_address(job, index))
            for job in JOBS
            if job in spec.jobs
            for index in spec.task_indices(job)
        )
        if not found:
            raise ValueError(
                f"the cluster has no {' or '.join(JOBS)}, but {', '.join(spec.jobs)}: "
                "correct its job names (TF_CONFIG?), or name the members with tasks="
            )
        return found
    seats = tuple(_seat_named(spec, task) for task in tasks)
    if len(set(seats)) != len(seats) or not seats:
        raise ValueError(f"tasks={list(tasks)}: expected some, each of them once")
    return seats


def own_seat(resolver: ClusterResolver, seats: Sequence[GroupSeat]) -> GroupSeat:
    """Which of them is this process.

    Raises:
        ValueError: That is not known, or it is none of them.
    """
    if tuple(seats) == (ALONE,):
        return ALONE
    job, index = resolver.task_type, resolver.task_id
    if job is None or index is None:
        daemon = only_daemon()
        if daemon is None:
            raise ValueError(
                "the resolver does not say which task this process is: give it "
                'task_type and task_id (TF_CONFIG\'s "task", [task] of a cluster file)'
            )
        job, index = daemon
    for seat in seats:
        if (seat.job, seat.number) == (job, index):
            return seat
    raise ValueError(
        f"this process is /job:{job}/task:{index}, which is none of the group's "
        f"{listed([seat.task for seat in seats])}: correct the task (TF_CONFIG?) or "
        "the members"
    )


async def form(runtime: GroupRuntime, wanted: FormingRequest) -> OperationScheduler:
    """Forms a generation, and agrees on its engine. Runs on the runtime's loop.

    Raises:
        CollectiveTimeoutError, InvalidArgumentError, AlreadyExistsError,
            PeerLostError: See `GroupNode.join`.

    Cancellation: this rank has not joined.
    """
    node = runtime.node
    memory = host_memory(wanted.lane)
    try:
        request = JoinGroup(
            wanted.group,
            wanted.generation,
            wanted.rank,
            len(wanted.seats),
            _entry(runtime, wanted, memory),
            wanted.patience,
        )
        generation = await node.join(request, wanted.seats, wanted.lane, wanted.choices)
        messages = MessageExecutor(runtime, generation)
        try:
            engine = await _agree(generation, memory, messages, wanted.patience)
            if engine is None:
                if memory is not None:
                    memory.close()
                engine = await connect_data(runtime, generation, wanted.patience)
        except BaseException:  # to `Group`; cancellation, too: the others hear of it
            await node.leave(generation, "it could not agree on a lane")
            raise
    except BaseException:  # to `Group`; no engine has the memory
        if memory is not None:
            memory.close()
        raise
    return OperationScheduler(generation, messages, engine)


async def _agree(
    generation: Generation,
    memory: SharedMemory | None,
    between: Between,
    patience: float,
) -> CollectiveEngine | None:
    """The engine, if all ranks have one; and nobody is through before all are here."""
    engine: CollectiveEngine | None = None
    if memory is not None and shares_memory(generation):
        try:
            engine = memory.attach(generation.rank, generation.members, between)
        except OSError as error:  # another user, another container
            log.info("%s goes by messages: %s", generation.title, error)
    has_engine, agreed = engine is not None, False
    try:
        agreed = await all_agree(generation, FORMING, has_engine, patience)
    finally:
        if engine is not None and not agreed:
            engine.close()
    return engine if agreed else None


def _entry(
    runtime: GroupRuntime, wanted: FormingRequest, memory: SharedMemory | None
) -> MemberEntry:
    me, seat = runtime.node.me, wanted.seats[wanted.rank]
    shared = (0, 0, b"")
    if memory is not None:
        shared = (memory.descriptor, memory.capacity, memory.word)
    return MemberEntry(
        seat.task, seat.address, me.host, me.pid, me.incarnation, *shared
    )


def _seat_named(spec: ClusterSpec, task: str) -> GroupSeat:
    job, found, index = task.removeprefix("/job:").replace("/task:", ":").partition(":")
    if not found or not index.isdecimal():
        raise ValueError(
            f"task {task!r}: expected a name such as 'worker:0' or '/job:worker/task:0'"
        )
    return GroupSeat(job, int(index), spec.task_address(job, int(index)))
