"""What a function of Python has captured, and the function that a kept step runs.

Captured are the cells of its closure, its defaults, and the globals that it names: what
it loads by name, not the attributes of the same name. They come with and without words.
Law of the file: values always come in the same order, and with the same length as their
words.

A step is kept for all functions that are the same by what they have captured when they
are given. Later that may change, of each of them by itself, and a step may be traced
once more at any call, for another shape: so it runs the function that ``run`` was given
at that very call. Law of the file: a step holds none of the functions that it runs, so
that each may go.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.program import Function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

PLAIN: Final = frozenset((int, float, str, bytes, bool, type(None), complex))
"""Types of what is compared by what it is, and never by which object."""

MAX_ITEMS: Final = 32
"""Items of a tuple that are compared at a call: a shape has fewer."""

_LASTING: Final = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
)
"""Types of what lives as long as its module, mostly: there is less to ask at a call."""

_LOADS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})

_MAX_NAMED: Final = 1024
"""Codes of which the names are kept."""

_GONE: Final = object()


def is_global(fn: types.FunctionType) -> bool:
    """Whether it is the very function that its module has under its name."""
    return fn.__globals__.get(fn.__name__) is fn


def is_partial(fn: Any) -> bool:
    """Whether it is a partial that calls as any other, such as one of jax."""
    partial = functools.partial
    return isinstance(fn, partial) and type(fn).__call__ is partial.__call__


def captured_values(fn: types.FunctionType) -> list[Any]:
    """What the function has captured, always in the same order."""
    found = own_values(fn)
    known = fn.__globals__
    for name in global_names(fn.__code__):
        value = known.get(name, _GONE)
        if value is not _GONE:
            found.append(value)
    return found


def own_values(fn: types.FunctionType) -> list[Any]:
    """The same without the globals."""
    found: list[Any] = []
    for cell in fn.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(_GONE)  # not bound yet
    if fn.__defaults__:
        found += fn.__defaults__
    if fn.__kwdefaults__:
        found += fn.__kwdefaults__.values()
    return found


def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that may be globals, in the function and those defined in it."""
    found = _named.get(id(code))
    if found is None or found[0] is not code:
        if len(_named) >= _MAX_NAMED:
            _named.clear()
        found = _named[id(code)] = code, _global_names(code)
    return found[1]


# By identity: the hash of a code is that of all its instructions, at each call.
_named: Final[dict[int, tuple[types.CodeType, tuple[str, ...]]]] = {}


def _global_names(code: types.CodeType) -> tuple[str, ...]:
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    names = [
        each.argval for each in dis.get_instructions(code) if each.opname in _LOADS
    ]
    names += [name for x in inner for name in _global_names(x)]
    return tuple(dict.fromkeys(names))


def wrapped_in(value: Any) -> Any:
    """What ``functools.wraps`` was told, as jax does, too."""
    try:
        wrapped = vars(value).get("__wrapped__")
    except TypeError:  # no __dict__
        return None
    return wrapped if callable(wrapped) and wrapped is not value else None


def captured_words(fn: types.FunctionType) -> Iterator[tuple[str, str]]:
    """What the function has captured, and what that is, for a person."""
    for place, value in zip(_places(fn), captured_values(fn), strict=True):
        yield place, in_words(value)


def in_words(value: Any) -> str:
    """The same for another object only where it counts as the same."""
    kind = type(value)
    if kind in PLAIN or isinstance(value, np.generic):
        return f"{value!r:.60}"
    if value is _GONE:
        return "not bound"
    if isinstance(value, types.FunctionType) and not is_global(value):
        return f"<function {value.__qualname__}>"  # may be made anew at each call
    if kind is tuple:
        return f"({', '.join(map(in_words, value[:MAX_ITEMS]))})"
    if kind is slice:
        return f"slice{in_words((value.start, value.stop, value.step))}"
    if kind is types.MethodType:
        return f"{in_words(value.__func__)} of {in_words(value.__self__)}"
    if kind is functools.partial:
        given = *value.args, *value.keywords.values()
        return f"partial({in_words(value.func)}, {in_words(given)})"
    return f"<{kind.__qualname__} at {id(value):#x}>"


def _places(fn: types.FunctionType) -> Iterator[str]:
    code, of = fn.__code__, f"of {fn.__qualname__}"
    for name in code.co_freevars:
        yield f"captured name {name!r} {of}"
    first = code.co_argcount - len(fn.__defaults__ or ())
    given = code.co_varnames[first : code.co_argcount]
    for name in itertools.chain(given, fn.__kwdefaults__ or ()):
        yield f"the default of {name!r} {of}"
    for name in global_names(code):
        if name in fn.__globals__:
            yield f"global {name!r} of {fn.__globals__.get('__name__')}"


class CapturedObjects:
    """Objects that are known by their identity: an object that is gone has given it to
    any other.

    They are held weakly where they can be, so that nothing lives longer because a
    function has seen it.
    """

    __slots__ = ("_gone", "_strongly", "_weakly")

    def __init__(self, objects: Iterable[Any]) -> None:
        self._weakly: list[weakref.ref[Any]] = []
        self._strongly: list[Any] = []
        self._gone: list[weakref.ref[Any]] = []
        for each in objects:
            if isinstance(each, _LASTING):
                self._strongly.append(each)
                continue
            try:
                # Who is gone says so: there is nothing to ask at a call.
                self._weakly.append(weakref.ref(each, self._gone.append))
            except TypeError:
                self._strongly.append(each)

    def are_there(self) -> bool:
        """Whether all of them are."""
        return not self._gone


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


def origin(fn: Callable[..., Any]) -> weakref.ref[Any] | None:
    """Whatever says whether the function is still in use."""
    held: Any = fn.__self__ if isinstance(fn, types.MethodType) else fn
    try:
        return weakref.ref(held)
    except TypeError:
        return None


def called_like(step: Callable[..., Any], fn: Any) -> Callable[..., Any]:
    """``step``, by the names of ``fn``, which it does not hold."""
    while is_partial(fn) and "__name__" not in vars(fn):
        fn = fn.func  # it has none of its own
    names = [fn] if isinstance(fn, types.FunctionType) else [type(fn), fn]
    for each in names:  # the object's own ones, if it has them
        functools.update_wrapper(step, each, updated=())
    del step.__dict__["__wrapped__"]
    return step
