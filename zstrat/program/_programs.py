"""`CompiledPrograms`: the programs of one step function, by the signature of its calls.

The key of a program is that of the arguments (`CutCall.key`), then the types of the
elements that the call draws and, if the body asked for it, the worker's context. Each
key is traced once. A function that is traced again and again is slow, so traces are
counted, and a warning says what changed.

Law of the file: programs are added under one lock; a lookup takes no lock.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from zstrat.variables import RESIDENT

from ._compile import CompiledProgram, sent_by
from ._device_state import Outdated
from .lookup._rows_program import RowsProgram
from .stages._staged import StagedProgram
from .stages._whole import WholeProgram
from .trace._alike import (
    GivenVariables,
    LookedForError,
    StandIns,
    given_variables,
    has_captured,
    is_plain,
    with_others,
)
from .trace._captured import watch_keras_models
from .trace._discover import Staged, Traced, discover
from .trace._int32_checks import downcast_check
from .trace._iterator import Draws, Element
from .trace._signature import (
    current_fingerprint,
    describe,
    plain_numbers,
    require_traceable,
    worker_context,
)
from .windows._fragments import SEGMENT, program_of_window

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from .trace._iterator import StepIterator
    from .trace._plan import Plan, TracedBody
    from .trace._signature import CutCall

MAX_PROGRAMS: Final = 128
"""Most programs of one function. Each keeps an executable of about a megabyte; a
function that needs more is traced again by mistake, and has warned about that long
before."""

MAX_SHARED: Final = 8
"""Most shared traces of calls that differ only in the types of the elements that they
draw: a step usually gets fewer shapes of batches."""

HereProgram = StagedProgram | WholeProgram
"""Classes of programs that use variables on this process's devices, or of several
processes."""

AnyProgram = CompiledProgram | RowsProgram | HereProgram

WARN_AT: Final = (5, 10, 20, 50, 100, 200, 500, 1000)
"""Numbers of traces at which the function warns (TF warns at the fifth); after the last
of them it warns at each of its multiples."""


class RetraceWarning(UserWarning):
    """A step function is traced again and again."""


@dataclass(slots=True)
class ProgramsOfCall:
    """The programs of calls whose arguments have equal keys.

    ``draws`` are the draws of the last traced one; ``captured`` the iterators from
    which it draws and which are not arguments; ``asks_context``: one of the programs
    asked for the worker's context.
    """

    draws: tuple[int, ...] = ()
    captured: tuple[StepIterator, ...] = ()
    asks_context: bool = False
    programs: dict[Hashable, AnyProgram] = field(default_factory=dict)

    def find(self, elements: Sequence[Element]) -> AnyProgram | None:
        """Returns the program for these elements in the current worker context; None if
        there is none."""
        program = self.programs.get(self._name(elements))
        return program if program is not None and program.is_current else None

    def is_stale(self, elements: Sequence[Element]) -> bool:
        """Returns whether there is a program for these elements whose variables are
        stored differently now."""
        program = self.programs.get(self._name(elements))
        return program is not None and not program.is_current

    def add(self, elements: Sequence[Element], program: AnyProgram) -> None:
        """Adds a program that was just traced."""
        # The next call draws as this one did, before its program is known.
        self.draws, self.captured = program.plan.draws, program.plan.captured
        self.asks_context = self.asks_context or program.plan.asked_context
        self.programs[self._name(elements)] = program

    def _name(self, elements: Sequence[Element]) -> Hashable:
        context = worker_context.get() if self.asks_context else None
        return (context, tuple([element.key for element in elements]))


@dataclass(frozen=True, slots=True)
class SharedTrace:
    """The programs of the call ``key``, which calls with other variables may reuse."""

    key: Hashable
    given: GivenVariables
    programs: ProgramsOfCall


_UNEQUAL: Final = "an argument compares unequal"
_GIVEN: Final = (
    "its variables are in another pattern (one of them twice, say), or the step itself "
    "refers to one of them"
)


class CompiledPrograms:
    """All programs of one step function."""

    def __init__(self, step: str, fn: Callable[..., Any]) -> None:
        self.trace_count = 0
        self.kept = 0
        """Number of programs; may be read on any thread."""
        self.warned: set[str] = set()
        """Arguments or elements, with their dtypes, of whose downcasts the function has
        warned."""
        self._has_created = False
        self._step = step
        self._fn = fn
        self._calls: OrderedDict[Hashable, ProgramsOfCall] = OrderedDict()
        self._words: dict[str, str] = {}
        self._fingerprint: Hashable = None
        self._shared: dict[Hashable, list[SharedTrace]] = {}
        """Shared traces, by what they have in common with calls with other variables
        (`given_variables`), the newest first. The traces of one key differ in the
        elements drawn, or in whether variables had copies."""
        # Re-entrant: a body may call its own step function, which is inlined.
        self._lock = threading.RLock()

    def may_create(self) -> bool:
        """Returns whether the body may create variables now. True only once, before the
        first trace, as in ``tf.function``."""
        with self._lock:
            first = not (self.trace_count or self._has_created)
            self._has_created = True
            return first

    def find(
        self, call: CutCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[AnyProgram, Draws]:
        """Finds or traces the program for a call, and draws its elements.

        Raises:
            OutOfRangeError: A dataset has no more elements; nothing was drawn.
            TypeError, RuntimeError: The body cannot be captured; nothing was drawn.
        """
        while True:
            try:
                return self._found(call, args, kwargs)
            except Outdated:
                pass  # during the trace; each variable gets its copies only once

    def _found(
        self, call: CutCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[AnyProgram, Draws]:
        draws = Draws(call.iterators)
        program = self._known(call, draws)
        if program is None:
            with self._lock:
                # Another thread may have traced it while this one waited.
                given = given_variables(call)
                program = self._known(call, draws) or self._alike(call, given, draws)
                if program is None:
                    program = self._trace(call, args, kwargs, draws, given)
        return program, draws

    def _alike(
        self, call: CutCall, given: GivenVariables | None, draws: Draws
    ) -> AnyProgram | None:
        """Makes a program from a trace that a call with other variables has made; None
        if no such trace fits."""
        # Searched last whether the body holds one of the variables, as that looks at
        # many objects.
        traces = None if given is None else self._shared.get(given.likeness)
        if given is None or traces is None or has_captured(self._fn, call, given):
            return None
        for shared in traces:
            program = _for_others(shared, call, given, draws)
            if program is not None:
                known = self._calls.setdefault(call.key, ProgramsOfCall())
                # The shared trace may have asked for the worker, though this call was
                # never traced.
                known.asks_context = shared.programs.asks_context
                known.add(draws.elements, program)
                self._calls.move_to_end(shared.key)  # it was used now
                self._forget_oldest()
                return program
        return None

    def _known(self, call: CutCall, draws: Draws) -> AnyProgram | None:
        known = self._calls.get(call.key)
        if known is None:
            return None
        # Iterators that the body captured are not in the call, but draw with it.
        if known.captured:
            draws.iterators = [*call.iterators, *known.captured]
        return known.find(draws.match(known.draws))

    def _trace(
        self,
        call: CutCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        draws: Draws,
        given: GivenVariables | None,
    ) -> AnyProgram:
        known = self._calls.get(call.key)
        # A body that holds a variable may compare it with an argument: a stand-in would
        # differ.
        stand_ins = None
        if given is not None and not has_captured(self._fn, call, given):
            stand_ins = StandIns(given)
        # Before the trace replaces it: the warning says why it was traced again.
        is_stale = known is not None and known.is_stale(draws.elements)
        try:
            require_traceable(args, kwargs)
            watch_keras_models()
            arguments = len(call.iterators)
            call = call._replace(iterators=list(draws.iterators))
            plan, body = self._discovered(call, draws, stand_ins)
            # A program of before may have drawn more elements than this body.
            draws.keep_used()
            call = call._replace(iterators=list(draws.iterators))
            check = downcast_check(plan, call, draws.elements, self.warned)
            watch = None if check is None else check.check
            captured = tuple(draws.iterators[arguments:])
            plan = replace(plan, watch=watch, captured=captured, sent=sent_by(plan))
            program = self._made(plan, body, call, draws.elements)
        except BaseException:  # to the caller; the next call draws the same
            draws.unread()
            raise
        known = self._calls.setdefault(call.key, ProgramsOfCall())
        known.add(draws.elements, program)
        if given and stand_ins and stand_ins.is_general and is_plain(program.plan):
            traces = self._shared.setdefault(given.likeness, [])
            traces.insert(0, SharedTrace(call.key, given, known))
            del traces[MAX_SHARED:]
        self._forget_oldest()
        if SEGMENT in kwargs:  # each segment of a window is meant to be a program
            self.trace_count += 1
            return program
        words = describe(args, kwargs, draws.elements)
        # The answer is a part of the key; see `ProgramsOfCall`.
        if known.asks_context:
            words["the worker"] = str(worker_context.get())
        otherwise = _GIVEN if given else _UNEQUAL
        self._note_trace(words, plain_numbers(args, kwargs), is_stale, otherwise)
        return program

    def _discovered(
        self, call: CutCall, draws: Draws, stand_ins: StandIns | None
    ) -> tuple[Plan, TracedBody | Traced | Staged]:
        if stand_ins is not None:
            seen = call._replace(leaves=[*map(stand_ins.leaf, call.leaves)])
            try:
                with stand_ins.watching():
                    return discover(self._step, self._fn, seen, draws.supply)
            except LookedForError:
                # The body looks up a stand-in in a dict: trace it with the variables.
                draws.begin_again()
        return discover(self._step, self._fn, call, draws.supply)

    def _made(
        self,
        plan: Plan,
        body: TracedBody | Traced | Staged,
        call: CutCall,
        elements: Sequence[Element],
    ) -> AnyProgram:
        if isinstance(body, Traced):
            return RowsProgram(plan, body)
        if not isinstance(body, Staged):
            if any(spec.ps == RESIDENT for spec in plan.reads):
                return program_of_window(plan, body, call, elements)
            return CompiledProgram(plan, body)
        mesh = body.mesh or body.held.mesh
        if mesh is not None:
            return WholeProgram(plan, body, mesh)
        return StagedProgram(plan, body)

    def _forget_oldest(self) -> None:
        self.kept = sum(len(call.programs) for call in self._calls.values())
        while self.kept > MAX_PROGRAMS:
            oldest = next(iter(self._calls.values()))
            oldest.programs.pop(next(iter(oldest.programs)))
            self.kept -= 1
            if not oldest.programs:
                self._calls.popitem(last=False)
                # Or the trace would keep the forgotten programs alive.
                for likeness, traces in [*self._shared.items()]:
                    traces[:] = [x for x in traces if x.programs is not oldest]
                    if not traces:
                        del self._shared[likeness]

    def _note_trace(
        self,
        words: dict[str, str],
        plain: Mapping[str, type],
        is_stale: bool,
        otherwise: str,
    ) -> None:
        before, self._words = self._words, words
        last, self._fingerprint = self._fingerprint, current_fingerprint()
        self.trace_count += 1
        if self.trace_count not in WARN_AT and self.trace_count % WARN_AT[-1]:
            return
        others = [
            place
            for place in dict.fromkeys((*before, *words))
            if before.get(place) != words.get(place)
        ]
        changed = [
            f"{place} was {before.get(place, 'not there')} and is "
            f"{words.get(place, 'not there')}"
            for place in others
        ]
        if last != self._fingerprint:
            changed.append(
                "it is called in another strategy's scope or replica context"
            )
        if is_stale:
            changed.append(
                "each replica has a copy of one of its variables now, or the processes "
                "of its strategy have changed"
            )
        warnings.warn(
            f"the step function {self._step!r} was traced {self.trace_count} times, "
            "and each trace is compiled. Changes since the last one: "
            f"{'; '.join(changed) or otherwise}. "
            f"{_advice([plain[place] for place in others if place in plain])}",
            RetraceWarning,
            stacklevel=2,
        )


def _for_others(
    shared: SharedTrace, call: CutCall, given: GivenVariables, draws: Draws
) -> AnyProgram | None:
    """Makes the program for other variables from a shared trace; None if this call
    cannot use it."""
    origin = shared.programs
    if given.keys == shared.given.keys:
        return None
    draws.iterators = [*call.iterators, *origin.captured]
    program = origin.find(draws.match(origin.draws))
    if not isinstance(program, CompiledProgram | StagedProgram):
        return None
    plan = with_others(program.plan, shared.given, given)
    if plan is None:
        return None
    plan = replace(plan, sent=sent_by(plan))
    return program.with_others(plan, given.variables)


def _advice(numbers: Sequence[type]) -> str:
    """Returns the text with the remedy for repeated traces; ``numbers`` are types of
    static Python numbers that changed."""
    if not numbers:
        return (
            "Pass arrays of equal shapes and dtypes (pad the last batch), and pass "
            "other values that change as numbers or arrays"
        )
    name = {int: "np.int32", float: "np.float32"}.get(numbers[0], "np.complex64")
    return (
        f"A Python {numbers[0].__name__} argument of strategy.run outside of a step is "
        "static, and each value has a program of its own: pass a number that changes "
        f"from call to call as an array, {name}(...) or jnp.asarray(...), or call run "
        "in a zs.function that takes the number as an argument"
    )
