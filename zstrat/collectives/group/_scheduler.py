"""Starts the operations of one generation: numbers and describes them, and passes them
to an executor."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zstrat.collectives._engine import margin_of
from zstrat.errors import BusyError, ClosedError

from ._executors import EngineExecutor, MessageExecutor, StartedOperation
from ._operations import CallFactory
from ._pending import Pending

if TYPE_CHECKING:
    from zstrat.collectives._engine import CollectiveEngine

    from ._executors import CallTurn
    from ._generation import Generation
    from ._operations import OperationRequest

IN_FLIGHT: Final = 1024
"""Most operations of one group that may be under way: each holds memory of its
caller."""


class OperationScheduler:
    """Starts the operations of one generation: by ``engine`` if all ranks have one,
    else by ``messages``."""

    def __init__(
        self,
        generation: Generation,
        messages: MessageExecutor,
        engine: CollectiveEngine | None,
    ) -> None:
        self.generation, self.engine, self._messages = generation, engine, messages
        self._by_engine: EngineExecutor | None = None
        if engine is not None:
            self._by_engine = EngineExecutor(messages, generation, engine)
        self._lock = threading.Lock()
        self._tagged: Counter[str] = Counter()
        self._in_flight = 0

    def launch(self, request: OperationRequest, *, blocking: bool) -> Pending[Any]:
        """Starts an operation and returns its pending result. If ``blocking``, an
        engine may run the operation before the method returns. The operation gets its
        number here, in the thread of the caller.

        Ctrl-C: the generation ends, as for `carry_out`.

        Raises:
            UnavailableError: The generation has ended.
            BusyError: Too many operations are under way.
        """
        try:
            return self._launch(request, blocking=blocking)
        except Exception:  # to the caller; if it began, the other ranks know
            raise
        except BaseException:  # Ctrl-C, to the caller: its turn may have been lost
            self.interrupt(request.words)
            raise

    def _launch(self, request: OperationRequest, *, blocking: bool) -> Pending[Any]:
        factory, turn = self._number(request, blocking=blocking)
        pending: Pending[Any] = Pending(request.words, partial(self._over, factory))
        try:
            steps = request.make(factory)
            # The first calls are made here, so that wrong arguments raise in the
            # caller.
            operation = StartedOperation(steps, next(steps), pending)
        except BaseException as error:  # to the caller; the others are notified first
            self._give_up(factory, turn, error)
            raise
        if turn is None:
            self._messages.begin(operation)
        else:
            assert self._by_engine is not None
            if blocking:
                self._by_engine.run(turn, operation)
                return pending
            self._by_engine.put(turn, operation)
        # The calls travel while the root copies what its user may change afterwards.
        if not blocking and factory.meanwhile is not None:
            factory.meanwhile()
        return pending

    def carry_out(self, request: OperationRequest) -> Any:
        """Starts an operation and waits for its result.

        If the wait is interrupted, the state of the arrays is unknown: the generation
        ends, and the other ranks are notified.

        Raises:
            Exception: The error of the operation; or as `launch`.
        """
        try:
            return self.launch(request, blocking=True).result()
        except Exception:  # to the caller: the operation has ended
            raise
        except BaseException:  # Ctrl-C, to the caller: the others are notified first
            self.interrupt(request.words)
            raise

    def interrupt(self, words: str) -> None:
        """Ends the generation for all ranks, as the operation that ``words`` describes
        was interrupted on this rank."""
        self._messages.abort_by(ClosedError(f"{words} was interrupted"))

    def close(self) -> None:
        """Releases the engine, as the generation has ended."""
        if self._by_engine is not None:
            self._by_engine.close()

    def _number(
        self, request: OperationRequest, *, blocking: bool
    ) -> tuple[CallFactory, CallTurn | None]:
        generation, options = self.generation, request.options
        words, tag, timeout = request.words, options.tag, options.timeout
        deadline = time.monotonic() + timeout - margin_of(timeout)
        turn = None
        # One lock for number and turn: on all ranks the engine runs operations in the
        # order of their numbers.
        with self._lock:
            if generation.broken is not None:
                raise generation.refusal()
            if self._in_flight >= IN_FLIGHT:
                raise BusyError(
                    f"{IN_FLIGHT} operations of {generation.title} are under way: wait "
                    "for some of them"
                )
            self._in_flight += 1
            if tag is not None:
                self._tagged[tag] += 1
                number = self._tagged[tag]
            else:
                number = generation.calls + 1
                generation.begun[number] = words
                generation.calls = number
                if generation.leavers:  # looked at after `begun` is set: see `left`
                    self._messages.soon(generation.check_begun, number)
                if self._by_engine is not None:
                    if generation.traffic.has_early:  # the same
                        self._messages.soon(generation.check_early, number)
                    turn = self._by_engine.draw(blocking=blocking)
        rank, size = generation.rank, generation.size
        return CallFactory(rank, size, number, words, deadline, options), turn

    def _over(self, factory: CallFactory) -> None:
        with self._lock:
            self._in_flight -= 1
        if factory.options.tag is None:
            self.generation.end(factory.number)

    def _give_up(
        self, factory: CallFactory, turn: CallTurn | None, error: BaseException
    ) -> None:
        """Ends the generation because an operation failed to start after it got a
        number: the other ranks wait for it."""
        reason = ClosedError(f"{factory.words}: {type(error).__name__}: {error}")
        self._messages.abort_by(reason)
        self._over(factory)
        if turn is not None:
            assert self._by_engine is not None
            self._by_engine.drop(turn)
            with turn:  # or the thread with the next turn waits forever
                pass
