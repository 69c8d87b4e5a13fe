"""Executes collective operations by messages, or by an engine (shared memory, or
sockets of the calling thread).

By messages any number of operations can be under way on the loop. An engine runs one
operation at a time, in the same order on all ranks: an operation draws a turn when it
gets its number, waits for the turn, uses the engine, and passes the turn on. Ctrl-C may
interrupt between any two of these steps, so that a turn is lost; then the generation
ends, and all waits for turns with it.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from zstrat.collectives._engine import ConnectionEnded, Differs, Overdue, margin_of
from zstrat.errors import ClosedError, ZstratError
from zstrat.threads import ThreadBell

from ._traffic import key_between

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.collectives._engine import CollectiveCall, CollectiveEngine

    from ._generation import Generation
    from ._operations import Steps
    from ._pending import Pending
    from ._runtime import GroupRuntime


class StartedOperation(NamedTuple):
    """An operation whose first calls are created: the iterator that creates further
    calls, the first calls, and the pending result."""

    steps: Steps
    calls: Sequence[CollectiveCall]
    pending: Pending[Any]


class MessageExecutor:
    """Executes operations and single calls of a generation by messages; implements
    `zstrat.collectives._engine.Between`."""

    def __init__(self, runtime: GroupRuntime, generation: Generation) -> None:
        self._runtime, self._generation = runtime, generation

    def begin(self, operation: StartedOperation) -> None:
        """Starts an operation whose calls run on the loop. From any thread."""
        steps = MessageSteps(self._generation, operation)
        if not self.soon(steps.start, operation.calls):
            operation.pending.fail(ClosedError("the loop of the group has ended"))

    def call(
        self, call: CollectiveCall, ranks: Sequence[int] | None = None
    ) -> AwaitedCall:
        """Starts one call among ``ranks``, or all ranks. Called from the thread that
        will wait for the call."""
        awaited = AwaitedCall()
        start = self._generation.traffic.start
        if not self.soon(start, call, awaited.ended, ranks):
            awaited.ended(ClosedError("the loop of the group has ended"))
        return awaited

    def start(
        self, call: CollectiveCall, ranks: Sequence[int], part: int
    ) -> AwaitedCall:
        named = replace(call, key=key_between(call.key, part), whole=call.key)
        return self.call(named, ranks)

    def abort_by(self, error: Exception) -> None:
        """Ends the generation for all ranks after a local error. From any thread."""
        self.soon(self._generation.abort_by, error)

    def soon(self, function: Callable[..., object], *args: object) -> bool:
        """Calls a function of the generation on its loop. Returns False if the loop has
        ended."""
        return self._runtime.call_soon(function, *args)


class MessageSteps:
    """Runs the steps of one operation by messages, on the loop's thread."""

    __slots__ = ("_error", "_generation", "_left", "_pending", "_steps")

    def __init__(self, generation: Generation, operation: StartedOperation) -> None:
        self._generation = generation
        self._steps, _, self._pending = operation
        self._left = 0
        """Number of calls of the present step that have not ended."""
        self._error: Exception | None = None

    def start(self, calls: Sequence[CollectiveCall]) -> None:
        """Starts the calls of the next step."""
        # One more: a call may end before the next one has started.
        self._left = len(calls) + 1
        for call in calls:
            self._generation.traffic.start(call, self._ended)
        self._ended(None)

    def _ended(self, error: Exception | None) -> None:
        if error is not None and self._error is None:
            self._error = error
        self._left -= 1
        if self._left:
            return
        if self._error is not None:
            self._pending.fail(self._error)
        else:
            self._next_step()

    def _next_step(self) -> None:
        try:
            calls = next(self._steps)
        except StopIteration as end:
            self._pending.settle(end.value)
        except Exception as error:  # to the caller, whose arrays may not fit
            self._generation.abort_by(error)
            self._pending.fail(error)
        else:
            self.start(calls)


class AwaitedCall:
    """A call by messages whose end a thread awaits; implements
    `zstrat.collectives._engine.Started`."""

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


