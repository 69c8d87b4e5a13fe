"""The compiled steps of functions that ``run`` is given outside of a step.

A function is known by its code and by what it depends on besides its arguments: cells
of its closure, defaults, globals that it names, the object that it is a method of, and
the same of the functions of its module that it may call. So a lambda that is made again
for each call is the same function as long as it captures the same objects; one that
captures others, or whose global was bound to another, is another function. What happens
*inside* a captured object (an item of a list, a global of another module) is not seen,
as by ``tf.function``.

Marks of the function are made and compared at each call. Everything else has a fixed
place, and is compared there, in one flat list (`FunctionDependencies`). The functions
that it may call are looked for when a step is made, never at a call.

Law of the file: a step is kept as long as its function lives, the last few of each.
Of those that are gone the last one of each place in the source is kept for the next one
that is made there: its programs, not the function. A step that is made again and again
is told of. Steps are added under a lock; a lookup takes none.

A step is kept for all functions that are the same by what they have captured when they
are given. Later that may change, of each of them by itself, and a step may be traced
once more at any call, for another shape: so it runs the function that ``run`` was given
at that very call. Law of steps: one holds none of the functions that it runs, so that
each may go.
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from zstrat.program import WARN_AT, Function, RetraceWarning
from zstrat.variables import user_stacklevel

from ._captured import (
    CapturedObjects,
    FunctionDependencies,
    captured_words,
    dependencies,
    is_partial,
    named,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    Words = dict[str, tuple[Hashable, str]]
    """By place the fingerprint and the words of what a function has captured."""


MAX_STEPS: Final = 256
"""Functions of one strategy. Each keeps programs of about a megabyte."""

MAX_VARIANTS: Final = 8
"""Of one function, whose globals are bound anew."""

_ANOTHER: Final = "an object that it has captured, or is a method of, is another one"


_given: Final[ContextVar[Callable[..., Any]]] = ContextVar("zstrat_given_function")


def run_as(
    step: Function,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs a step, and in it ``fn``. Raises: Whatever either raises."""
    token = _given.set(fn)
    try:
        return step(*args, **kwargs)
    finally:
        _given.reset(token)


def given() -> Callable[..., Any]:
    """The function of this call; a step function as it runs in a step."""
    fn = _given.get()
    return fn.body if isinstance(fn, Function) else fn


@dataclass(slots=True, eq=False)
class CachedStep:
    """A function as a step that does nothing but run it.

    ``why_not`` says what keeps it from being one, once that is known.
    """

    step: Function
    fingerprint: Hashable
    held: CapturedObjects
    """The objects that ``fingerprint`` names by their identity."""
    dependencies: FunctionDependencies
    origin: weakref.ref[Any] | None
    why_not: str | None = None

    @property
    def is_live(self) -> bool:
        """Whether the function that it was made of is still there."""
        return self.origin is None or self.origin() is not None

    def is_of(self, fingerprint: Hashable) -> bool:
        """Whether it does what a function with this fingerprint does now."""
        is_alike = self.fingerprint == fingerprint and self.held.are_there()
        return is_alike and self.dependencies.are_same()

    def may_return(self) -> bool:
        """Whether a function with this fingerprint can ever be given again."""
        return self.held.are_there() and self.dependencies.may_return()


@dataclass(slots=True, eq=False)
class StepPlace:
    """The steps that were made of the functions of one place in the source."""

    steps: list[CachedStep] = field(default_factory=list)
    replaced: int = 0
    words: Words = field(default_factory=dict)
    """What the last function had captured."""

    def find(self, fingerprint: Hashable) -> CachedStep | None:
        """The step of a function with this fingerprint."""
        for step in self.steps:
            if step.is_of(fingerprint):
                return step
        return None

    def add(self, made: CachedStep) -> bool:
        """Keeps another one; says whether it is compiled in the stead of one: not
        beside those of other functions that live, nor for what runs sequentially."""
        origin = made.origin and made.origin()
        live = [step for step in self.steps if step.is_live]
        own = [step for step in live if (step.origin and step.origin()) is origin]
        is_instead = bool(own) or len(live) < len(self.steps)
        last = self.steps[-1] if self.steps else None
        is_compiled = last is not None and not (last.why_not or made.why_not)
        # The last one whose function is gone stays: a lambda that is made anew for each
        # call comes back as another object.
        gone = [x for x in self.steps if x not in live and x.may_return()][-1:]
        old = own[: max(0, len(own) + 1 - MAX_VARIANTS)]
        kept = [x for x in live if x not in old and x.may_return()]
        self.steps = [*gone, *kept, made]
        return is_instead and is_compiled


