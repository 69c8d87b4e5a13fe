"""Carries the steps of one operation out, over messages or through an engine.

An engine takes one operation at a time, in an order: a turn is drawn where the
operation gets its number, so that it stands in the same order on all ranks; its owner
waits for it, uses the engine, and passes it on.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from zstrat.collectives._engine import Differs, Overdue, margin_of
from zstrat.errors import ClosedError, ZstratError
from zstrat.transport import ThreadBell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from zstrat.collectives._engine import CollectiveCall, CollectiveEngine

    from ._generation import Generation
    from ._operations import Steps
    from ._pending import Pending
    from ._station import GroupRuntime


class MessageOperation:
    """One operation whose calls all travel as messages.

    The first step is made and begun in the thread of the caller, the following ones on
    the loop.

    Args:
        over: Called once, before the pending result hears of the end.
    """

    __slots__ = ("_error", "_generation", "_left", "_over", "_pending", "_steps")

    def __init__(
        self,
        generation: Generation,
        steps: Steps,
        pending: Pending[Any],
        over: Callable[[], None],
    ) -> None:
        self._generation, self._steps, self._pending = generation, steps, pending
        self._over = over
        self._left = 0
        self._error: Exception | None = None

    def begin(self, station: GroupRuntime, calls: Sequence[CollectiveCall]) -> None:
        """Starts the first step."""
        if not station.call_soon(self._start, calls):
            self._fail(ClosedError("the loop of the group has ended"))

    def _start(self, calls: Sequence[CollectiveCall]) -> None:
        self._left = len(calls) + 1
        for call in calls:
            self._generation.start(call, self._ended)
        self._ended(None)

    def _ended(self, error: Exception | None) -> None:
        if error is not None and self._error is None:
            self._error = error
        self._left -= 1
        if self._left:
            return
        if self._error is not None:
            self._fail(self._error)
        else:
            self._go_on()

    def _go_on(self) -> None:
        try:
            calls = next(self._steps)
        except StopIteration as end:
            self._over()
            self._pending.settle(end.value)
        except Exception as error:  # to the caller: his arrays do not fit, say
            self._generation.abort_by(error)
            self._fail(error)
        else:
            self._start(calls)

    def _fail(self, error: Exception) -> None:
        self._over()
        self._pending.fail(error)


class BlockingOperation:
    """One operation that uses an engine: carried out in the thread that runs it."""

    __slots__ = (
        "_calls",
        "_engine",
        "_generation",
        "_over",
        "_pending",
        "_station",
        "_steps",
        "_turn",
    )

    def __init__(
        self,
        station: GroupRuntime,
        generation: Generation,
        engine: CollectiveEngine,
        turn: CallTurn,
        steps: Steps,
        calls: Sequence[CollectiveCall],
        pending: Pending[Any],
        over: Callable[[], None],
    ) -> None:
        self._station, self._generation, self._engine = station, generation, engine
        self._turn, self._steps, self._calls = turn, steps, calls
        self._pending, self._over = pending, over

    def run(self) -> None:
        """Carries it out; the pending result has its outcome when this returns.

        An exception that is none of ours, Ctrl-C say, ends the generation and is
        raised: nobody knows what the engine was doing.
        """
        try:
            with self._turn:
                finish = self._travel()
        except Exception as error:  # to whoever waits for the result
            self._over()
            self._pending.fail(error)
        except BaseException:  # Ctrl-C: on to the caller
            ended = ClosedError(f"{self._pending.words} was interrupted")
            self._station.call_soon(self._generation.abort_by, ended)
            self._over()
            self._pending.fail(ended)
            raise
        else:
            self._over()
            self._pending.settle(finish)

    def _travel(self) -> Any:
        calls = self._calls
        while True:
            if self._generation.broken is not None:
                raise self._generation.refusal()
            self._step(calls)
            try:
                calls = next(self._steps)
            except StopIteration as end:
                return end.value

    def _step(self, calls: Sequence[CollectiveCall]) -> None:
        by_message = [call for call in calls if not self._engine.takes(call)]
        started = [begin(self._station, self._generation, c) for c in by_message]
        for call in calls:
            if call not in by_message:
                self._run(call)
        for each in started:
            each.wait()

    def _run(self, call: CollectiveCall) -> None:
        try:
            self._engine.run(call)
        except Overdue as late:
            self._station.call_soon(self._generation.overdue, call, late.ranks)
        except Differs as other:
            self._station.call_soon(self._generation.differs, call, other.rank)
        except ZstratError:
            if self._generation.broken is None:
                raise
            # The reason why the engine was aborted: now it is known here.
        else:
            return
        raise self._generation.wait_broken(2 * margin_of(call.timeout) + 1.0)


class AwaitedOperation:
    """A call by messages that a thread waits for; implements `Started`."""

    __slots__ = ("_bell", "_error")

    def __init__(self) -> None:
        self._bell = ThreadBell()
        self._error: Exception | None = None

    def ended(self, error: Exception | None) -> None:
        self._error = error
        self._bell.ring()

    def wait(self) -> None:
        self._bell.wait(None)  # bounded: the call has a deadline
        if self._error is not None:
            raise self._error


def begin(
    station: GroupRuntime,
    generation: Generation,
    call: CollectiveCall,
    ranks: Sequence[int] | None = None,
) -> AwaitedOperation:
    """Starts a call by messages, from a thread that will wait for it."""
    awaited = AwaitedOperation()
    if not station.call_soon(generation.start, call, awaited.ended, ranks):
        awaited.ended(ClosedError("the loop of the group has ended"))
    return awaited


class Runner:
    """The thread on which operations that use an engine run, if nobody waits for them.

    Made with the first of them; ends with the generation.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._bell: ThreadBell | None = None
        self._queue: list[BlockingOperation] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def put(self, journey: BlockingOperation) -> None:
        """Runs it after those before it."""
        with self._lock:
            self._queue.append(journey)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._live, name=self._name, daemon=True
                )
                self._thread.start()
            self._wake()

    def close(self) -> None:
        """Ends the thread, after what is queued: that fails at once by now."""
        with self._lock:
            self._is_closed = True
            self._wake()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _wake(self) -> None:
        if self._bell is not None:
            self._bell.ring()
            self._bell = None

    def _live(self) -> None:
        while True:
            with self._lock:
                queue, self._queue = self._queue, []
                if not queue and self._is_closed:
                    return
                bell = self._bell = None if queue else ThreadBell()
            for journey in queue:
                journey.run()
            if bell is not None:
                bell.wait(None)  # until there is more, or `close`


