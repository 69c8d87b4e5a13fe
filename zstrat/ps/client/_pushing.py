"""Pushes, and contributions to synchronous rounds, to all parameter servers.

A push is a message for each parameter server. All updates of one server are in one
message, because it applies all or none. A push and the pull after it are one message to
each server that takes part in both (`exchange`). Their results are independent, as
those of two messages: a server that refuses one part answers the other, and if one part
cannot be sent, the other one is.
"""

from __future__ import annotations

import abc
import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from zstrat.errors import from_wire
from zstrat.ps.store._ledger import UNNAMED
from zstrat.wire import (
    AskRounds,
    CloseRound,
    Contribute,
    Done,
    Exchange,
    Exchanged,
    HeldRounds,
    Merged,
    Pulled,
    PulledRound,
    PullMerged,
    PullRound,
    Push,
    Pushed,
    Update,
)

from ._asking import AskedServers, CallPart, ServerCall, nothing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from zstrat.wire import Message, PushPart, RoundNumber, RoundOrder, StepContribution

    from ._line import ServerLine
    from ._reading import Clocks, Reading, Ref, RowsRef, ServerPull


MAX_EXCHANGED_VARIABLES: Final = 2048
"""The most entries of one exchange, which easily fit a header. For more entries push
and pull are two messages; one more message costs little compared with so many
entries."""


class PsUpdate(NamedTuple):
    """One update of one variable in a push. ``op`` is an `UpdateOp`, with the codec of
    the gradient (`zstrat.wire.CODED`). ``optimizer`` is the optimizer that applies the
    gradient; 0 for a plain update."""

    ps: int
    key: int
    op: int
    optimizer: int
    arrays: Sequence[np.ndarray]


@final
class Pushing:
    """The messages of one push to several servers: those of its updates, and
    ``servers``. `take` receives each answer; `result` is valid when all have
    answered."""

    __slots__ = ("_applied", "_clocks", "messages")

    def __init__(
        self,
        session: int,
        step: int,
        part: int,
        low_water: int,
        updates: Iterable[PsUpdate],
        writer: int = 0,
        *,
        clocks: Clocks | None = None,
        leases: bytes = b"",
        servers: Iterable[int] = (),
    ) -> None:
        by_ps: dict[int, tuple[list[Update], list[np.ndarray]]]
        # Servers without updates get a message, too: for the leases.
        by_ps = {ps: ([], []) for ps in servers}
        for ps, key, op, optimizer, operands in updates:
            if ps not in by_ps:
                by_ps[ps] = ([], [])
            entries, arrays = by_ps[ps]
            entries.append(Update(key, int(op), optimizer, len(operands)))
            arrays.extend(operands)
        self.messages = {
            ps: Push(
                session, step, part, low_water, entries, tuple(arrays), writer, leases
            )
            for ps, (entries, arrays) in by_ps.items()
        }
        self._applied = not by_ps
        self._clocks = clocks

    def parts(self) -> list[CallPart[Pushed]]:
        """Returns the messages as parts of a call."""
        return [self.part(ps, push) for ps, push in self.messages.items()]

    def part(self, ps: int, message: Push | PushPart) -> CallPart[Pushed]:
        """Returns one message to a server as a part of a call."""
        return CallPart(ps, message, Pushed, partial(self.take, ps))

    def take(self, ps: int, answer: Pushed | Exchanged) -> None:
        self._applied |= answer.applied
        if self._clocks is not None and answer.applied:
            self._clocks[ps] = answer.clock

    def result(self) -> bool:
        """Returns whether any server applied the push, or there was nothing to
        apply."""
        return self._applied


@final
class OwnUpdates:
    """Numbers the updates that a process makes outside of closures.

    ``writer`` is the incarnation of the process; 0: its updates have no names.
    """

    __slots__ = ("_next", "_open", "writer")

    def __init__(self, writer: int) -> None:
        self.writer = writer
        self._next = 0
        self._open: dict[int, None] = {}  # in the order of their numbers

    def begin(self) -> tuple[int, int]:
        """Returns a new number, and the lowest number whose update is not over."""
        # Without an incarnation a server could not tell whose number it is.
        if not self.writer:
            return UNNAMED, 0
        number, self._next = self._next, self._next + 1
        self._open[number] = None
        # A dict keeps its order, so the first key is the lowest number that is open.
        return number, next(iter(self._open))

    def end(self, number: int) -> None:
        """Notes that the update of this number is over, whatever its outcome. When a
        later update has sent this to the servers (as the lowest number that is not
        over), late copies of the ended update have no effect."""
        self._open.pop(number, None)