class FunctionCache:
    """The steps of one strategy; ``make`` makes the body of one, which runs `given`."""

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        self._make = make
        self._places: OrderedDict[int, StepPlace] = OrderedDict()
        self._lock = threading.RLock()  # what is freed in it may run code

    def of(self, fn: Callable[..., Any]) -> CachedStep:
        """The step of a function, made if it is not known.

        Warns:
            RetraceWarning: It was made for the fifth time, say, in the stead of another
                one of the same place in the source.
        """
        captured: list[Any] = []
        compared: list[types.FunctionType] = []
        name, fingerprint = named(fn, captured, compared)
        place = self._places.get(name)
        # Without the lock: this is each call of `run`. Lists of steps are replaced,
        # never changed.
        if place is not None:
            found = place.find(fingerprint)
            if found is not None:
                return found
        functions = dependencies(fn)
        made = CachedStep(
            Function(_called_like(self._make(), fn)),
            fingerprint,
            CapturedObjects([*captured, *[each.__code__ for each in compared]]),
            FunctionDependencies(compared, functions),
            _origin(fn),
            "it is eager" if isinstance(fn, Function) and fn.eager else None,
        )
        words: Words = {
            place: (fingerprint, text)
            for each in (fn, *functions)
            for place, fingerprint, text in captured_words(each)
        }
        return self._add(name, made, words)

    def _add(self, name: int, made: CachedStep, words: Words) -> CachedStep:
        with self._lock:
            place = self._places.setdefault(name, StepPlace())
            found = place.find(made.fingerprint)
            if found is not None:
                return found  # another thread made it meanwhile
            is_instead = place.add(made)
            before, place.words = place.words, words
            self._places.move_to_end(name)
            self._forget()
            place.replaced += is_instead
            times = place.replaced + 1
        if is_instead:
            _tell(made.step.name, times, before, words)
        return made

    def _forget(self) -> None:
        while sum(len(place.steps) for place in self._places.values()) > MAX_STEPS:
            name, oldest = next(iter(self._places.items()))
            oldest.steps = oldest.steps[1:]  # a lookup may be at it
            if not oldest.steps:
                del self._places[name]


def _tell(name: str, times: int, before: Words, now: Words) -> None:
    if times not in WARN_AT and times % WARN_AT[-1]:
        return
    absent = None, "not there"
    pairs = {
        place: (before.get(place, absent), now.get(place, absent))
        for place in (*before, *now)
    }
    changed = [
        f"{place} was {was[1]} and is {found[1]}"
        for place, (was, found) in pairs.items()
        if was[0] != found[0]
    ]
    warnings.warn(
        f"run was given {name!r} for the {times}th time with something else that it "
        "has captured, and each time it is traced and compiled. Since the last one: "
        f"{'; '.join(changed) or _ANOTHER}. "
        "Pass what changes from call to call among the args of run, as an array: a "
        "number as np.float32(...), say",
        RetraceWarning,
        stacklevel=user_stacklevel(),
    )


def _origin(fn: Callable[..., Any]) -> weakref.ref[Any] | None:
    """Whatever says whether the function is still in use."""
    held: Any = fn.__self__ if isinstance(fn, types.MethodType) else fn
    try:
        return weakref.ref(held)
    except TypeError:
        return None


def _called_like(step: Callable[..., Any], fn: Any) -> Callable[..., Any]:
    """``step``, by the names of ``fn``, which it does not hold."""
    while is_partial(fn) and "__name__" not in vars(fn):
        fn = fn.func  # it has none of its own
    names = [fn] if isinstance(fn, types.FunctionType) else [type(fn), fn]
    for each in names:  # the object's own ones, if it has them
        functools.update_wrapper(step, each, updated=())
    # It would hold the function, and all that it has captured, for as long as the step
    # is kept.
    del step.__dict__["__wrapped__"]
    return step
