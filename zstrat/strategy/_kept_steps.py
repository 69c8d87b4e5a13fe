"""The compiled steps of functions that ``run`` is given outside of a step.

A function is known by its code and by what it has captured: cells of its closure,
defaults, globals that it names, the object that it is a method of. So a lambda that is
made anew for each call is the same function as long as it captures the same objects,
and one that captures other ones, or whose global was bound anew, is another; a global
of a function of the same module that it calls, too (`_watched`). What happens *inside*
a captured object (an item of a list, a global of another module) is not seen, as by
``tf.function``.

Law of the file: a step is kept as long as its function lives. Of those that are gone
the last one of each place in the source is kept for the next one that is made there,
and with it what it has captured.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from zstrat.program import Function

from ._captured import captured_values, is_global
from ._watched import Watched, beneath

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

MAX_STEPS: Final = 256
"""Functions of one strategy. Each keeps programs of about a megabyte."""

_DEPTH: Final = 3
"""How deep functions that capture functions are looked into; the objects themselves are
compared beneath."""

_PLAIN: Final = (int, str, bytes, bool, type(None), complex)


@dataclass(slots=True, eq=False)
class KeptStep:
    """A function as a step that does nothing but run it.

    ``why_not`` says what keeps it from being one, once that is known.
    """

    step: Function
    marks: Hashable
    captured: list[Any]
    """Holds the objects that ``marks`` names by their identity."""
    watched: Watched
    origin: weakref.ref[Any] | None
    why_not: str | None = None

    @property
    def is_live(self) -> bool:
        """Whether the function that it was made of is still there."""
        return self.origin is None or self.origin() is not None


class KeptSteps:
    """Those of one strategy; ``wrap`` makes the body of a step of a function."""

    def __init__(
        self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._wrap = wrap
        self._places: OrderedDict[int, list[KeptStep]] = OrderedDict()

    def of(self, fn: Callable[..., Any]) -> KeptStep:
        """The step of a function, made if it is not known."""
        captured: list[Any] = []
        place, marks = _named(fn, captured)
        kept = self._places.get(place)
        if kept is not None:
            for step in kept:
                if step.marks == marks and step.watched.are_same():
                    return step
        compared = {id(x) for x in captured if isinstance(x, types.CodeType)}
        made = KeptStep(
            Function(self._wrap(_without_identity(fn))),
            marks,
            captured,
            Watched(x for x in beneath(fn) if id(x.__code__) not in compared),
            _origin(fn),
            "it is eager" if isinstance(fn, Function) and fn.eager else None,
        )
        gone = [step for step in kept or () if not step.is_live][-1:]
        live = [step for step in kept or () if step.is_live]
        self._places[place] = [*gone, *live, made]
        self._places.move_to_end(place)
        while sum(map(len, self._places.values())) > MAX_STEPS:
            oldest = next(iter(self._places))
            self._places[oldest].pop(0)
            if not self._places[oldest]:
                del self._places[oldest]
        return made


def _origin(fn: Callable[..., Any]) -> weakref.ref[Any] | None:
    """Whatever says whether the function is still in use."""
    held: Any = fn.__self__ if isinstance(fn, types.MethodType) else fn
    try:
        return weakref.ref(held)
    except TypeError:
        return None


def _without_identity(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as another object, so that the first one may go."""
    if not isinstance(fn, types.FunctionType):
        return fn
    made = types.FunctionType(
        fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    made.__kwdefaults__ = fn.__kwdefaults__
    made.__qualname__, made.__module__ = fn.__qualname__, fn.__module__
    made.__doc__ = fn.__doc__
    return made


def _named(fn: Any, captured: list[Any], depth: int = 0) -> tuple[int, Hashable]:
    """Where the function stands in the source, and what it has captured."""
    match fn:
        case Function():
            place, marks = _named(fn.body, captured, depth)
            return place, (Function, fn.eager, marks)
        case types.MethodType():
            place, marks = _named(fn.__func__, captured, depth)
            return place, (_mark(fn.__self__, captured, depth), marks)
        case functools.partial():
            place, marks = _named(fn.func, captured, depth)
            given = *fn.args, *fn.keywords.values()
            return place, (
                tuple(fn.keywords),
                marks,
                *[_mark(value, captured, depth) for value in given],
            )
        case types.FunctionType():
            captured.append(fn.__code__)
            return id(fn.__code__), tuple(
                [_mark(value, captured, depth) for value in captured_values(fn)]
            )
    captured.append(fn)
    return id(fn), ()


def _mark(value: Any, captured: list[Any], depth: int) -> Hashable:
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return kind, repr(value)  # -0.0 is another one than 0.0
    if kind is types.FunctionType and depth < _DEPTH and not is_global(value):
        return _named(value, captured, depth + 1)
    captured.append(value)
    return id(value)
