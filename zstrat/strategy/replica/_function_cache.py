"""The compiled steps of functions that are passed to ``run`` outside of a step.

A function is identified by its code and by its dependencies besides its arguments:
cells of its closure, defaults, globals that it names, the object that it is a method
of, and the same for each function of its module that it may call. So a lambda that is
made again for each call is the same function as long as it captures the same objects;
one that captures other objects, or whose global was bound to another object, is another
function. Changes *inside* a captured object (an item of a list, a global of another
module) are not noticed, as in ``tf.function``.

The function's fingerprint (`_captured`) is made and compared at each call. All other
dependencies are stored in fixed places, which are compared in one flat list
(`FunctionDependencies`). Functions that the function may call are searched when a step
is made, never at a call.

Law of the file: the last few steps of each function are kept as long as the function
lives. When the functions made at a place in the source are gone, the last of their
steps (its programs, not the function) is kept for the next function at that place. A
warning reports a step that is made again and again. Steps are added under a lock; a
lookup takes none.

A step is used for all functions with equal captured values. Later the values of each
function may change separately, and a step may be traced again at any call, for another
shape: so it always runs the function that was passed to ``run`` at that call. Law of
steps: a step has no reference to the functions that it runs, so that each may be freed.
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
    identified,
    is_partial,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    Words = dict[str, tuple[Hashable, str]]
    """By place the fingerprint and the description of a captured value."""


MAX_STEPS: Final = 256
"""Largest number of steps of one strategy. Each has programs of about a megabyte."""

MAX_VARIANTS: Final = 8
"""Largest number of steps of one function whose globals are bound again and again."""

_ANOTHER: Final = "a captured object, or the one that it is a method of, is another one"


# With a default: `leave_for` sets it to that where Ctrl-C has kept it from a reset.
_given: Final[ContextVar[Callable[..., Any] | None]] = ContextVar(
    "zstrat_given_function", default=None
)


def run_as(
    step: Function,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs a step whose body calls ``fn``. Raises whatever the step or ``fn``
    raises."""
    # Through the context, not a closure: a step may not refer to the functions that it
    # runs.
    token = _given.set(fn)
    try:
        return step(*args, **kwargs)
    finally:
        _given.reset(token)


def given() -> Callable[..., Any]:
    """Returns the function that the current `run_as` call passed; if that is a step
    function, its body."""
    fn = _given.get()
    assert fn is not None, "only `run_as` runs a step"
    return fn.body if isinstance(fn, Function) else fn


@dataclass(slots=True, eq=False)
class CachedStep:
    """A compiled step that only runs a function, and the function's fingerprint.

    ``why_not`` is the reason why the function cannot be one program, once that is
    known.
    """

    step: Function
    fingerprint: Hashable
    held: CapturedObjects
    """The objects whose identities are in ``fingerprint``."""
    dependencies: FunctionDependencies
    origin: weakref.ref[Any] | None
    why_not: str | None = None

    @property
    def is_live(self) -> bool:
        """Whether the function for which the step was made still exists."""
        return self.origin is None or self.origin() is not None

    def is_of(self, fingerprint: Hashable) -> bool:
        """Returns whether the step does the same as a function with this fingerprint
        does now."""
        # The cheap tests first: dependencies are many places.
        is_alike = self.fingerprint == fingerprint and self.held.are_there()
        return is_alike and self.dependencies.are_same()

    def may_return(self) -> bool:
        """Returns whether a function with this fingerprint could still be passed
        again."""
        return self.held.are_there() and self.dependencies.may_return()


