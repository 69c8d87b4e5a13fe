"""A group of ranks: the public face of collectives.

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
from ._invitation import invitation_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.cluster import ClusterResolver
    from zstrat.config import Settings

    from ._forming import FormingRequest

_ANEW: Final = "it forms a new generation"
_GIVEN_UP: Final = "it gave up forming a generation"

_SLACK: Final = 5.0
"""Seconds that forming may take beyond its timeout, to say what was wrong."""


@final
class Group(GroupCalls):
    """Processes that compute together; blocks until all of them are there.

    Ranks of one host share memory. Of several hosts, the first rank of each speaks for
    it in `all_reduce`, `broadcast` and `barrier`; in what saves nothing by that
    (`all_gather`, `reduce_scatter`, `all_to_all`) every rank talks to every other one.
    Calls with a tag or a compression go by messages from every rank on one host, too.
    Where no memory is shared, each rank binds one more port, for calls of up to 1 MiB:
    those without a tag go there one after the other.
    An ``algorithm`` says how messages go, among first ranks or all of them; it does not
    change who takes part, and where memory carries a call it says nothing: to have all
    go by messages, make the group with ``transport="tcp"`` or ``"ipc"``.

    Args:
        resolver: Who is in the cluster, and which task this process is; default:
            TF_CONFIG. Without a cluster the group has one rank.
        name: The same on all ranks; a process may be in several groups.
        tasks: The members in the order of ranks, as "worker:0" or "/job:worker/task:0";
            default: chief and workers.
        timeout: Seconds that each call may take; default: ``timeouts.request``. One
            that stands behind another, which nobody waits for yet, ends with that one.
        rendezvous_timeout: Seconds to wait for all ranks; ``timeouts.connect``.
        transport: "auto" or "shm" (ranks of one host share memory), "ipc" or "tcp"
            (they do not). Default: ``ZSTRAT_TRANSPORT``.
        bytes_per_pack: Small arrays that are reduced or broadcast together travel in
            packs, from the last to the first; a pack that is larger than this takes no
            more. 0: packs of some MiB. Arrays of 128 KiB and more travel by themselves,
            without a copy. The same on all ranks.
        bind: Where this process listens, if not at the address of its task.
        settings: Default: from ``ZSTRAT_*``.

    Raises:
        CollectiveTimeoutError: Not all ranks came in time; names those that did not.
        InvalidArgumentError: The ranks do not agree on who they are.
        ValueError: It is not clear which task this process is, or it is no member;
            ``bytes_per_pack`` is negative.
        OSError, PermissionDeniedError: The address of this task cannot be bound.
    """

    def _invite(
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
        self._is_closed = self._is_released = False
        self._has_formed = False
        """A generation, which is that of ``_work``."""
        self._closing = threading.Lock()
        self._leaving = threading.Lock()
        """Held by whoever leaves a generation: one that was cancelled may still do."""
        self._invited = invitation_of(
            resolver,
            name,
            tasks,
            timeout,
            rendezvous_timeout,
            transport,
            bytes_per_pack,
            bind,
            settings,
        )

    @parameters_of(_invite)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._invite(*args, **kwargs)
        self._runtime = self._invited.runtime()
        try:
            self._form_now(self._invited.wanted())
        except BaseException:  # to the caller, who has no group that he could close
            self.close()
            raise

    @classmethod
    @parameters_of(_invite)
    async def create(cls, *args: Any, **kwargs: Any) -> Group:
        """As the constructor, awaitable.

        Cancellation: this process has not joined.
        """
        group = cls.__new__(cls)
        group._invite(*args, **kwargs)
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
        """What all ranks call the group."""
        return self._invited.name

    @property
    def transport(self) -> str:
        """How it may reach other ranks; see the constructor."""
        return self._invited.transport

    @property
    def rank(self) -> int:
        """Number of this process in the group, from 0 on."""
        return self._work.generation.rank

    @property
    def generation(self) -> int:
        """0 at first; grows with each `reform`."""
        return self._work.generation.number

    @property
    def members(self) -> tuple[str, ...]:
        """The tasks, in the order of ranks: ``/job:worker/task:0``."""
        return tuple(member.task for member in self._work.generation.members)

    @property
    def hosts(self) -> int:
        """Number of machines that the ranks run on."""
        return self._work.generation.hosts

    @property
    def is_broken(self) -> bool:
        """A rank was lost, left, or did not take part: `reform` is needed."""
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
        """A new generation, with the survivors or with newcomers.

        Everybody who goes on calls it, with the same members; a process that was
        started anew makes its `Group` and is among them. What belongs to the old
        generation fails, here and wherever it still travels.

        Args:
            tasks: The members from now on; default: those that the group was made with,
                so that it waits for a lost one to be started anew.
            ranks: The same, as ranks of the generation that ends.
            timeout: Seconds to wait for all of them.

        Raises:
            Exception: As the constructor; the group stays broken, and this may be
                called again.
        """
        wanted = self._next(*args, **kwargs)
        self._leave(_ANEW)
        try:
            self._form_now(wanted)
        except BaseException:  # to the caller: of Ctrl-C, too, which may be late
            self._leave(_GIVEN_UP)
            raise

    @parameters_of(_next)
    async def reform_async(self, *args: Any, **kwargs: Any) -> None:
        """As `reform`. Cancellation: the group is broken; the other ranks hear that
        this one has left, and it may be called again."""
        wanted = self._next(*args, **kwargs)
        await on_own_thread(partial(self._leave, _ANEW))
        try:
            await self._form(wanted)
        except BaseException:  # to the caller: of cancellation, too
            await on_own_thread(partial(self._leave, _GIVEN_UP))
            raise

    def close(self) -> None:
        """Leaves the group: what was sent arrives, what is under way fails.

        Other ranks that need this one hear that it left. Idempotent, and goes on with
        what Ctrl-C has interrupted.
        """
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
        """On the loop: who waits for it may be cancelled when it has just ended, and
        has to leave what was formed."""
        self._work = await form(self._runtime, wanted)
        self._wanted, self._has_formed = wanted, True

    def _leave(self, reason: str) -> None:
        """Leaves the generation, if there is one; done again, it does no more."""
        # Slow lines may have much to carry still; a rank that is lost ends the wait.
        drain = self._invited.settings.timeouts.drain
        words = f"leaving group {self.name!r}"
        with self._leaving:
            try:
                with suppress(ClosedError):  # the loop of the daemon has ended
                    parting = self._parting(reason, drain)
                    self._runtime.run(parting, drain + _SLACK, words)
            finally:
                if self._has_formed:
                    self._work.close()

    async def _parting(self, reason: str, drain: float) -> None:
        # On the loop, which has cancelled by now a forming that was given up.
        if self._has_formed:
            await self._runtime.node.leave(self._work.generation, reason, drain)
