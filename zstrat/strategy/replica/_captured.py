"""Finds and compares what a Python function depends on besides its arguments.

A function is identified by its place in the source, which is the identity of its code,
and by *fingerprints* of its cells and defaults. The fingerprint of an immutable value
is made from its content: numbers, including those of numpy, text, and immutable
containers (tuples, slices, functions, methods, partials). Any other value has its
identity as fingerprint. So a lambda that is made again at each call is the same
function. Law of fingerprints: they are made at each call of ``run``, and read nothing
of a value that is compared by identity but its type.

Everything else that a function depends on is stored in a fixed place
(`FunctionDependencies`): globals, and the cells, defaults and codes of the functions of
its module that it may call: helper functions, whatever decorates them, and methods of
classes.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.program import Function
from zstrat.program.trace import is_known, reached

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

PLAIN: Final = frozenset((int, float, str, bytes, bool, type(None), complex))
"""Types of values that are compared by value, never by identity."""

NOT_BOUND: Final = object()
"""Marks a name or a cell that is not bound to a value."""

_MAX_ITEMS: Final = 32
"""Largest number of items of a tuple whose items are compared at each call; a shape has
fewer."""

_DEPTH: Final = 3
"""How deeply nested functions, in cells of functions, are compared by their content."""

_MAX_REACHED: Final = 100_000
"""Largest number of objects in which functions that a function may call are
searched."""

# Code that runs again makes these again, so their identity would differ at each call.
_OF_PARTS: Final = frozenset(
    (types.FunctionType, types.MethodType, functools.partial, tuple, slice)
)

_LASTING: Final = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
)
"""Types of objects that mostly live as long as their module, so they need no weak
reference."""

_LOADS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})

_MAX_NAMED: Final = 1024
"""Number of code objects whose names are cached."""


def identified(
    fn: Any,
    captured: list[Any],
    compared: list[types.FunctionType],
    depth: int = 0,
) -> tuple[int, Hashable]:
    """Returns the place of a function in the source, and a fingerprint of the values
    that it has captured.

    Args:
        captured: A list to which objects that are compared by identity are appended.
        compared: A list to which functions that are compared by their captured values
            are appended.
    """
    if type(fn) is types.FunctionType:
        # What it captured decides, not the function object: a lambda in a loop is a new
        # object each time.
        compared.append(fn)
        # `FunctionCache` holds the code, so that no other object gets its id meanwhile.
        values = [
            _fingerprint(value, captured, compared, depth) for value in own_values(fn)
        ]
        return id(fn.__code__), (id(fn.__globals__), *values)
    match fn:
        case Function():
            place, fingerprint = identified(fn.body, captured, compared, depth)
            # Eager or not belongs to it: two steps may share one body.
            return place, (Function, fn.eager, fingerprint)
        case types.MethodType():
            place, fingerprint = identified(fn.__func__, captured, compared, depth)
            captured.append(fn.__self__)
            return place, (id(fn.__self__), fingerprint)
        case functools.partial() if is_partial(fn):
            place, fingerprint = identified(fn.func, captured, compared, depth)
            given = *fn.args, *fn.keywords.values()
            return place, (
                # The names, because the values below stand in the order of the names.
                tuple(fn.keywords),
                fingerprint,
                *[_fingerprint(value, captured, compared, depth) for value in given],
            )
    captured.append(fn)
    called = innermost(fn)
    if called is None:  # it is written in C, for example
        return id(fn), ()
    # The place is the code that it runs, so that objects of one class that are made
    # again and again count as one place in the source, and the warning about retraces
    # finds them.
    captured.append(called.__code__)
    return id(called.__code__), (id(fn),)


def _fingerprint(
    value: Any, captured: list[Any], compared: list[types.FunctionType], depth: int
) -> Hashable:
    # The exact type: a subclass of int may compare as it likes.
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # -0.0 is another one than 0.0
    if kind in PLAIN:
        return kind, value
    if kind in _OF_PARTS:
        # Without this bound a recursive inner function, which has itself in a cell,
        # would have no end.
        if depth < _DEPTH:
            return _fingerprint_of_parts(value, captured, compared, depth + 1)
    elif isinstance(value, np.generic):
        # By its bytes: nan is itself, and -0.0 is not 0.0.
        return kind, value.dtype, value.tobytes()
    captured.append(value)
    return id(value)


def _fingerprint_of_parts(
    value: Any, captured: list[Any], compared: list[types.FunctionType], depth: int
) -> Hashable:
    """Fingerprints a value by its content, as an equal value may be created again at
    each call."""
    kind = type(value)
    parts: tuple[Any, ...]
    if kind is tuple and len(value) <= _MAX_ITEMS:
        parts = value
    elif kind is slice:
        parts = value.start, value.stop, value.step
    # Identity serves both: a long tuple would take too long to compare, and a function
    # of a module is not made again at each call.
    elif kind is tuple or (kind is types.FunctionType and is_global(value)):
        captured.append(value)
        return id(value)
    else:
        return identified(value, captured, compared, depth)
    return kind, *[_fingerprint(part, captured, compared, depth) for part in parts]


def captured_values(fn: types.FunctionType) -> list[Any]:
    """Returns the values that the function has captured, always in the same order:
    cells, defaults, then globals."""
    result = own_values(fn)
    known = fn.__globals__
    for name in global_names(fn.__code__):
        value = known.get(name, NOT_BOUND)
        if value is not NOT_BOUND:
            result.append(value)
    return result


def own_values(fn: types.FunctionType) -> list[Any]:
    """Returns the values that a function has captured, except globals: cells and
    defaults."""
    result = [_contents(cell) for cell in fn.__closure__ or ()]
    if fn.__defaults__:
        result += fn.__defaults__
    if fn.__kwdefaults__:
        result += fn.__kwdefaults__.values()
    return result


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return NOT_BOUND


def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names that may be globals, in the code of a function and of functions
    that it defines."""
    known = _named.get(id(code))
    # An entry holds its code, so this id cannot have passed to another one.
    if known is None:
        if len(_named) >= _MAX_NAMED:
            _named.clear()
        known = _named[id(code)] = code, _global_names(code)
    return known[1]