@dataclass(slots=True, eq=False)
class StepPlace:
    """The steps of the functions that were made at one place in the source."""

    steps: list[CachedStep] = field(default_factory=list)
    replaced: int = 0
    words: Words = field(default_factory=dict)
    """The captured values of the last function at this place, for warnings."""

    def find_step(self, fingerprint: Hashable) -> CachedStep | None:
        """Returns the step for a function with this fingerprint; None if there is
        none."""
        for step in self.steps:
            if step.is_of(fingerprint):
                return step
        return None

    def add_step(self, made: CachedStep) -> bool:
        """Adds a step. Returns whether it was compiled instead of another step, which a
        change of captured values causes. Returns False for steps of several functions
        that live at the same time, and for functions that run sequentially."""
        # Compiled *instead of* another step means that something captured changed,
        # which the user can mend; steps of several live functions side by side are as
        # it should be.
        origin = made.origin and made.origin()
        live = [step for step in self.steps if step.is_live]
        own = [step for step in live if (step.origin and step.origin()) is origin]
        is_instead = bool(own) or len(live) < len(self.steps)
        last = self.steps[-1] if self.steps else None
        is_compiled = last is not None and not (last.why_not or made.why_not)
        # The last one whose function is gone stays: a lambda that is made again for
        # each call comes back as another object.
        gone = [x for x in self.steps if x not in live and x.may_return()][-1:]
        # A function whose globals are bound again and again (a counter) would fill the
        # cache with steps that never return.
        old = own[: max(0, len(own) + 1 - MAX_VARIANTS)]
        kept = [x for x in live if x not in old and x.may_return()]
        self.steps = [*gone, *kept, made]
        return is_instead and is_compiled


class FunctionCache:
    """The cached steps of one strategy. ``make`` makes the body of a step, which runs
    the function that `given` returns."""

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        self._make = make
        self._places: OrderedDict[int, StepPlace] = OrderedDict()
        self._lock = threading.RLock()  # freed objects may run code

    def step_of(self, fn: Callable[..., Any]) -> CachedStep:
        """Returns the step of a function; makes the step if there is none yet.

        Warns:
            RetraceWarning: Steps of functions from the same place in the source have
                replaced each other several times, for example five times.
        """
        captured: list[Any] = []
        compared: list[types.FunctionType] = []
        name, fingerprint = identified(fn, captured, compared)
        place = self._places.get(name)
        # Without the lock: this is every call of `run`. Lists of steps are replaced,
        # never changed.
        if place is not None:
            result = place.find_step(fingerprint)
            if result is not None:
                return result
        # Outside of the lock, because this searches up to 100,000 objects. Another
        # thread may do the same meanwhile: `_add` looks again.
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
            result = place.find_step(made.fingerprint)
            if result is not None:
                return result  # another thread made it meanwhile
            is_instead = place.add_step(made)
            before, place.words = place.words, words
            # By when they were made, not used: a look-up takes no lock, so it cannot
            # move anything.
            self._places.move_to_end(name)
            self._forget()
            place.replaced += is_instead
            times = place.replaced + 1
        if is_instead:
            _warn_of_retrace(made.step.name, times, before, words)
        return made

    def _forget(self) -> None:
        while sum(len(place.steps) for place in self._places.values()) > MAX_STEPS:
            name, oldest = next(iter(self._places.items()))
            # A new list in place of a changed one, because a look-up may be reading it.
            oldest.steps = oldest.steps[1:]
            if not oldest.steps:
                del self._places[name]


def _warn_of_retrace(name: str, times: int, before: Words, now: Words) -> None:
    # Seldom after the first few: a loop over all calls would print each time.
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
        f"run was given {name!r} for the {times}th time with other captured values, "
        "and each time it is traced and compiled. Changes since the last time: "
        f"{'; '.join(changed) or _ANOTHER}. Pass values that change from call to call "
        "in the args of run, as arrays: a number as np.float32(...)",
        RetraceWarning,
        stacklevel=user_stacklevel(),
    )


def _origin(fn: Callable[..., Any]) -> weakref.ref[Any] | None:
    """Returns a weak reference that shows whether the function is still in use; None if
    it does not support weak references."""
    held: Any = fn.__self__ if isinstance(fn, types.MethodType) else fn
    try:
        return weakref.ref(held)
    except TypeError:
        return None


def _called_like(step: Callable[..., Any], fn: Any) -> Callable[..., Any]:
    """Gives ``step`` the name and documentation of ``fn``, without a reference to
    ``fn``."""
    while is_partial(fn) and "__name__" not in vars(fn):
        fn = fn.func  # it has no own names
    names = [fn] if isinstance(fn, types.FunctionType) else [type(fn), fn]
    for each in names:  # the object's own ones, if it has them
        functools.update_wrapper(step, each, updated=())
    # It would keep the function, and all that it has captured, as long as the step.
    del step.__dict__["__wrapped__"]
    return step
