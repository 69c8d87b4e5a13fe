"""The arguments of a group: which tasks are its members, and which of them is this
process.

The arguments are checked and completed without I/O. An `Invitation` creates the
requests to join that go to rank 0: for the first generation, and for each further one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from zstrat.cluster import TFConfigClusterResolver, detect, query_cluster_spec
from zstrat.collectives.schedules._choice import Choices, read_choices
from zstrat.config import checked_transport, environment, settings_from

from ._arguments import not_negative, positive
from ._rendezvous import GroupSeat, listed
from ._runtime import only_daemon, runtime_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.cluster import ClusterResolver, ClusterSpec
    from zstrat.config import Settings

    from ._runtime import GroupRuntime

JOBS: Final = ("chief", "worker")
"""Jobs whose tasks are the members by default, in this order."""

ALONE: Final = GroupSeat("worker", 0, "")
"""The only seat (task and address of a member) of a program without a cluster."""


@dataclass(frozen=True, slots=True)
class FormingRequest:
    """The request of a rank to join a generation."""

    group: str
    generation: int
    seats: tuple[GroupSeat, ...]
    rank: int
    transport: str
    timeout: float
    choices: Choices
    """Table of algorithms; all ranks use that of rank 0."""

    @property
    def words(self) -> str:
        """Description of the request in errors."""
        return f"forming group {self.group!r}"


def seats_of(
    resolver: ClusterResolver, tasks: Sequence[str] | None
) -> tuple[GroupSeat, ...]:
    """Returns the seats (task and address) of the members of a group, in the order of
    ranks.

    Args:
        tasks: Names such as "worker:0" or "/job:worker/task:0"; None: all of `JOBS`.

    Raises:
        ValueError: A task does not exist or is named twice, or there is no member.
    """
    spec = query_cluster_spec(resolver)
    if not spec:
        return (ALONE,)
    # Without tasks=, all that compute: chief and workers, not parameter servers.
    if tasks is None:
        default = tuple(
            GroupSeat(job, index, spec.task_address(job, index))
            for job in JOBS
            if job in spec.jobs
            for index in spec.task_indices(job)
        )
        if not default:
            raise ValueError(
                f"the cluster has no job {' or '.join(JOBS)}, but has "
                f"{', '.join(spec.jobs)}: correct its job names (TF_CONFIG?), or name "
                "the members with tasks="
            )
        return default
    seats = tuple(_seat_named(spec, task) for task in tasks)
    if len(set(seats)) != len(seats) or not seats:
        raise ValueError(f"tasks={list(tasks)}: expected one or more tasks, each once")
    return seats


def own_seat(resolver: ClusterResolver, seats: Sequence[GroupSeat]) -> GroupSeat:
    """Returns the seat of this process.

    Raises:
        ValueError: The task of this process is not known, or not among the members.
    """
    # No cluster, so no task index either.
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
        f"this process is /job:{job}/task:{index}, expected one of the group's members "
        f"{listed([seat.task for seat in seats])}: correct the task (TF_CONFIG?) or "
        "the members"
    )


def _seat_named(spec: ClusterSpec, task: str) -> GroupSeat:
    job, found, index = task.removeprefix("/job:").replace("/task:", ":").partition(":")
    if not found or not index.isdecimal():
        raise ValueError(
            f"task {task!r}: expected a name such as 'worker:0' or '/job:worker/task:0'"
        )
    return GroupSeat(job, int(index), spec.task_address(job, int(index)))


@final
class Invitation:
    """The arguments of a `Group`, checked. ``seats`` are the members of the first
    generation in the order of ranks, ``seat`` is that of this process.

    Raises:
        ValueError: The task of this process is not known or not a member; or a number
            or the transport is invalid.
    """

    def __init__(
        self,
        resolver: ClusterResolver | None = None,
        *,
        name: str = "group",
        tasks: Sequence[str] | None = None,
        timeout: float | None = None,
        rendezvous_timeout: float | None = None,
        transport: str | None = None,
        bytes_per_pack: int = 0,
        bind: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings = settings or settings_from(environment())
        if resolver is None:  # in a daemon the task is known otherwise
            resolver = TFConfigClusterResolver() if only_daemon() else detect()
        self.name, self.resolver, self.tasks = name, resolver, tasks
        self.bytes_per_pack = not_negative("bytes_per_pack", bytes_per_pack)
        self.seats = seats_of(resolver, tasks)
        self.seat = own_seat(resolver, self.seats)
        times = settings.timeouts
        self.timeout = positive("timeout", timeout, times.request)
        self.rendezvous_timeout = positive(
            "rendezvous_timeout", rendezvous_timeout, times.connect
        )
        self.transport = checked_transport(transport or settings.transport)
        self.bind = self.seat.address if bind is None else bind

    def runtime(self) -> GroupRuntime:
        """Returns the runtime of this task, bound to its address. Blocks while binding.

        Raises:
            OSError, PermissionDeniedError: The address cannot be bound.
        """
        return runtime_for(self.seat, self.bind, self.settings)

    def wanted(self) -> FormingRequest:
        """Returns the request to join the first generation.

        Raises:
            ValueError: The table of algorithms cannot be read.
        """
        return self._wanted(self.seats, 0, self.rendezvous_timeout)

    def again(
        self,
        last: FormingRequest,
        generation: int,
        tasks: Sequence[str] | None,
        ranks: Sequence[int] | None,
        timeout: float | None,
    ) -> FormingRequest:
        """Returns the request to join the generation after ``generation``, which was
        formed by the request ``last``, with these members.

        Raises:
            ValueError: There is no member, or this process is not a member; or as
                `wanted`.
        """
        if tasks is not None and ranks is not None:
            raise ValueError("reform: give tasks or ranks, not both")
        if ranks is not None:
            size = len(last.seats)
            wrong = [rank for rank in ranks if not 0 <= rank < size]
            if wrong or last.rank not in ranks:
                raise ValueError(
                    f"ranks={list(ranks)}: expected ranks below {size}, and this "
                    f"one ({last.rank}) among them"
                )
            # In the old order, whatever the caller's: all ranks have to come to the
            # same one.
            seats = tuple(last.seats[rank] for rank in sorted(set(ranks)))
        else:
            seats = seats_of(self.resolver, self.tasks if tasks is None else tasks)
            own_seat(self.resolver, seats)
        seconds = positive("timeout", timeout, self.rendezvous_timeout)
        return self._wanted(seats, generation + 1, seconds)

    def _wanted(
        self, seats: tuple[GroupSeat, ...], generation: int, timeout: float
    ) -> FormingRequest:
        own = (self.seat.job, self.seat.number)
        rank = [(each.job, each.number) for each in seats].index(own)
        file = self.settings.choices
        # Rank 0 sends its table to all: the others need not have the file.
        choices = read_choices(file) if file is not None and rank == 0 else Choices()
        return FormingRequest(
            self.name, generation, seats, rank, self.transport, timeout, choices
        )