def exchange(
    lines: Sequence[ServerLine],
    session: int,
    pushing: Pushing,
    reading: Reading,
    deadline: float | None,
) -> tuple[asyncio.Future[bool], asyncio.Future[list[np.ndarray]]]:
    """Sends all messages of a push and of the pull after it; returns the future of
    each."""
    left, asked = dict(pushing.messages), list(reading.messages())
    both = _Both(
        session,
        pushing,
        ServerCall(len(left), pushing.result),
        ServerCall(len(asked), reading.result),
        deadline,
    )
    # Nothing is read from these: they get the push alone.
    for ps in left.keys() - {each.ps for each in asked}:
        both.send_push(lines[ps], ps, left.pop(ps))
    for each in asked:
        push = left.pop(each.ps, None)  # a second message to a server only reads
        if push is None:
            both.send_pull(lines[each.ps], each)
        elif (
            # A header is bounded, and each variable has an entry in it.
            len(push.updates) + len(each.reads) + len(each.rows)
            > MAX_EXCHANGED_VARIABLES
        ):
            both.send_apart(lines[each.ps], push, each)
        else:
            both.send(lines[each.ps], push, each)
    return both.pushed.outcome, both.pulled.outcome


def pulling(asked: ServerPull, session: int) -> CallPart[Pulled]:
    """Returns a pull from one server as a part of a call."""
    return CallPart(asked.ps, asked.message(session), Pulled, asked.take)


class _Both:
    """The two calls of one exchange, a push and a pull, over messages that carry both
    parts or only one of them."""

    __slots__ = ("_deadline", "_pushing", "_session", "pulled", "pushed")

    def __init__(
        self,
        session: int,
        pushing: Pushing,
        pushed: ServerCall[bool],
        pulled: ServerCall[list[np.ndarray]],
        deadline: float | None,
    ) -> None:
        self._session, self._pushing, self._deadline = session, pushing, deadline
        self.pushed, self.pulled = pushed, pulled

    def send_push(self, line: ServerLine, ps: int, push: Push) -> None:
        self.pushed.send(line, self._pushing.part(ps, push), self._deadline)

    def send_pull(self, line: ServerLine, asked: ServerPull) -> None:
        self.pulled.send(line, pulling(asked, self._session), self._deadline)

    def send_apart(self, line: ServerLine, push: Push, asked: ServerPull) -> None:
        self.send_push(line, asked.ps, push)
        self.send_pull(line, asked)

    def send(self, line: ServerLine, push: Push, asked: ServerPull) -> None:
        """Sends both parts to one server, in one message if they fit."""
        # One of the two has failed already, and must not take the other with it.
        if self.pushed.outcome.done() or self.pulled.outcome.done():
            self.send_apart(line, push, asked)
            return
        message = Exchange(
            self._session,
            push.step,
            push.part,
            push.low_water,
            push.updates,
            asked.reads,
            asked.rows,
            (*push.arrays, *asked.arrays),
            push.leases,
            asked.sets,
        )
        try:
            reply = line.submit(message, deadline=self._deadline)
        except (TypeError, ValueError):  # one of them cannot travel, and says so itself
            self.send_apart(line, push, asked)
        except Exception as error:  # goes to the callers, as if the server had said it
            self._fail(error)
        else:
            part = CallPart(asked.ps, message, Exchanged, asked.take)
            reply.add_done_callback(partial(self._replied, line, part))

    def _replied(
        self,
        line: ServerLine,
        part: CallPart[Exchanged],
        reply: asyncio.Future[Message],
    ) -> None:
        try:
            answer = part.answer(reply)
        except BaseException as error:  # goes to the callers
            later = line.resubmit(part.message, self._deadline, reply)
            if later is None:
                self._fail(error)
            else:
                later.add_done_callback(partial(self._replied, line, part))
            return
        if answer.push_error is None:
            self.pushed.take(partial(self._pushing.take, part.ps), answer, part)
        else:
            self.pushed.fail(from_wire(answer.push_error))
        if answer.pull_error is None:
            self.pulled.take(part.take, answer, part)
        else:
            self.pulled.fail(from_wire(answer.pull_error))

    def _fail(self, error: BaseException) -> None:
        self.pushed.fail(error)
        self.pulled.fail(error)


UNLIMITED: Final = 10.0**9
"""Seconds that a pull waits for its round: practically forever, because the coordinator
decides when a round takes too long."""


