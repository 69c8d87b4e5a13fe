"""The operations of one generation: numbered, described, and sent on their way."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zstrat.collectives._engine import margin_of
from zstrat.errors import BusyError, ClosedError

from ._flight import BlockingOperation, CallTurns, MessageOperation, Runner
from ._operations import CallFactory
from ._pending import Pending

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.collectives._engine import CollectiveEngine

    from ._flight import CallTurn
    from ._generation import Generation
    from ._operations import Steps
    from ._station import GroupRuntime

IN_FLIGHT: Final = 1024
"""Operations of one group that may be under way: each holds memory of its caller."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a caller says about any operation. ``timeout`` in seconds."""

    timeout: float
    tag: str | None = None
    compression: str | None = None
    algorithm: str | None = None
    bytes_per_pack: int = 0


class OperationScheduler:
    """A generation, and what carries its operations out."""

    def __init__(
        self,
        station: GroupRuntime,
        generation: Generation,
        engine: CollectiveEngine | None,
    ) -> None:
        self.generation, self.engine, self._station = generation, engine, station
        self._lock = threading.Lock()
        self._turns = CallTurns()
        self._runner = Runner(f"zstrat group {generation.group}")
        self._tagged: Counter[str] = Counter()
        self._in_flight = 0
        if engine is not None:
            generation.engine_waits = engine.waits
            generation.on_broken = engine.abort

    def launch(
        self,
        words: str,
        make: Callable[[CallFactory], Steps],
        options: CallOptions,
        *,
        blocking: bool,
    ) -> Pending[Any]:
        """Begins an operation; if ``blocking``, an engine may run it before this
        returns. Its number is drawn here, in the thread of the caller.

        Raises:
            UnavailableError: The generation has ended.
            BusyError: Too many are under way.
        """
        draft, turn = self._number(words, options)
        pending: Pending[Any] = Pending(words)
        over = partial(self._over, draft)
        try:
            steps = make(draft)
            calls = next(steps)
        except BaseException as error:  # to the caller; the others hear of it first
            self._give_up(draft, turn, error)
            raise
        if turn is None:
            MessageOperation(self.generation, steps, pending, over).begin(
                self._station, calls
            )
            if not blocking and draft.meanwhile is not None:
                draft.meanwhile()
            return pending
        assert self.engine is not None
        journey = BlockingOperation(
            self._station,
            self.generation,
            self.engine,
            turn,
            steps,
            calls,
            pending,
            over,
        )
        if blocking:
            journey.run()
        else:
            self._runner.put(journey)
            if draft.meanwhile is not None:
                draft.meanwhile()
        return pending

    def carry_out(
        self, words: str, make: Callable[[CallFactory], Steps], options: CallOptions
    ) -> Any:
        """Begins an operation and waits for its result.

        If it is interrupted nobody knows what becomes of its arrays: the generation
        ends, and the others hear of it.

        Raises:
            What went wrong; as `launch`.
        """
        try:
            return self.launch(words, make, options, blocking=True).result()
        except Exception:  # to the caller: the operation has ended
            raise
        except BaseException:  # Ctrl-C, to the caller: the others hear of it first
            self.interrupt(words)
            raise

    def interrupt(self, words: str) -> None:
        """Ends the generation for all: the operation that ``words`` describes is cut
        off here."""
        error = ClosedError(f"{words} was interrupted")
        self._station.call_soon(self.generation.abort_by, error)

    def close(self) -> None:
        """Lets go of the engine. The generation has ended."""
        self._runner.close()
        if self.engine is not None:
            with self._turns.draw():
                self.engine.close()

    def _number(
        self, words: str, options: CallOptions
    ) -> tuple[CallFactory, CallTurn | None]:
        generation, tag = self.generation, options.tag
        deadline = time.monotonic() + options.timeout - margin_of(options.timeout)
        with self._lock:
            if generation.broken is not None:
                raise generation.refusal()
            if self._in_flight >= IN_FLIGHT:
                raise BusyError(
                    f"{IN_FLIGHT} operations of {generation.title} are under way: wait "
                    "for some of them"
                )
            self._in_flight += 1
            turn = None
            if tag is not None:
                self._tagged[tag] += 1
                number = self._tagged[tag]
            else:
                number = generation.calls + 1
                generation.begun[number] = words
                generation.calls = number
                if generation.leavers:  # looked at after `begun` is set: see `left`
                    self._station.call_soon(generation.check_begun, number)
                if self.engine is not None:
                    turn = self._turns.draw()
        draft = CallFactory(
            generation.rank,
            generation.size,
            number,
            words,
            deadline,
            options.timeout,
            tag,
            options.compression,
            options.algorithm,
            options.bytes_per_pack,
        )
        return draft, turn

    def _over(self, draft: CallFactory) -> None:
        with self._lock:
            self._in_flight -= 1
        if draft.tag is None:
            self.generation.end(draft.number)

    def _give_up(
        self, draft: CallFactory, turn: CallTurn | None, error: BaseException
    ) -> None:
        """The operation has a number, and the other ranks wait for it."""
        what = ClosedError(f"{draft.words}: {type(error).__name__}: {error}")
        self._station.call_soon(self.generation.abort_by, what)
        self._over(draft)
        if turn is not None:
            with turn:
                pass