# By identity: the hash of a code is that of all its instructions, at each call.
_named: Final[dict[int, tuple[types.CodeType, tuple[str, ...]]]] = {}


def _global_names(code: types.CodeType) -> tuple[str, ...]:
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    names = [
        each.argval for each in dis.get_instructions(code) if each.opname in _LOADS
    ]
    names += [name for x in inner for name in _global_names(x)]
    return tuple(dict.fromkeys(names))


def innermost(fn: Any) -> types.FunctionType | None:
    """Returns the Python function of a callable: the one that it wraps or binds, or the
    ``__call__`` method of its class; None if there is none."""
    match fn:
        case Function():
            return innermost(fn.body)
        case types.MethodType():
            return innermost(fn.__func__)
        case functools.partial():
            return innermost(fn.func)
    wrapped = wrapped_in(fn)
    if wrapped is not None:
        return innermost(wrapped)
    call = fn if isinstance(fn, types.FunctionType) else type(fn).__call__
    if isinstance(call, Function):
        call = call.body
    return call if isinstance(call, types.FunctionType) else None


def wrapped_in(value: Any) -> Any:
    """Returns the function that ``functools.wraps``, or jax, has recorded as wrapped by
    this object."""
    try:
        wrapped = vars(value).get("__wrapped__")
    except TypeError:  # no __dict__
        return None
    return wrapped if callable(wrapped) and wrapped is not value else None


def is_global(fn: types.FunctionType) -> bool:
    """Returns whether the module of the function has this very function under its
    name."""
    return fn.__globals__.get(fn.__name__) is fn


def is_partial(fn: Any) -> bool:
    """Returns whether this is a ``functools.partial`` that behaves like any other, such
    as one of jax."""
    partial = functools.partial
    return isinstance(fn, partial) and type(fn).__call__ is partial.__call__


def captured_words(fn: Any) -> Iterator[tuple[str, Hashable, str]]:
    """Yields each place where ``fn`` has captured a value, with the value's fingerprint
    and a description."""
    for place, value in _captured(fn):
        yield place, _fingerprint(value, [], [], 0), _description(value)


def _captured(fn: Any) -> Iterator[tuple[str, Any]]:
    match fn:
        case types.FunctionType():
            yield from zip(_places(fn), captured_values(fn), strict=True)
        case Function():
            yield from _captured(fn.body)
        case types.MethodType():
            yield "the object that it is a method of", fn.__self__
        case functools.partial():
            for number, value in enumerate(fn.args):
                yield f"args[{number}] of the partial", value
            for name, value in fn.keywords.items():
                yield f"{name!r} of the partial", value
        case _:
            yield "the object that is called", fn


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