class EngineExecutor:
    """Executes operations with the engine of a generation, one after the other.

    An operation runs in the thread that calls `run`, or, after `put`, on a thread of
    the executor, which starts with the first `put` and ends with `close`.
    """

    def __init__(
        self,
        messages: MessageExecutor,
        generation: Generation,
        engine: CollectiveEngine,
    ) -> None:
        self._messages, self._generation, self._engine = messages, generation, engine
        self._turns = CallTurns()
        self._using = threading.Lock()
        """Held by the thread that uses the engine."""
        self._lock = threading.Lock()
        self._bell: ThreadBell | None = None
        self._queue: deque[CallTurn] = deque()
        """Turns of asynchronous operations, in the order in which they were drawn."""
        self._is_begun = False
        """Whether the start of the executor's thread was requested."""
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # The generation is asked for these when another rank inquires.
        generation.engine_waits = engine.waits
        generation.engine_waited = engine.waited
        generation.on_broken = self._ended

    def draw(self, *, blocking: bool) -> CallTurn:
        """Draws a turn at the engine; see `CallTurns.draw`. Use the turn for `run` if
        ``blocking``, else for `put` or `drop`. To be called by one thread at a time."""
        turn = self._turns.draw()
        if not blocking:
            # Not in `put`: a thread with a later turn may call that earlier.
            with self._lock:
                self._queue.append(turn)
        return turn

    def run(self, turn: CallTurn, operation: StartedOperation) -> None:
        """Waits for the turn, executes an operation in this thread, and sets its
        pending result.

        Exceptions other than failures of the operation, such as Ctrl-C, end the
        generation and are raised, because the state of the engine is unknown.
        """
        pending = operation.pending
        try:
            with turn:
                finish = self._finish(operation)
        except Exception as error:  # to the caller, by the pending result
            pending.fail(error)
        except BaseException:  # Ctrl-C, to the caller
            ended = ClosedError(f"{pending.words} was interrupted")
            self._messages.abort_by(ended)
            pending.fail(ended)
            raise
        else:
            pending.settle(finish)

    def put(self, turn: CallTurn, operation: StartedOperation) -> None:
        """Queues an asynchronous operation for the executor's thread, to be executed at
        its turn."""
        with self._lock:
            is_lost = self._is_closed
            if not is_lost:  # else the thread may still end, and fail it a second time
                turn.operation = operation
            is_first, self._is_begun = not self._is_begun, True
            self._wake()
        if is_first and not is_lost:
            # On the loop: Ctrl-C during the start would break a lock of `threading`.
            is_lost = not self._messages.soon(self._begin)
        if is_lost:
            # The executor closes only after the generation has ended, so there is a
            # reason.
            operation.pending.fail(self._generation.wait_broken(0.0))

    def _begin(self) -> None:
        """Starts the executor's thread. On the loop."""
        thread = threading.Thread(
            target=self._live,
            name=f"zstrat group {self._generation.group}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads
            self._generation.abort_by(error)
            with self._lock:
                queued, self._queue = self._queue, deque()
                self._is_closed = True
            for turn in queued:
                if turn.operation is not None:
                    turn.operation.pending.fail(error)
        else:
            self._thread = thread

    def drop(self, turn: CallTurn) -> None:
        """Removes a turn that gets no operation from the queue of the executor's
        thread; the caller still has to enter and leave the turn."""
        with self._lock:
            if turn in self._queue:
                self._queue.remove(turn)
                self._wake()

    def close(self) -> None:
        """Ends the executor's thread and closes the engine. Queued operations fail at
        once, as the generation has ended."""
        with self._lock:
            self._is_closed = True
            self._wake()
            thread = self._thread
        self._turns.end()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._using:
            self._engine.close()

    def _ended(self, error: ZstratError) -> None:
        """Makes the engine raise the error that ended the generation, and ends all
        waits for turns."""
        self._engine.abort(error)
        self._turns.end()

    def _finish(self, operation: StartedOperation) -> Any:
        """Executes all steps of an operation; returns the function that makes its
        result."""
        calls = operation.calls
        with self._using:
            while True:
                # Looked at for each step: between two steps nothing else would notice.
                if self._generation.broken is not None:
                    raise self._generation.wait_broken(0.0)  # it began before the end
                self._step(calls)
                try:
                    calls = next(operation.steps)
                except StopIteration as end:
                    return end.value

    def _step(self, calls: Sequence[CollectiveCall]) -> None:
        by_engine: list[CollectiveCall] = []
        by_message: list[CollectiveCall] = []
        for call in calls:
            (by_engine if self._engine.takes(call) else by_message).append(call)
        # Messages first: they travel while the engine keeps this thread busy.
        started = [self._messages.call(call) for call in by_message]
        for call in by_engine:
            self._run(call)
        for each in started:
            each.wait()

    def _run(self, call: CollectiveCall) -> None:
        generation = self._generation
        try:
            self._engine.run(call)
        except Overdue as late:
            self._messages.soon(generation.inquire, call, late.ranks)
        except Differs as other:
            self._messages.soon(generation.inquire, call, (other.rank,))
        except ConnectionEnded as ended:
            self._messages.soon(generation.cut_off, ended.rank)
        except ZstratError as error:
            if generation.broken is None:
                self._messages.abort_by(error)
                raise
            # The engine was aborted: the generation has the reason.
        except (TypeError, ValueError):  # invalid on every rank
            raise
        except Exception as error:  # to the caller, after the other ranks
            self._messages.abort_by(error)
            raise
        else:
            return
        # The inquiry takes one margin at most; the rest is for a busy loop.
        raise generation.wait_broken(2 * margin_of(call.timeout) + 1.0)

    def _wake(self) -> None:
        if self._bell is not None:
            self._bell.ring()
            self._bell = None

    def _live(self) -> None:
        while True:
            with self._lock:
                # Only what was put before: a later `put` fails its operation itself.
                if self._is_closed:
                    put = [each for each in self._queue if each.operation is not None]
                    self._queue = deque(put)
                    if not put:
                        return
                operation = self._queue[0].operation if self._queue else None
                if operation is None:
                    bell = self._bell = ThreadBell()
                else:
                    turn = self._queue.popleft()
            if operation is None:
                bell.wait(None)  # until there is more, or `close`
            else:
                self.run(turn, operation)


class CallTurn:
    """A turn at the engine. A context manager, whose enter waits for the turn and whose
    exit passes it on."""

    __slots__ = ("_bell", "_turns", "operation")

    def __init__(self, turns: CallTurns, bell: ThreadBell | None) -> None:
        self._turns, self._bell = turns, bell
        self.operation: StartedOperation | None = None
        """The operation to execute at this turn, once `put` has set it."""

    def __enter__(self) -> None:
        if self._bell is None:
            return
        try:
            # Bounded: every operation before it has a deadline, or the generation ends.
            self._bell.wait(None)
        except BaseException:  # Ctrl-C: what was not entered is not left
            self._turns.give_up(self._bell)
            raise

    def __exit__(self, *_: object) -> None:
        self._turns.pass_on()


class CallTurns:
    """Keeps the order of turns at the engine in one generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[ThreadBell] = deque()
        self._is_taken = False
        self._has_ended = False

    def draw(self) -> CallTurn:
        """Returns the next turn in order. The caller must enter and leave the turn in
        any case."""
        with self._lock:
            if self._has_ended or not self._is_taken:
                self._is_taken = True
                return CallTurn(self, None)
            bell = ThreadBell()
            self._waiting.append(bell)
            return CallTurn(self, bell)

    def pass_on(self) -> None:
        """Lets the next turn in order begin."""
        with self._lock:
            self._ring_next()

    def give_up(self, bell: ThreadBell) -> None:
        """Gives up the turn whose owner waits for ``bell``."""
        with self._lock:
            if bell in self._waiting:
                self._waiting.remove(bell)
            else:  # the turn has come meanwhile
                self._ring_next()

    def end(self) -> None:
        """Ends all waits for turns, as the generation has ended and the order no longer
        matters."""
        with self._lock:
            self._has_ended = True
            while self._waiting:
                self._waiting.popleft().ring()

    def _ring_next(self) -> None:
        if self._waiting:
            self._waiting.popleft().ring()
        else:
            # Nobody waits: the next one who draws enters at once.
            self._is_taken = False
