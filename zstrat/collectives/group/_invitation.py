"""The arguments of a group, checked and completed with defaults. Without I/O.

An invitation knows the members and which of them this process is, and makes the
requests to rank 0: the first one, and one for each further generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zstrat.cluster import TFConfigClusterResolver, detect
from zstrat.collectives.schedules._choice import Choices, read_choices
from zstrat.config import checked_transport, environment, settings_from

from ._arguments import not_negative, positive
from ._forming import FormingRequest, own_seat, seats_of
from ._runtime import only_daemon, runtime_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.cluster import ClusterResolver
    from zstrat.config import Settings

    from ._rendezvous import GroupSeat
    from ._runtime import GroupRuntime


@dataclass(frozen=True, slots=True)
class Invitation:
    """The arguments of a `Group`; ``seats`` are its first members, in order of ranks,
    ``seat`` is that of this process."""

    name: str
    resolver: ClusterResolver
    tasks: Sequence[str] | None
    seats: tuple[GroupSeat, ...]
    seat: GroupSeat
    timeout: float
    rendezvous_timeout: float
    transport: str
    bytes_per_pack: int
    bind: str
    settings: Settings

    def runtime(self) -> GroupRuntime:
        """Returns the runtime of this task, bound to its address; blocks.

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


def invitation_of(
    resolver: ClusterResolver | None,
    name: str,
    tasks: Sequence[str] | None,
    timeout: float | None,
    rendezvous_timeout: float | None,
    transport: str | None,
    bytes_per_pack: int,
    bind: str | None,
    settings: Settings | None,
) -> Invitation:
    """Checks the arguments of `Group`.

    Raises:
        ValueError: The task of this process is not known or not a member; or a number
            or the transport is invalid.
    """
    settings = settings or settings_from(environment())
    if resolver is None:  # in a daemon the task is known otherwise
        resolver = TFConfigClusterResolver() if only_daemon() else detect()
    not_negative("bytes_per_pack", bytes_per_pack)
    seats = seats_of(resolver, tasks)
    seat = own_seat(resolver, seats)
    times = settings.timeouts
    return Invitation(
        name,
        resolver,
        tasks,
        seats,
        seat,
        positive("timeout", timeout, times.request),
        positive("rendezvous_timeout", rendezvous_timeout, times.connect),
        checked_transport(transport or settings.transport),
        bytes_per_pack,
        seat.address if bind is None else bind,
        settings,
    )
