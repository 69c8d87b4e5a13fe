"""The programs of one step function, by what its calls look like.

A call is named by its arguments (`CutCall.key`), then by the elements that it draws
and, if the body asked for it, by the worker's context. Each name is traced once. A
function that is traced again and again is slow in silence, so it is counted and warned
about, with words that say what changed.

Law of the file: programs are found and added under one lock; a lookup takes none.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from ._compile import CompiledProgram
from ._device_state import Outdated
from .lookup._rows_program import RowsProgram
from .stages._staged import StagedProgram
from .stages._whole import WholeProgram
from .trace._context import surrounding, worker_context
from .trace._discover import discover
from .trace._int32_checks import watch
from .trace._iterator import Draws, Element
from .trace._retrace import Staged, Traced
from .trace._signature import describe, plain_numbers, require_traceable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from .trace._iterator import StepIterator
    from .trace._plan import Plan, Template
    from .trace._signature import CutCall

MAX_PROGRAMS: Final = 128
"""Signatures of one function. Each keeps an executable of about a megabyte; a function
with more is traced anew by mistake, and was warned about long before."""

HereProgram = StagedProgram | WholeProgram
"""Of variables that live here, or of several processes."""

AnyProgram = CompiledProgram | RowsProgram | HereProgram

WARN_AT: Final = (5, 10, 20, 50, 100, 200, 500, 1000)
"""Numbers of traces at which it is said (TF warns at the fifth); then at each multiple
of the last one."""


class RetraceWarning(UserWarning):
    """A step function is traced again and again."""


@dataclass(slots=True)
class Signature:
    """The programs of calls with the same arguments. ``draws`` is what the last traced
    one drew, ``captured`` the iterators that any drew from and that are no arguments;
    ``asks_context`` is true once any of them asked."""

    draws: tuple[int, ...] = ()
    captured: tuple[StepIterator, ...] = ()
    asks_context: bool = False
    programs: dict[Hashable, AnyProgram] = field(default_factory=dict)

    def find(self, elements: Sequence[Element]) -> AnyProgram | None:
        """The program for these elements in the current worker context."""
        found = self.programs.get(self._name(elements))
        if isinstance(found, HereProgram) and not found.is_current:
            return None
        return found

    def is_stale(self, elements: Sequence[Element]) -> bool:
        """Whether there is one, of variables that lie otherwise now."""
        found = self.programs.get(self._name(elements))
        return isinstance(found, HereProgram) and not found.is_current

    def add(self, elements: Sequence[Element], program: AnyProgram) -> None:
        """Keeps a program that was just traced."""
        self.draws, self.captured = program.plan.draws, program.plan.captured
        self.asks_context = self.asks_context or program.plan.asked_context
        self.programs[self._name(elements)] = program

    def _name(self, elements: Sequence[Element]) -> Hashable:
        context = worker_context.get() if self.asks_context else None
        return (context, tuple([element.key for element in elements]))


class CompiledPrograms:
    """All programs of one function."""

    def __init__(self, step: str, fn: Callable[..., Any]) -> None:
        self.trace_count = 0
        self.said: set[str] = set()
        """Places of which it was said that jax cuts what is there."""
        self._has_created = False
        self._step = step
        self._fn = fn
        self._signatures: OrderedDict[Hashable, Signature] = OrderedDict()
        self._words: dict[str, str] = {}
        self._around: Hashable = None
        # Re-entrant: a body may call its own step function, which is inlined.
        self._lock = threading.RLock()

    def may_create(self) -> bool:
        """Whether the body may create variables now: once, before it is traced, as that
        of ``tf.function``. True is said only once."""
        with self._lock:
            first = not (self.trace_count or self._has_created)
            self._has_created = True
            return first

    def find(
        self, call: CutCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[AnyProgram, Draws]:
        """The program for a call, and the elements that it draws.

        Raises:
            OutOfRangeError: A dataset has no more elements; nothing was drawn.
            TypeError, RuntimeError: The body cannot be captured; nothing was drawn.
        """
        while True:
            try:
                return self._found(call, args, kwargs)
            except Outdated:
                pass  # while it was traced; each variable is parted once

    def _found(
        self, call: CutCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[AnyProgram, Draws]:
        draws = Draws(call.iterators)
        program = self._known(call, draws)
        if program is None:
            with self._lock:
                # Another thread may have traced it while this one waited.
                program = self._known(call, draws)
                if program is None:
                    program = self._traced(call, args, kwargs, draws)
        return program, draws

    def _known(self, call: CutCall, draws: Draws) -> AnyProgram | None:
        signature = self._signatures.get(call.key)
        if signature is None:
            return None
        if signature.captured:
            draws.iterators = [*call.iterators, *signature.captured]
        return signature.find(draws.match(signature.draws))

    def _traced(
        self,
        call: CutCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        draws: Draws,
    ) -> AnyProgram:
        known = self._signatures.get(call.key)
        is_stale = known is not None and known.is_stale(draws.elements)
        try:
            require_traceable(args, kwargs)
            given = len(call.iterators)
            call = replace(call, iterators=list(draws.iterators))
            plan, body = discover(self._step, self._fn, call, draws.supply)
            draws.keep_used()
            call = replace(call, iterators=list(draws.iterators))
            looking = watch(plan, call, draws.elements, self.said)
            look = None if looking is None else looking.look
            captured = tuple(draws.iterators[given:])
            program = self._made(replace(plan, watch=look, captured=captured), body)
        except BaseException:  # to the caller; the next call draws the same
            draws.unread()
            raise
        signature = self._signatures.setdefault(call.key, Signature())
        signature.add(draws.elements, program)
        self._forget_oldest()
        words = describe(args, kwargs, draws.elements)
        if signature.asks_context:
            words["the worker"] = str(worker_context.get())
        self._count(words, plain_numbers(args, kwargs), is_stale)
        return program

    def _made(self, plan: Plan, body: Template | Traced | Staged) -> AnyProgram:
        if isinstance(body, Traced):
            return RowsProgram(plan, body)
        if not isinstance(body, Staged):
            return CompiledProgram(plan, body)
        mesh = body.mesh or body.held.mesh
        if mesh is not None:
            return WholeProgram(plan, body, mesh)
        return StagedProgram(plan, body)

    def _forget_oldest(self) -> None:
        while sum(len(s.programs) for s in self._signatures.values()) > MAX_PROGRAMS:
            oldest = next(iter(self._signatures.values()))
            oldest.programs.pop(next(iter(oldest.programs)))
            if not oldest.programs:
                self._signatures.popitem(last=False)

    def _count(
        self, words: dict[str, str], plain: Mapping[str, type], is_stale: bool
    ) -> None:
        before, self._words = self._words, words
        last, self._around = self._around, surrounding()
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
        if last != self._around:
            changed.append(
                "it is called in another strategy's scope or replica context"
            )
        if is_stale:
            changed.append(
                "replicas have begun to keep a copy each of one of its variables, or "
                "the processes of its strategy are others (formed anew, say)"
            )
        warnings.warn(
            f"the step function {self._step!r} was traced {self.trace_count} times, "
            "and each trace is compiled. Since the last one: "
            f"{'; '.join(changed) or 'an argument compares unequal'}. "
            f"{_advice([plain[place] for place in others if place in plain])}",
            RetraceWarning,
            stacklevel=2,
        )


def _advice(numbers: Sequence[type]) -> str:
    """What to do, where Python numbers of these types changed that stay what they
    are."""
    if not numbers:
        return (
            "Give arrays of equal shapes and dtypes (pad the last batch), and pass "
            "what is not an array but changes as a number or array"
        )
    name = {int: "np.int32", float: "np.float32"}.get(numbers[0], "np.complex64")
    return (
        f"A Python {numbers[0].__name__} that strategy.run is given outside of a step "
        "is one in the function, too, and each value is a program of its own: pass a "
        f"number that changes from call to call as an array, {name}(...) or "
        "jnp.asarray(...), or call run in a zs.function that is given the number"
    )
