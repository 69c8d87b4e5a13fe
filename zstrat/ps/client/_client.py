"""The parameter servers of a cluster, as one thing that is pulled from and pushed to.

Lives on the loop that owns the links. A call sends its messages, one to each server (or
several that read or create thousands of variables), to all of them at once, before it
returns; its future is done when all have answered. Requests to one server arrive in the
order of the calls, so that a pull which follows a push on the same client reads what
the push wrote.

A server that is lost is `PSUnavailableError`, whatever was asked of it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from zstrat.ps.store._parts import named
from zstrat.wire import (
    AppliedParts,
    AskParts,
    BindOptimizer,
    CreateOptimizer,
    CreateVariables,
    DeleteVariables,
    InitialEntry,
    InitializeVariables,
    Inspect,
    Message,
    Pulled,
    Pushed,
    Statistics,
    VariableEntry,
    Withdraw,
)

from ._asking import CallPart, ServerCall
from ._exchange_client import exchange
from ._line import PATIENCE, ServerLine
from ._pushing import OwnUpdates, Pushing
from ._reading import Known, Reading, Ref, RowsRef
from ._snapshot_client import SnapshotCalls

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from zstrat.ps.store._parts import EagerRun
    from zstrat.wire import PlainTree

    from ._line import LineLink
    from ._pushing import PsUpdate

BATCH: Final = 512
"""Variables created by one message: their names fit the header by far."""

MEMORY: Final = 256 * 2**20
"""Default bound in bytes of the values that a client remembers."""

M = TypeVar("M")
T = TypeVar("T")


class PsClient(SnapshotCalls):
    """Pulls from and pushes to all parameter servers of one session.

    Args:
        links: One per parameter server, in task order, opened by the caller.
        session: The session that is open on all of them.
        writer: The incarnation in the HELLO of the links; 0: none, and what `update`
            sends has no name.
        memory: Bytes of values to remember, so that a variable which did not change is
            not sent again; 0 remembers nothing.
        patience: Seconds that a request without a deadline waits for a server that is
            away.
    """

    def __init__(
        self,
        links: Sequence[LineLink],
        session: int,
        *,
        writer: int = 0,
        memory: int = MEMORY,
        patience: float = PATIENCE,
    ) -> None:
        self._links = tuple(links)
        self.lines = tuple(
            ServerLine(link, f"/job:ps/task:{ps}", patience)
            for ps, link in enumerate(links)
        )
        """To be told how the links stand, by whoever owns them, if what is asked is to
        outlive a connection."""
        self._session = session
        self._own = OwnUpdates(writer)
        self._known = Known(memory)
        self._incarnations: list[int | None] = [None] * len(self._links)

    @property
    def count(self) -> int:
        """How many servers there are."""
        return len(self._links)

    # ---- values ------------------------------------------------------------------

    def pull(
        self,
        refs: Sequence[Ref],
        rows: Sequence[RowsRef] = (),
        *,
        deadline: float | None = None,
    ) -> asyncio.Future[list[np.ndarray]]:
        """Reads variables, and rows of variables: read-only arrays, first the values in
        the order of ``refs``, then ``[n, ...]`` for each of ``rows``.

        Each is of one whole version of its variable; together they are no snapshot.

        Args:
            deadline: Loop time; None: the default of the link.

        Raises (in the future):
            PSUnavailableError: A parameter server is gone.
            InvalidArgumentError: Indices are no integers, or of rows that are not
                there; names the variable.
            NotFoundError, StaleSessionError: As the server says.
        """
        self._forget_restarted()
        reading = Reading(refs, rows, self._known)
        parts = [
            CallPart(asked.ps, asked.message(self._session), Pulled, asked.take)
            for asked in reading.messages()
        ]
        return self._ask(parts, reading.result, deadline)

    def push(
        self,
        step: int,
        part: int,
        low_water: int,
        updates: Sequence[PsUpdate],
        *,
        deadline: float | None = None,
    ) -> asyncio.Future[bool]:
        """Applies updates: on each server all of its own, or none.

        Args:
            step: The closure whose effect this is, -1 for none. A server applies
                ``(step, part)`` at most once in a session.
            low_water: Of an own update (`update`); what the push of a closure says of
                it is not believed.

        Returns:
            Whether any server applied it; False if all had done so before.

        Raises (in the future):
            PSUnavailableError: A parameter server is gone.
            InvalidArgumentError, NotFoundError, StaleSessionError, BusyError: As the
                server says. Others may have applied their part.
            ValueError: The updates of one server do not fit one message, as those of
                about ten thousand variables: it could not apply them as a whole.
        """
        pushing = Pushing(self._session, step, part, low_water, updates)
        return self._push(pushing, deadline)

    def update(
        self, updates: Sequence[PsUpdate], *, deadline: float | None = None
    ) -> asyncio.Future[bool]:
        """`push`, of no closure: an update of this process's own, applied once by each
        server however often it has to be sent."""
        number, low_water = self._own.begin()
        writer = self._own.writer
        try:
            pushing = Pushing(self._session, number, 0, low_water, updates, writer)
            done = self._push(pushing, deadline)
        except BaseException:  # to the caller: it was not sent
            self._own.end(number)
            raise
        done.add_done_callback(lambda _: self._own.end(number))
        return done

    def push_part(
        self,
        run: EagerRun,
        part: int,
        names: Sequence[str],
        updates: Sequence[PsUpdate],
    ) -> asyncio.Future[bool]:
        """`push` of the next part of an eager step.

        Args:
            names: Of each update: where in the step it is, and what it does.

        Raises (in the future), besides what `push` does:
            RetryDiffersError: An earlier run has done something else there.
            StaleSessionError: A later run has begun.
        """
        step, attempt, low_water = run
        pushing = Pushing(self._session, step, part, low_water, updates)
        parts = [
            CallPart(ps, named(push, attempt, names), Pushed, pushing.take)
            for ps, push in pushing.messages.items()
        ]
        return self._ask(parts, pushing.result)

    async def applied_parts(self, run: EagerRun) -> dict[int, tuple[str, ...]]:
        """What runs of the step before this one have pushed: names by part. They have
        no effect any more.

        Raises:
            PSUnavailableError: A parameter server is gone.
            StaleSessionError: A later run has begun.

        Cancellation: those runs may have ended.
        """
        found: dict[int, tuple[str, ...]] = {}
        open_ = dict.fromkeys(range(len(self._links)), 0)

        def take(ps: int, answer: AppliedParts) -> None:
            found.update((part, tuple(names)) for part, names in answer.parts)
            asked = open_.pop(ps)
            if answer.more and answer.more <= asked:
                raise ValueError(f"parts from {asked} on, and more from {answer.more}")
            if answer.more:
                open_[ps] = answer.more

        while open_:
            parts = [
                CallPart(
                    ps,
                    AskParts(self._session, run.step, run.attempt, first),
                    AppliedParts,
                    partial(take, ps),
                )
                for ps, first in open_.items()
            ]
            await self._ask(parts, _nothing)
        return found

    def exchange(
        self,
        step: int,
        part: int,
        low_water: int,
        updates: Sequence[PsUpdate],
        refs: Sequence[Ref],
        rows: Sequence[RowsRef] = (),
        *,
        deadline: float | None = None,
    ) -> tuple[asyncio.Future[bool], asyncio.Future[list[np.ndarray]]]:
        """`push`, and behind it `pull`, in half as many messages. Either may fail
        without the other, unless a server is gone.

        Args:
            deadline: Loop time, of both; None: the default of the link.

        Returns:
            What `push` and what `pull` would have returned.
        """
        self._forget_restarted()
        pushing = Pushing(self._session, step, part, low_water, updates)
        reading = Reading(refs, rows, self._known)
        return exchange(self.lines, self._session, pushing, reading, deadline)

    # ---- variables and optimizers --------------------------------------------------

    async def create(
        self, variables: Sequence[tuple[int, VariableEntry, np.ndarray]]
    ) -> None:
        """Creates variables, ``(ps, entry, initial value)`` each.

        One of the same key, shape and dtype that is there already stays as it is.

        Raises:
            PSUnavailableError: A parameter server is gone.
            AlreadyExistsError: A key is taken by another variable.

        Cancellation: variables may have been created.
        """
        mine: dict[int, list[tuple[VariableEntry, np.ndarray]]] = {}
        for ps, entry, value in variables:
            mine.setdefault(ps, []).append((entry, value))
        parts: list[CallPart[object]] = []
        for ps, pairs in mine.items():
            for at in range(0, len(pairs), BATCH):
                some = pairs[at : at + BATCH]
                entries, arrays = [e for e, _ in some], tuple(a for _, a in some)
                message = CreateVariables(self._session, entries, arrays)
                parts.append(CallPart(ps, message, object, _nothing))
        await self._ask(parts, _nothing)

    async def initialize(
        self,
        variables: Sequence[tuple[int, InitialEntry]],
        code: bytes,
        *,
        deadline: float | None = None,
    ) -> None:
        """Has the servers make variables, ``(ps, entry)`` each, with one shipped
        initializer; no value travels.

        One of the same key, shape and dtype that is there already stays as it is.

        Args:
            deadline: Loop time; None: the default of the link, which is too short for
                tables of many gigabytes.

        Raises:
            PSUnavailableError: A parameter server is gone.
            InvalidArgumentError: The initializer failed or returned something else;
                says what.
            AlreadyExistsError: A key is taken by another variable.

        Cancellation: variables may have been created.
        """
        mine: dict[int, list[InitialEntry]] = {}
        for ps, entry in variables:
            mine.setdefault(ps, []).append(entry)
        parts: list[CallPart[object]] = []
        for ps, entries in mine.items():
            for at in range(0, len(entries), BATCH):
                some = entries[at : at + BATCH]
                message = InitializeVariables(self._session, some, code)
                parts.append(CallPart(ps, message, object, _nothing))
        await self._ask(parts, _nothing, deadline)

    async def delete(self, refs: Sequence[Ref]) -> None:
        """Deletes variables with their optimizer slots.

        Raises:
            PSUnavailableError: A parameter server is gone.
            NotFoundError: A variable does not exist; nothing is deleted on its server.

        Cancellation: variables may have been deleted.
        """
        mine: dict[int, list[int]] = {}
        for ref in refs:
            mine.setdefault(ref[0], []).append(ref[1])
            self._known.drop(ref)
        await self._ask(
            [
                CallPart(ps, DeleteVariables(self._session, keys), object, _nothing)
                for ps, keys in mine.items()
            ],
            _nothing,
        )

    async def create_optimizer(self, optimizer: int, name: str, code: bytes) -> None:
        """Ships an optax transformation to all parameter servers.

        Raises:
            PSUnavailableError: A parameter server is gone.
            InvalidArgumentError: It cannot run there; says what to write instead.
            AlreadyExistsError: The id is taken by another one.

        Cancellation: it may have been registered.
        """
        message = CreateOptimizer(self._session, optimizer, name, code)
        parts = [
            CallPart(ps, message, object, _nothing) for ps in range(len(self._links))
        ]
        await self._ask(parts, _nothing)

    async def bind(
        self,
        optimizer: int,
        data: bytes,
        servers: Sequence[int] | None = None,
        *,
        deadline: float | None = None,
    ) -> None:
        """Tells servers (None: all) which variables an optimizer moves: ``data`` is
        `zstrat.optimizers.Binding.encoded`. The same again costs a round trip.

        Args:
            deadline: Loop time; None: the default of the link.

        Raises:
            PSUnavailableError: A parameter server is gone.
            NotFoundError: The optimizer does not exist.
            InvalidArgumentError: It does not fit, or is another program there.
            AlreadyExistsError: A variable is in another tree, which moves it otherwise.
            BusyError: The optimizer has too many trees.

        Cancellation: it may have been bound.
        """
        told = range(len(self._links)) if servers is None else servers
        arrays = (np.frombuffer(data, np.uint8),)
        message = BindOptimizer(self._session, optimizer, arrays)
        parts = [CallPart(ps, message, object, _nothing) for ps in told]
        await self._ask(parts, _nothing, deadline)

    async def withdraw(self, refs: Sequence[Ref], optimizers: Sequence[int]) -> None:
        """Drops what a failed creation of these has left, as far as it is there. What
        of it is still under way is done before.

        Raises:
            PSUnavailableError: A parameter server is gone.

        Cancellation: it may have been dropped.
        """
        everywhere = list(optimizers)
        mine: dict[int, list[int]] = (
            {ps: [] for ps in range(len(self._links))} if everywhere else {}
        )
        for ref in refs:
            mine.setdefault(ref[0], []).append(ref[1])
            self._known.drop(ref)
        await self._ask(
            [
                CallPart(
                    ps, Withdraw(self._session, keys, everywhere), object, _nothing
                )
                for ps, keys in mine.items()
            ],
            _nothing,
        )

    async def statistics(self) -> list[dict[str, PlainTree]]:
        """What each parameter server says of itself, in task order.

        Raises:
            PSUnavailableError: A parameter server is gone.

        Cancellation: nothing is lost.
        """
        answers: dict[int, dict[str, PlainTree]] = {}

        def take(ps: int, answer: Statistics) -> None:
            answers[ps] = answer.values

        parts = [
            CallPart(ps, Inspect(), Statistics, partial(take, ps))
            for ps in range(len(self._links))
        ]
        return await self._ask(parts, lambda: [answers[ps] for ps in sorted(answers)])

    # ---- asking several at once ------------------------------------------------------

    async def each(
        self,
        messages: Sequence[tuple[int, Message]],
        want: type[M],
        *,
        deadline: float | None = None,
    ) -> list[M]:
        """Sends messages, ``(ps, message)``, all at once; their answers, in order.

        Args:
            deadline: Loop time; None: the default of the link.

        Raises:
            PSUnavailableError: A parameter server is gone.
            ProtocolError: An answer is none of ``want``.
            Exception: The first that a server answers with.

        Cancellation: what was sent is carried out.
        """
        answers: dict[int, M] = {}
        parts = [
            CallPart(ps, message, want, partial(answers.__setitem__, place))
            for place, (ps, message) in enumerate(messages)
        ]
        return await self._ask(
            parts, lambda: [answers[at] for at in range(len(parts))], deadline
        )

    def _ask(
        self,
        parts: Sequence[CallPart[Any]],
        result: Callable[[], T],
        deadline: float | None = None,
    ) -> asyncio.Future[T]:
        """Sends all parts; done with the last answer or the first error."""
        call = ServerCall(len(parts), result)
        for part in parts:
            call.send(self.lines[part.ps], part, deadline)
        return call.outcome

    def _push(self, pushing: Pushing, deadline: float | None) -> asyncio.Future[bool]:
        parts = [
            CallPart(ps, push, Pushed, pushing.take)
            for ps, push in pushing.messages.items()
        ]
        return self._ask(parts, pushing.result, deadline)

    def _forget_restarted(self) -> None:
        """Versions begin anew in a new process."""
        for ps, link in enumerate(self._links):
            peer = link.peer
            if peer is not None and peer.incarnation != self._incarnations[ps]:
                if self._incarnations[ps] is not None:
                    self._known.clear()
                self._incarnations[ps] = peer.incarnation


def _nothing(answer: object = None) -> None:
    pass
