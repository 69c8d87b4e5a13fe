"""The links of a worker to the servers, and the format of gradients on them.

Servers may move. The owner of the cluster's session decides where a server is; a worker
that cannot reach one, or finds another process in its place, waits for a word of that
for a while.

`PushEncoding` puts gradients that go over a network in the format that their optimizer
asks for (``wire=``). Law: the sum of what was sent and acknowledged, and of what
`Residuals` keep, is the sum of the gradients whose pushes were acknowledged. A step
takes the residual away with it; when its push is acknowledged, what the format left out
comes back; when the push fails, the residual comes back as it was, since the step runs
again elsewhere. So steps may be under way at the same time, and none sends a residual
twice.

Error feedback is from Seide et al., "1-Bit Stochastic Gradient Descent" (2014).
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from zstrat.codecs import GRADIENT_BLOCK, ROW_BLOCK, decode_gradient, encode_gradient
from zstrat.errors import ClosedError, ProtocolError
from zstrat.wire import CODED, Codec, Done, Job, UpdateOp

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from zstrat.codecs import Wire
    from zstrat.config import Timeouts
    from zstrat.errors import PeerLostError
    from zstrat.ps import PsUpdate, ServerLine
    from zstrat.transport import MakeTaskLink, TaskLink
    from zstrat.wire import Hello, Message, MoveServer


RESTARTED: Final = "it was restarted, and its state is lost"


@final
class ServerPresence:
    """Watches the link to one parameter server, and sets the state of its line.

    A server that was restarted has lost the state of the session, so it stays lost for
    the rest of the session, or until its store is found elsewhere. A server that is
    only unreachable has some time to come back. The line is set before the link starts.

    Workers and the program connect to servers in any order: until the program has sent
    work, a server may have no state of the session, and be restarted any time.

    Args:
        is_used: The program has sent work.
        grace: Seconds for a lost server to come back, if it has not announced more.
        moves: The store may move to another process, and has as long for that.
    """

    line: ServerLine

    def __init__(
        self, grace: float, *, moves: bool = False, is_used: bool = True
    ) -> None:
        self._grace, self._moves, self.is_used = grace, moves, is_used
        self._life: int | None = None
        """The incarnation that has the state of the session."""
        self._absence: asyncio.TimerHandle | None = None
        self._is_closed = False

    def opened(self, hello: Hello) -> None:
        """Notes that the server has greeted."""
        if self._is_closed:
            return
        # The process of before, or one that had nothing to lose yet.
        if not self.is_used or self._life in (None, hello.incarnation):
            self._stop_absence()
            self._life = hello.incarnation
            self.line.resume()
        # Its store may be promoted elsewhere, so requests wait instead of failing.
        elif self._moves:
            self.line.hold()
            self._miss(RESTARTED)
        else:
            self._stop_absence()
            self.line.lose(RESTARTED, gone=True)

    def lost(self, error: PeerLostError) -> None:
        """Notes that the link has lost the server."""
        if not self._is_closed:
            self._miss(error.reason, error.returns)

    def leave(self) -> None:
        """Stops watching, as another presence takes over the line."""
        self._is_closed = True
        self._stop_absence()

    def close(self, error: Exception) -> None:
        """Stops watching, and closes the line."""
        self.leave()
        self.line.close(error)

    def _stop_absence(self) -> None:
        if self._absence is not None:
            self._absence.cancel()
            self._absence = None

    def _miss(self, reason: str, returns: float = 0.0) -> None:
        # The first loss counts: a server that comes and goes does not get the time
        # again.
        if self._absence is None:
            grace = max(self._grace, returns)
            loop = asyncio.get_running_loop()
            self._absence = loop.call_later(grace, self._give_up, reason)

    def _give_up(self, reason: str) -> None:
        self._absence = None
        self.line.lose(reason, gone=False)


@final
class ServerLinks:
    """The links to all parameter servers of a session, in task order. On the loop.

    Args:
        views: View numbers of the stores at these addresses; empty if stores do not
            move.
        replicas: Number of backups of each store, one of which may replace it.
    """

    def __init__(
        self,
        make_link: MakeTaskLink,
        addresses: Sequence[str],
        views: Sequence[int],
        timeouts: Timeouts,
        *,
        replicas: int = 0,
    ) -> None:
        self._make_link, self._views = make_link, list(views)
        self._replicas = replicas
        # The program takes as long to notice a loss, and to promote a backup.
        self._grace = timeouts.reconnect + (2 * timeouts.liveness if replicas else 0.0)
        self._presences: list[ServerPresence] = []
        self._lines: Sequence[ServerLine] = ()
        self._is_closed = self._is_used = False
        self.links = [self._new(index, at) for index, at in enumerate(addresses)]

    def attach(self, lines: Sequence[ServerLine]) -> None:
        """Sets the lines of the servers. Called once, before `start`."""
        self._lines = lines
        for presence, line in zip(self._presences, lines, strict=True):
            presence.line = line

    def use(self) -> None:
        """Notes that the program has sent work. So its session is on all servers, and a
        server that restarts from now on has lost its state."""
        if not self._is_used:
            self._is_used = True
            for presence in self._presences:
                presence.is_used = True

    def start(self) -> None:
        """Starts to connect."""
        for link in self.links:
            link.start()

    async def wait_open(self, deadline: float) -> None:
        """Waits until all servers have greeted.

        Raises:
            DeadlineExceededError: A server did not by ``deadline`` (loop time); names
                it.
            ClosedError: The session ended meanwhile.

        Cancellation: the links keep connecting.
        """
        # Over a copy, as `move` may replace a link while this waits.
        for index, link in enumerate(list(self.links)):
            try:
                await link.wait_open(deadline)
            except ClosedError:
                if link is self.links[index]:
                    raise  # else the store has moved, and requests wait there

    async def move(self, message: MoveServer) -> Message:
        """Connects to a store at its new address. Returns when open requests were sent
        there, or wait for the connection.

        Cancellation: the link is not opened.
        """
        index = message.index
        if not 0 <= index < len(self._views):
            raise ProtocolError(
                f"MoveServer of ps {index}: expected an index below {len(self._views)}"
            )
        # Orders may overtake each other on the way; only the newest view counts.
        if message.view <= self._views[index] or self._is_closed:
            return Done()
        self._views[index] = message.view
        # Only after the view is noted, as a move to the same address must also outdate
        # older ones.
        before = self.links[index]
        if before.address == message.address:
            return Done()
        # The old presence must not touch the line that the new link serves.
        self._presences[index].leave()
        link = self.links[index] = self._new(index, message.address)
        self._presences[index].line = self._lines[index]
        self._lines[index].move(link)
        await before.close("it has moved")
        # After callbacks of the closed link, which requeue its requests in order.
        asyncio.get_running_loop().call_soon(partial(self._start, index, link))
        return Done()

    async def close(self, reason: str) -> None:
        """Closes all links, last of all.

        Cancellation: links that are not closed yet stay open.
        """
        self._is_closed = True
        for presence in self._presences:
            presence.close(ClosedError(reason))
        await asyncio.gather(*[link.close(reason) for link in self.links])

    def _start(self, index: int, link: TaskLink) -> None:
        # Another move, or the end, may have come in the meantime.
        if self.links[index] is link and not self._is_closed:
            link.start()

    def _new(self, index: int, address: str) -> TaskLink:
        there = ServerPresence(
            self._grace, moves=bool(self._replicas), is_used=self._is_used
        )
        if index < len(self._presences):
            self._presences[index] = there
        else:
            self._presences.append(there)
        return self._make_link(
            address,
            name=f"/job:ps/task:{index}",
            expect=(Job.PS, index),
            on_open=there.opened,
            on_lost=there.lost,
        )


MIN_NUMBERS: Final = GRADIENT_BLOCK
"""Gradients with fewer numbers travel as they are: the header costs more."""

_BYTES: Final = {Codec.BFLOAT16: 2, Codec.INT8: 1}
"""Bytes of a number; gradients whose numbers have no more travel as they are."""


class Lent(NamedTuple):
    """The residual of a variable while a push is under way."""

    key: int
    before: np.ndarray | None
    after: np.ndarray
    """What the format leaves out."""


@final
class Residuals:
    """The residuals of one worker for one coordinator, in all sessions. For any
    thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        with self._lock:
            return sum(array.nbytes for array in self._kept.values())

    def take(self, key: int) -> np.ndarray | None:
        """Takes the residual of a variable away; None if there is none."""
        with self._lock:
            return self._kept.pop(key, None)

    def clear(self) -> None:
        """Drops all of them, as they are of gradients of other values."""
        with self._lock:
            self._kept.clear()

    def settle(self, lent: Iterable[Lent], *, is_sent: bool) -> None:
        """Brings back what a push has left out, or, if it failed, what it had taken."""
        for key, before, after in lent:
            back = after if is_sent else before
            if back is None:
                continue
            with self._lock:
                # Several steps may be under way: what they leave out is added up, and
                # the next step sends it all.
                there = self._kept.get(key)
                self._kept[key] = back if there is None else there + back


