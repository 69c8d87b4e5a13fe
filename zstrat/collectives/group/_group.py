"""A group of ranks, as users create, re-form and close it.

Calls are numbered in the order in which they are made, in the caller's thread; ranks
must make the same calls in the same order. Calls with a tag are numbered by tag.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.errors import ClosedError
from zstrat.transport import on_own_thread

from ._calls import GroupCalls, parameters_of
from ._forming import form
from ._invitation import Invitation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._invitation import FormingRequest

_REFORMS: Final = "it forms a new generation"
_GIVEN_UP: Final = "it gave up forming a generation"

_SLACK: Final = 5.0
"""Seconds that forming a generation may take beyond its timeout, to report what was
wrong."""


@final
class Group(GroupCalls):
    """Processes that compute together. The constructor blocks until all have joined.

    Ranks of one host share memory. With several hosts, only the first rank of each host
    sends messages in `all_reduce`, `broadcast` and `barrier`; in `all_gather`,
    `reduce_scatter` and `all_to_all`, where that saves nothing, every rank sends to
    every other one. Calls with a tag or a compression go as messages of every rank,
    even on one host. Ranks that share no memory bind one more port each, for untagged
    calls of up to 1 MiB, one after the other.
    An ``algorithm`` selects how messages are exchanged. It does not change which ranks
    send them, and has no effect on calls through shared memory: to send everything as
    messages, create the group with ``transport="tcp"`` or ``"ipc"``.

    Args:
        resolver: The cluster, and the task of this process; default: TF_CONFIG. Without
            a cluster the group has one rank.
        name: Name of the group, the same on all ranks; a process may be in several
            groups.
        tasks: The members in the order of ranks, as "worker:0" or "/job:worker/task:0";
            default: chief and workers.
        timeout: Seconds that each call may take; default: ``timeouts.request``. If an
            earlier asynchronous call times out, later calls end with it.
        rendezvous_timeout: Seconds to wait for all ranks; default:
            ``timeouts.connect``.
        transport: "auto" or "shm" (ranks of one host share memory), "ipc" or "tcp"
            (they do not). Default: ``ZSTRAT_TRANSPORT``.
        bytes_per_pack: Small arrays that are reduced or broadcast together are sent in
            packs, from the last array to the first; a pack larger than this is full. 0:
            packs of some MiB. Arrays of 128 KiB and more are sent separately, without a
            copy. The same on all ranks.
        bind: Address to listen at; default: the address of the task.
        settings: Settings of zstrat; default: from ``ZSTRAT_*``.

    Raises:
        CollectiveTimeoutError: Some ranks did not join in time; the error names them.
        InvalidArgumentError: The ranks disagree about the members.
        ValueError: The task of this process is not known, or not a member;
            ``bytes_per_pack`` is negative.
        OSError, PermissionDeniedError: The address of this task cannot be bound.
    """

    def _invite(self, *args: Any, **kwargs: Any) -> None:
        self._is_closed = self._is_released = False
        self._has_formed = False
        """Whether a generation was formed, whose operations ``_work`` runs."""
        self._closing = threading.Lock()
        self._leaving = threading.Lock()
        """Held while leaving a generation, which may take longer than a caller that was
        cancelled."""
        self._invited = Invitation(*args, **kwargs)

    @parameters_of(Invitation.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._invite(*args, **kwargs)
        self._runtime = self._invited.runtime()
        try:
            self._form_now(self._invited.wanted())
        except BaseException:  # to the caller, who has no group to close
            # It may have a runtime, or a generation that the others count on.
            self.close()
            raise

    @classmethod
    @parameters_of(Invitation.__init__)
    async def create(cls, *args: Any, **kwargs: Any) -> Group:
        """Creates a group as the constructor does, without blocking the running loop.

        Cancellation: this process has not joined.
        """
        group = cls.__new__(cls)
        group._invite(*args, **kwargs)
        # Binding blocks; if the caller is cancelled, the runtime is released.
        group._runtime = await on_own_thread(
            group._invited.runtime, lambda runtime: runtime.release()
        )
        try:
            await group._form(group._invited.wanted())
        except BaseException:  # as in the constructor; cancellation, too
            await on_own_thread(group.close)
            raise
        return group

    @property
    def name(self) -> str:
        """Name of the group, the same on all ranks."""
        return self._invited.name

    @property
    def transport(self) -> str:
        """Way in which messages to other ranks travel; see the constructor."""
        return self._invited.transport

    @property
    def rank(self) -> int:
        """Rank of this process in the group, from 0."""
        return self._work.generation.rank

    @property
    def generation(self) -> int:
        """Number of the generation: 0 at first, more after each `reform`."""
        return self._work.generation.number

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members, in the order of ranks: ``/job:worker/task:0``."""
        return tuple(member.task for member in self._work.generation.members)

    @property
    def hosts(self) -> int:
        """Number of machines on which the ranks run."""
        return self._work.generation.hosts

    @property
    def is_broken(self) -> bool:
        """Whether a rank was lost, has left, or did not make a call, so that `reform`
        is needed."""
        return self._work.generation.broken is not None

    def _next(
        self,
        *,
        tasks: Sequence[str] | None = None,
        ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> FormingRequest:
        self._check_open()
        return self._invited.again(self._wanted, self.generation, tasks, ranks, timeout)

    @parameters_of(_next)
    def reform(self, *args: Any, **kwargs: Any) -> None:
        """Forms a new generation, with the surviving ranks or with new ones.

        Every rank that continues calls `reform`, with the same members; a restarted
        process creates its `Group` instead. Calls of the old generation fail on all
        ranks.

        Args:
            tasks: The new members; default: the members at creation, so that the group
                waits until a lost member is restarted.
            ranks: The new members, as ranks of the old generation.
            timeout: Seconds to wait for all ranks.

        Raises:
            Exception: As the constructor; the group stays broken, and `reform` may be
                called again.
        """
        # First: a wrong argument must not cost the group its generation.
        wanted = self._next(*args, **kwargs)
        self._leave(_REFORMS)
        try:
            self._form_now(wanted)
        except BaseException:  # to the caller; Ctrl-C, too, which may come late
            self._leave(_GIVEN_UP)
            raise

    @parameters_of(_next)
    async def reform_async(self, *args: Any, **kwargs: Any) -> None:
        """Forms a new generation as `reform` does, without blocking the running loop.

        Cancellation: the group is broken, the other ranks are notified that this rank
        has left, and the method may be called again.
        """
        wanted = self._next(*args, **kwargs)
        await on_own_thread(partial(self._leave, _REFORMS))
        try:
            await self._form(wanted)
        except BaseException:  # to the caller; cancellation, too
            await on_own_thread(partial(self._leave, _GIVEN_UP))
            raise

    def close(self) -> None:
        """Leaves the group: messages that were sent arrive, and calls under way fail.

        Other ranks are notified. Idempotent; a second call completes a close that
        Ctrl-C has interrupted.
        """
        # Before the lock: calls are refused at once, though another close is under way.
        self._is_closed = True
        with self._closing:
            if self._is_released:
                return
            try:
                self._leave("it closed the group")
            finally:
                self._runtime.release()
                self._is_released = True

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Group:
        return self

    async def __aexit__(self, *_: object) -> None:
        await on_own_thread(self.close)

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    def _form_now(self, wanted: FormingRequest) -> None:
        seconds = wanted.timeout + _SLACK
        self._runtime.run(self._forming(wanted), seconds, wanted.words)

    async def _form(self, wanted: FormingRequest) -> None:
        await self._runtime.run_async(self._forming(wanted), wanted.words)

    async def _forming(self, wanted: FormingRequest) -> None:
        """Forms a generation. Runs on the group's loop, so that the result is stored
        even if the caller is cancelled just then: the generation must be left later."""
        self._work = await form(self._runtime, wanted)
        self._wanted, self._has_formed = wanted, True

    def _leave(self, reason: str) -> None:
        """Leaves the present generation, if there is one. Idempotent."""
        # Slow networks may still have much to send; a lost rank ends the wait.
        drain = self._invited.settings.timeouts.drain
        words = f"leaving group {self.name!r}"
        with self._leaving:
            try:
                with suppress(ClosedError):  # the daemon's loop has ended
                    parting = self._parting(reason, drain)
                    self._runtime.run(parting, drain + _SLACK, words)
            finally:
                if self._has_formed:
                    self._work.close()

    async def _parting(self, reason: str, drain: float) -> None:
        # On the loop, which has cancelled an interrupted `_forming` before.
        if self._has_formed:
            await self._runtime.node.leave(self._work.generation, reason, drain)