def _description(value: Any) -> str:
    kind = type(value)
    if kind in PLAIN or isinstance(value, np.generic):
        return f"{value!r:.60}"
    if value is NOT_BOUND:
        return "not bound"
    if kind is tuple:
        return f"({', '.join(map(_description, value[:_MAX_ITEMS]))})"
    return f"<{kind.__qualname__} at {id(value):#x}>"


def dependencies(fn: Any) -> list[types.FunctionType]:
    """Lists the functions that ``fn`` may call: those of its module, and closures of
    other modules of the user.

    For a wrapper made by another module, the function that it wraps is listed.
    """
    called = innermost(fn)
    module = None if called is None else called.__globals__
    return [
        each
        for each in itertools.islice(reached([fn], only_code=True), _MAX_REACHED)
        if isinstance(each, types.FunctionType)
        and (each.__globals__ is module or _is_closure(each))
    ]


def _is_closure(fn: types.FunctionType) -> bool:
    # What a wrapper wraps is reached by itself; the wrapper of a library does not
    # change.
    is_wrapper = "__wrapped__" in vars(fn)
    module = fn.__globals__.get("__name__")
    return not (is_wrapper or is_global(fn) or is_known(module))


class FunctionDependencies:
    """The dependencies of a function that are read from fixed places: the globals of
    the functions that it may call, and the cells, defaults and codes of those that are
    not fingerprinted at each call.

    A global name that is not bound is included, as it may hide a builtin later.
    """

    __slots__ = ("_functions", "_held", "_places")

    def __init__(
        self,
        compared: Sequence[types.FunctionType],
        functions: Iterable[types.FunctionType],
    ) -> None:
        places: dict[Hashable, Callable[[], Any]] = {}
        for fn in (*compared, *functions):
            for name in global_names(fn.__code__):
                read = functools.partial(fn.__globals__.get, name, NOT_BOUND)
                places[id(fn.__globals__), name] = read
        # The cells and defaults of compared functions are in their fingerprints.
        others = [fn for fn in functions if fn not in compared]
        self._functions = [(fn, fn.__code__, fn.__defaults__) for fn in others]
        for fn in others:
            places.update(((id(fn), n), x) for n, x in enumerate(_own_places(fn)))
        values = [read() for read in places.values()]
        held = [*values]
        self._places = [
            (read, id(value), _fingerprint(value, held, [], 0))
            for read, value in zip(places.values(), values, strict=True)
        ]
        self._held = CapturedObjects(held)

    def are_same(self) -> bool:
        """Returns whether each place still has the same value, or one with an equal
        fingerprint."""
        # Assigning to these attributes changes what the function does, and no cell or
        # global shows it.
        for fn, code, defaults in self._functions:
            if fn.__code__ is not code or fn.__defaults__ is not defaults:
                return False
        for read, known, fingerprint in self._places:
            value = read()
            # Identity first: mostly nothing was bound again, and then no fingerprint is
            # made.
            if id(value) != known and _fingerprint(value, [], [], 0) != fingerprint:
                return False
        # Last: the id of an object that was freed meanwhile may have matched above.
        return self._held.are_there()

    def may_return(self) -> bool:
        """Returns whether all objects found in the places still exist: only then can
        the places have the same values again."""
        return self._held.are_there()


def _own_places(fn: types.FunctionType) -> Iterator[Callable[[], Any]]:
    """Returns functions that read the cells and the keyword defaults of a function."""
    for cell in fn.__closure__ or ():
        yield functools.partial(_contents, cell)
    code = fn.__code__
    if code.co_kwonlyargcount:  # else a value set there has no effect
        yield functools.partial(getattr, fn, "__kwdefaults__")
    if fn.__kwdefaults__ is not None:
        first = code.co_argcount
        for name in code.co_varnames[first : first + code.co_kwonlyargcount]:
            yield functools.partial(fn.__kwdefaults__.get, name, NOT_BOUND)


class CapturedObjects:
    """Keeps track of objects that are compared by identity, as another object may get
    the id of an object that was freed.

    References are weak where possible, so that no object lives longer because of this
    one.
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
                # The callback records that it was freed: there is nothing to check at a
                # call.
                self._weakly.append(weakref.ref(each, self._gone.append))
            except TypeError:
                self._strongly.append(each)

    def are_there(self) -> bool:
        """Returns whether all of these objects still exist."""
        return not self._gone