@final
class PushEncoding:
    """Encodes the pushes of one session of a worker. For the executor thread.

    Args:
        shares_memory: Whether bodies to a parameter server go through shared memory,
            which is faster than any format. For any thread.
        counts: Bytes of gradients that were encoded (``encoded_from``), and of what
            stands for them (``encoded_to``).
        residuals: Those of the coordinator's session before; None: it is its first.
    """

    def __init__(
        self,
        shares_memory: Callable[[int], bool],
        counts: Counter[str],
        residuals: Residuals | None = None,
    ) -> None:
        self._shares_memory, self._counts = shares_memory, counts
        self.residuals: Final = Residuals() if residuals is None else residuals

    def encoded(
        self, step: int, updates: Sequence[PsUpdate], wires: Mapping[int, Wire]
    ) -> tuple[list[PsUpdate], list[Lent]]:
        """Encodes the updates of a step.

        Args:
            wires: The formats, by number of the optimizer.

        Returns:
            The updates, and the residuals that they have taken: give them back to
            `residuals` when the push has ended.
        """
        lent: list[Lent] = []
        try:
            sent = [self._encoded(step, update, wires, lent) for update in updates]
        except BaseException:  # to the step, which does not push
            # Some residuals were taken before the one that failed.
            self.residuals.settle(lent, is_sent=False)
            raise
        return sent, lent

    def _encoded(
        self,
        step: int,
        update: PsUpdate,
        wires: Mapping[int, Wire],
        lent: list[Lent],
    ) -> PsUpdate:
        wire = wires.get(update.optimizer)
        # Indices of rows, and operands of the optimizer, stand before it.
        gradient = update.arrays[-1]
        if (
            wire is None
            or wire.push is None
            or update.op not in (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS)
            or gradient.size < MIN_NUMBERS
            or gradient.dtype.kind in "iubc"
            or gradient.dtype.itemsize <= _BYTES.get(wire.codec, 0)
            or self._shares_memory(update.ps)
        ):
            return update
        is_of_rows = update.op == UpdateOp.OPTIMIZE_ROWS
        codec = wire.codec
        # Rows keep no residuals, and top-k without them would lose most of each row for
        # good.
        if is_of_rows and codec is Codec.TOP_K:
            return update
        block = ROW_BLOCK if is_of_rows else GRADIENT_BLOCK
        # Without feedback rounding has to be random, so its errors cancel over steps;
        # the seed makes a step that runs again send the same.
        seed: int | None = step << 32 | update.key
        if wire.has_feedback and not is_of_rows:
            before, seed = self.residuals.take(update.key), None
            # Noted before the work that may fail, so the caller can give it back.
            lent.append(Lent(update.key, before, gradient))
            if before is not None:
                gradient = gradient + before
            coded = encode_gradient(
                codec, gradient, block=block, seed=seed, density=wire.density or 1.0
            )
            after = np.subtract(
                gradient,
                decode_gradient(codec, gradient.shape, coded, block),
                dtype=np.float32,
            )
            # What is not finite was sent; kept, it would spoil all later steps.
            np.nan_to_num(after, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
            lent[-1] = Lent(update.key, before, after)
        else:
            coded = encode_gradient(codec, gradient, block=block, seed=seed)
        self._counts["encoded_from"] += gradient.nbytes
        self._counts["encoded_to"] += sum(array.nbytes for array in coded)
        arrays = (*update.arrays[:-1], *coded)
        return update._replace(op=update.op + CODED * codec, arrays=arrays)
