"""The compiled steps of functions that ``run`` is given outside of a step.

A function is known by its code and by what it has captured: cells of its closure,
defaults, globals that it names, the object that it is a method of. So a lambda that is
made anew for each call is the same function as long as it captures the same objects,
and one that captures other ones, or whose global was bound anew, is another; a global
of a function of the same module that it calls, too. What happens *inside* a captured
object (an item of a list, a global of another module) is not seen, as by
``tf.function``.

The function itself and what it has captured are compared at each call. What is beneath
them, the functions of its module that it may call, is only watched, in one flat list
(`FunctionDependencies`): whether each name and each cell still has the object that it
had when the function was traced, and each function its code and defaults. A helper is
looked into when a step is made, and never at a call.

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
from zstrat.variables import outside

from ._captured import (
    NOT_BOUND,
    PLAIN,
    CapturedObjects,
    beneath,
    captured_words,
    global_names,
    in_words,
    is_partial,
    named,
)

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Hashable,
        Iterable,
        Iterator,
        KeysView,
        Mapping,
        Sequence,
    )

    Module = dict[str, Any]


class FunctionDependencies:
    """What some functions are bound to: their names and cells, their code and defaults.

    A name that nothing is bound to counts, too: one may hide a builtin, later.
    """

    __slots__ = ("_absent", "_cells", "_functions", "_given", "_held", "_names")

    def __init__(self, functions: Iterable[types.FunctionType]) -> None:
        of_one = {id(fn): fn for fn in functions}.values()
        self._functions = [(fn, fn.__code__, fn.__defaults__) for fn in of_one]
        # A function without such arguments has no use for what is set there.
        with_keywords = [fn for fn in of_one if fn.__code__.co_kwonlyargcount]
        self._given = [(fn, fn.__kwdefaults__) for fn in with_keywords]
        cells = {id(x): x for fn in of_one for x in fn.__closure__ or ()}
        places = {(id(x[0]), x[1]): x for fn in of_one for x in _places(fn)}
        values = [known.get(name, NOT_BOUND) for known, name in places.values()]
        contents = [_contents(cell) for cell in cells.values()]
        self._names = [
            (known.get, name, id(value), _plain(value))
            for (known, name), value in zip(places.values(), values, strict=True)
            if value is not NOT_BOUND
        ]
        self._cells = [
            (cell, id(value), _plain(value))
            for cell, value in zip(cells.values(), contents, strict=True)
        ]
        # Apart from the others and by module: mostly these are names of builtins, and
        # one call in C looks for all of them.
        self._absent = _by_module(
            place
            for place, value in zip(places.values(), values, strict=True)
            if value is NOT_BOUND
        )
        self._held = CapturedObjects([*values, *contents])

    def are_same(self) -> bool:
        """Whether all names, cells and codes are bound as they were."""
        if not self._functions:
            return True
        for fn, code, defaults in self._functions:
            if fn.__code__ is not code or fn.__defaults__ is not defaults:
                return False
        for get, name, known, value in self._names:
            found = get(name, NOT_BOUND)
            # Nearly always it is the very object. Another one is no change either if it
            # is an equal number or text, as in `_captured`.
            if id(found) != known and not _are_alike(found, value):
                return False
        for cell, known, value in self._cells:
            found = _contents(cell)
            if id(found) != known and not _are_alike(found, value):
                return False
        for names, absent in self._absent:
            if not names.isdisjoint(absent):
                return False
        if self._given and not self._are_given_the_same():
            return False
        # Last: had an object gone meanwhile, its number may have been met above.
        return self._held.are_there()

    def are_there(self) -> bool:
        """Whether what they were bound to is still there, so that they can be bound so
        again."""
        return self._held.are_there()

    def _are_given_the_same(self) -> bool:
        return all(fn.__kwdefaults__ is given for fn, given in self._given)


def _places(fn: types.FunctionType) -> Iterator[tuple[Module, str]]:
    """The globals that a function may name, and those of its defaults that are in a
    dict."""
    code = fn.__code__
    for name in global_names(code):
        yield fn.__globals__, name
    if fn.__kwdefaults__ is not None:
        first = code.co_argcount
        for name in code.co_varnames[first : first + code.co_kwonlyargcount]:
            yield fn.__kwdefaults__, name


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return NOT_BOUND


def _by_module(
    places: Iterable[tuple[Module, str]],
) -> list[tuple[KeysView[str], set[str]]]:
    found: dict[int, tuple[KeysView[str], set[str]]] = {}
    for known, name in places:
        found.setdefault(id(known), (known.keys(), set()))[1].add(name)
    return list(found.values())


def _plain(value: Any) -> Any:
    return value if type(value) in PLAIN else NOT_BOUND


def _are_alike(found: Any, value: Any) -> bool:
    """Whether it is the same number or text, if another object."""
    kind = type(value)
    return type(found) is kind and kind in PLAIN and repr(found) == repr(value)


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
    marks: Hashable
    held: CapturedObjects
    """The objects that ``marks`` names by their identity."""
    watched: FunctionDependencies
    origin: weakref.ref[Any] | None
    why_not: str | None = None

    @property
    def is_live(self) -> bool:
        """Whether the function that it was made of is still there."""
        return self.origin is None or self.origin() is not None

    def is_of(self, marks: Hashable) -> bool:
        """Whether it does what a function with these marks does now."""
        return self.marks == marks and self.held.are_there() and self.watched.are_same()

    def may_return(self) -> bool:
        """Whether a function with these marks can ever be given again."""
        return self.held.are_there() and self.watched.are_there()


@dataclass(slots=True, eq=False)
class StepPlace:
    """The steps that were made of the functions of one place in the source."""

    steps: list[CachedStep] = field(default_factory=list)
    replaced: int = 0
    words: dict[str, str] = field(default_factory=dict)
    """What the last function had captured."""

    def find(self, marks: Hashable) -> CachedStep | None:
        """The step of a function with these marks."""
        for step in self.steps:
            if step.is_of(marks):
                return step
        return None

    def add(self, made: CachedStep) -> bool:
        """Keeps another one; says whether it is compiled in the stead of one: not
        beside those of other functions that live, nor for what runs in turns."""
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
        name, marks = named(fn, captured, compared)
        place = self._places.get(name)
        # Without the lock: this is each call of `run`. Lists of steps are replaced,
        # never changed.
        if place is not None:
            found = place.find(marks)
            if found is not None:
                return found
        functions = beneath(fn)
        made = CachedStep(
            Function(_called_like(self._make(), fn)),
            marks,
            CapturedObjects([*captured, *[each.__code__ for each in compared]]),
            FunctionDependencies(x for x in functions if x not in compared),
            _origin(fn),
            "it is eager" if isinstance(fn, Function) and fn.eager else None,
        )
        return self._add(name, made, _words(fn, functions))

    def _add(self, name: int, made: CachedStep, words: dict[str, str]) -> CachedStep:
        with self._lock:
            place = self._places.setdefault(name, StepPlace())
            found = place.find(made.marks)
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


def _tell(name: str, times: int, before: dict[str, str], now: dict[str, str]) -> None:
    if times not in WARN_AT and times % WARN_AT[-1]:
        return
    changed = [
        f"{place} was {before.get(place, 'not there')} and is "
        f"{now.get(place, 'not there')}"
        for place in dict.fromkeys((*before, *now))
        if before.get(place) != now.get(place)
    ]
    warnings.warn(
        f"run was given {name!r} for the {times}th time with something else that it "
        "has captured, and each time it is traced and compiled. Since the last one: "
        f"{'; '.join(changed) or _ANOTHER}. "
        "Pass what changes from call to call among the args of run, as an array: a "
        "number as np.float32(...), say",
        RetraceWarning,
        stacklevel=outside(),
    )


def _words(fn: Any, functions: list[types.FunctionType]) -> dict[str, str]:
    """What a function and those beneath it have captured."""
    words = {place: is_ for each in functions for place, is_ in captured_words(each)}
    match fn:
        case Function():
            words |= _words(fn.body, [])
        case types.MethodType():
            words["the object that it is a method of"] = in_words(fn.__self__)
        case functools.partial():
            for number, value in enumerate(fn.args):
                words[f"args[{number}] of the partial"] = in_words(value)
            for name, value in fn.keywords.items():
                words[f"{name!r} of the partial"] = in_words(value)
        case types.FunctionType():
            pass
        case _:
            words["the object that is called"] = in_words(fn)
    return words


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