class CallTurn:
    """A place in the order; a context manager: entered when it has come."""

    __slots__ = ("_bell", "_turns")

    def __init__(self, turns: CallTurns, bell: ThreadBell | None) -> None:
        self._turns, self._bell = turns, bell

    def __enter__(self) -> None:
        if self._bell is None:
            return
        try:
            self._bell.wait(None)  # bounded: every operation before it has a deadline
        except BaseException:  # Ctrl-C: nobody leaves what was not entered
            self._turns.give_up(self._bell)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._turns.pass_on()


class CallTurns:
    """Turns of one generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[ThreadBell] = deque()
        self._is_taken = False

    def draw(self) -> CallTurn:
        """The next turn. It must be entered, whatever happens, and is then left."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return CallTurn(self, None)
            bell = ThreadBell()
            self._waiting.append(bell)
            return CallTurn(self, bell)

    def pass_on(self) -> None:
        """Whoever is next has its turn."""
        with self._lock:
            self._ring_next()

    def give_up(self, bell: ThreadBell) -> None:
        """Whoever waits for ``bell`` does not want its turn any more."""
        with self._lock:
            if bell in self._waiting:
                self._waiting.remove(bell)
            else:  # it had come, unheard
                self._ring_next()

    def _ring_next(self) -> None:
        if self._waiting:
            self._waiting.popleft().ring()
        else:
            self._is_taken = False