class RoundCalls(AskedServers, abc.ABC):
    """The calls of `PsClient` about synchronous rounds."""

    @abc.abstractmethod
    def _reading(
        self, refs: Sequence[Ref], rows: Sequence[RowsRef], clocks: Clocks | None
    ) -> Reading:
        """Prepares a pull of these variables and rows."""

    def contribute(
        self, given: Sequence[StepContribution], updates: Sequence[PsUpdate]
    ) -> asyncio.Future[None]:
        """Sends the gradients of a step to all servers, which keep them until the round
        of the step is closed.

        Raises (in the future):
            PSUnavailableError: A parameter server is gone.
            InvalidArgumentError, NotFoundError, StaleSessionError, BusyError: A server
                refuses the contribution. Other servers may have kept their part.
        """
        pushes = Pushing(self.session, 0, 0, 0, updates).messages
        parts: list[CallPart[Any]] = []
        # Every server, as a round needs all of them to acknowledge a contribution.
        for ps in range(self.count):
            push = pushes.get(ps)
            content = ([], ()) if push is None else (push.updates, push.arrays)
            asked = Contribute(self.session, list(given), *content)
            parts.append(CallPart(ps, asked, Done, nothing))
        return self._ask(parts, nothing)

    def pull_round(
        self,
        after: Sequence[RoundNumber],
        refs: Sequence[Ref],
        rows: Sequence[RowsRef] = (),
        *,
        clocks: Clocks | None = None,
        numbers: dict[int, int],
    ) -> asyncio.Future[list[np.ndarray]]:
        """Reads as `PsClient.pull`, once all rounds before those in ``after`` are
        closed.

        Args:
            numbers: Filled, for each optimizer, with the earliest round in which any of
                the servers was read.
        """
        reading = self._reading(refs, rows, clocks)

        def take(asked: ServerPull, answer: PulledRound) -> None:
            # The earliest number counts: what a step has read is at least as new.
            for each, number in zip(after, answer.numbers, strict=True):
                before = numbers.get(each.optimizer, number)
                numbers[each.optimizer] = min(before, number)
            asked.take(answer)

        parts = [
            CallPart(
                asked.ps,
                PullRound(
                    self.session, list(after), asked.reads, asked.rows, asked.arrays
                ),
                PulledRound,
                partial(take, asked),
            )
            for asked in reading.messages()
        ]
        # Nothing else bounds the wait: the coordinator notices a round that does not
        # close.
        deadline = asyncio.get_running_loop().time() + UNLIMITED
        return self._ask(parts, reading.result, deadline)

    async def close_round(
        self,
        order: RoundOrder,
        kept: Sequence[int],
        over: int,
        operands: Sequence[np.ndarray] = (),
    ) -> None:
        """Closes a round on all servers; see `CloseRound`.

        Raises:
            PSUnavailableError: A parameter server is gone.
            ZstratError: A server refuses to close the round.

        Cancellation: some servers may have closed the round.
        """
        message = CloseRound(self.session, order, list(kept), over, tuple(operands))
        await self.each([(ps, message) for ps in range(self.count)], Done)

    async def pull_merged(
        self, order: RoundOrder
    ) -> tuple[list[bytes], dict[int, tuple[np.ndarray, ...]]]:
        """Reads the trees of the optimizer (`zstrat.optimizers.Binding.encoded`), and
        the merged gradients of the members of a round, by key of the variable: an
        array, or indices and rows.

        Raises: As `close_round`.

        Cancellation: changes nothing.
        """
        # All servers have all trees.
        asked = [PullMerged(self.session, order, ps == 0) for ps in range(self.count)]
        trees: list[bytes] = []
        found: dict[int, tuple[np.ndarray, ...]] = {}
        for answer in await self.each(list(enumerate(asked)), Merged):
            arrays = iter(answer.arrays)
            trees += [next(arrays).tobytes() for _ in range(answer.trees)]
            for update in answer.updates:
                found[update.key] = tuple(
                    [next(arrays) for _ in range(update.operands)]
                )
        return trees, found

    async def held_rounds(self, deadline: float) -> list[dict[int, HeldRounds]]:
        """Returns, for each server, the state of the rounds of all optimizers, by the
        number of the optimizer.

        Raises: As `close_round`.

        Cancellation: changes nothing.
        """

        async def held_on(ps: int) -> dict[int, HeldRounds]:
            found: dict[int, HeldRounds] = {}
            # One optimizer per answer; 0 is the number of none.
            while True:
                asked = ps, AskRounds(self.session, max(found, default=0))
                (held,) = await self.each([asked], HeldRounds, deadline=deadline)
                if not held.closed.optimizer:
                    return found
                found[held.closed.optimizer] = held

        return await asyncio.gather(*map(held_on, range(self.count)))
