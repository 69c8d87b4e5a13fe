"""Pickles functions, and reads the class statements of classes.

Functions are pickled in two steps, of which class statements need the first. A
function's globals and cells may refer to the class that it is a method of. So the
receiver makes empty functions, then the class, and then fills the functions. Attributes
that cannot refer to a class are set from the start, because code that runs when a class
is made (a metaclass, ``__init_subclass__``) reads names, defaults and attributes of
methods, and may call them.

Wrappers of Python's library that refer to objects of their process (a cache, a lock)
are made again by calling the library.

``jax.checkpoint(f)``, ``jax.vmap(f)`` or ``contextlib.contextmanager(f)`` return a
function that cannot be imported: its code belongs to the package, and its closure to
the user. The receiver makes it with the globals of the package's module; if the
function were pickled by value, these globals would be pickled, too, which fails for
some. A function with a custom gradient is an object of jax that holds such functions.
It forwards any attribute to one of them, so pickle must not read its attributes.

The statement of a class is reconstructed from the class. A class keeps its names in
order: first those of the statement, then those that ``type``, a metaclass,
``__init_subclass__`` or a decorator added. The first name that is known to be added
ends the statement. Fields of a dataclass, which the decorator removes from the class or
replaces by their defaults, are made again.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import linecache
import sys
import types
import typing
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax

from zstrat.program.trace._tracebacks import is_installed
from zstrat.variables import is_machinery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


Reduced = tuple[Any, ...]

_PLAIN: Final = (str, bytes, bool, int, float, complex, type(None), type(...))
_LRU: Final = type(functools.lru_cache(lambda: None))
_dispatching: Final[Any] = functools.singledispatch(lambda _: None)
_OF_DISPATCH: Final = ("register", "dispatch", "registry", "_clear_cache")


def early(fn: types.FunctionType, at_hand: Callable[[object], bool]) -> dict[str, Any]:
    """Returns the attributes that a function gets when it is made, before it is filled.

    Args:
        at_hand: Returns whether the value of a global can be set that early, because
            the receiver imports it.
    """

    def keep(value: object) -> bool:
        return _is_plain(value) or at_hand(value)

    attributes: dict[str, Any] = {
        "__name__": fn.__name__,
        "__qualname__": fn.__qualname__,
        "__module__": fn.__module__,
        "__doc__": fn.__doc__,
        "__dict__": {key: value for key, value in vars(fn).items() if _is_plain(value)},
    }
    if _is_plain(fn.__defaults__):
        attributes["__defaults__"] = fn.__defaults__
    # Other globals wait until the class is there, as they may refer to it.
    names = fn.__code__.co_names
    given = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
    kept = {name: value for name, value in given.items() if keep(value)}
    return {"__globals__": kept, **attributes}


def empty(reduced: Reduced, attributes: Mapping[str, Any]) -> Reduced:
    """Makes the reduction of an empty function from cloudpickle's reduction of the
    function."""
    return _made, (reduced[0], reduced[1], attributes)


def whole(reduced: Reduced, attributes: Mapping[str, Any]) -> Reduced:
    """Makes the reduction of a complete function, made and filled in one step."""
    return (*empty(reduced, attributes), (reduced[5], reduced[2]), None, None, fill)


def remaining(reduced: Reduced) -> Reduced:
    """Returns the arguments of `fill`, which is the second step, from cloudpickle's
    reduction of a function."""
    return reduced[5], reduced[2]


def fill(fn: types.FunctionType, state: Any) -> None:
    """Sets globals, cells and attributes of an empty function (the second step)."""
    setstate, given = state
    # A copy: cloudpickle takes items out of what it is given.
    setstate(fn, (given[0], dict(given[1])))


def inner_functions(value: object) -> Iterator[types.FunctionType]:
    """Yields the functions in an attribute of a class: the value itself, or those that
    it wraps."""
    match value:
        case types.FunctionType():
            yield value
        case property():
            for part in (value.fget, value.fset, value.fdel):
                yield from inner_functions(part)
        case classmethod() | staticmethod():
            yield from inner_functions(value.__func__)
        case functools.cached_property():
            yield from inner_functions(value.func)


def is_dispatching(fn: types.FunctionType) -> bool:
    """Returns whether `functools.singledispatch` made the function."""
    return fn.__code__ is _dispatching.__code__


def reduced_dispatch(fn: Any) -> Reduced:
    """Reduces (as pickle does) a function of `functools.singledispatch`, with its
    implementations."""
    implementations = dict(fn.registry)
    # The function itself, to which ``singledispatch`` is applied once more.
    base = implementations.pop(object)
    own = {key: vars(fn)[key] for key in vars(fn) if key not in _OF_DISPATCH}
    return functools.singledispatch, (base,), (implementations, own), None, None, _teach


def remade(obj: object) -> Reduced | None:
    """Reduces a wrapper of Python's library to the call that makes it again; None for
    other objects."""
    match obj:
        case functools.cached_property():  # Python 3.11 keeps a lock in it
            state = {k: v for k, v in vars(obj).items() if k != "lock"}
            return functools.cached_property, (obj.func,), state
        case _LRU():
            inner: Any = obj
            parameters = inner.cache_parameters()
            arguments = (inner.__wrapped__, parameters["maxsize"], parameters["typed"])
            return _cached, arguments, vars(inner)
    return None


def is_cached(obj: object) -> bool:
    """Returns whether `functools.lru_cache` made the object."""
    return isinstance(obj, _LRU)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


# From here on named functions, as pickle refers to them by name.
def _made(
    make: Callable[..., types.FunctionType], args: Any, found: Mapping[str, Any]
) -> types.FunctionType:
    fn = make(*args)
    attributes = dict(found)
    fn.__globals__.update(attributes.pop("__globals__"))
    vars(fn).update(attributes.pop("__dict__"))
    for name, value in attributes.items():
        setattr(fn, name, value)
    return fn


def _cached(fn: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(fn)


def _teach(dispatch: Any, state: Any) -> None:
    implementations, own = state
    for kind, implementation in implementations.items():
        dispatch.register(kind, implementation)
    vars(dispatch).update(own)


_COPIED = (
    "__annotations__",
    "__defaults__",
    "__dict__",
    "__doc__",
    "__kwdefaults__",
    "__module__",
    "__name__",
    "__qualname__",
)


def reduced(fn: types.FunctionType) -> tuple[Any, ...] | None:
    """Reduces (as pickle does) a function that an installed package made; None for
    other functions."""
    module = sys.modules.get(fn.__globals__.get("__name__", ""))
    if module is None or fn.__globals__ is not vars(module) or _is_importable(fn):
        return None
    filename = getattr(module, "__file__", None) or ""
    if not is_installed(filename) and not is_machinery(filename):
        return None
    attributes = {name: getattr(fn, name) for name in _COPIED}
    state = (fn.__closure__ or (), attributes)
    return _blank, (module.__name__, fn.__code__), state, None, None, _fill


def reduced_vjp(fn: jax.custom_vjp[Any]) -> tuple[Callable[..., Any], Any, Any]:
    """Reduces (as pickle does) a function with a custom gradient."""
    return object.__new__, (jax.custom_vjp,), vars(fn)


def _is_importable(fn: types.FunctionType) -> bool:
    attribute: Any = sys.modules.get(fn.__module__ or "")
    for name in fn.__qualname__.split("."):
        attribute = getattr(attribute, name, None)
    return attribute is fn


def _blank(module: str, code: types.CodeType) -> types.FunctionType:
    # Filled later, as they may refer to what is being made.
    cells = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(
        code, vars(importlib.import_module(module)), closure=cells
    )


def _fill(fn: types.FunctionType, state: Any) -> None:
    cells, attributes = state
    for own, given in zip(fn.__closure__ or (), cells, strict=True):
        try:
            own.cell_contents = given.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name, value in attributes.items():
        setattr(fn, name, value)


_ADDED: Final = frozenset(
    {
        "__dict__",
        "__weakref__",
        "__abstractmethods__",
        "_abc_impl",
        "__parameters__",
        "_is_protocol",
        "__dataclass_params__",
        "__dataclass_fields__",
    }
)
_MADE_AGAIN: Final = frozenset(
    {
        "__dict__",
        "__weakref__",
        "__abstractmethods__",
        "_abc_impl",
        "__annotate_func__",
        "__annotations_cache__",
    }
)
"""Names of attributes that Python makes for each class, and that are not sent."""
_OF_DATACLASS: Final = frozenset(
    {"__dataclass_params__", "__dataclass_fields__", "__match_args__"}
)
_FLAGS: Final = ("init", "repr", "hash", "compare", "kw_only")
_HOOKLESS: Final = ("builtins", "abc", "typing", "enum", "typing_extensions")


class Body(NamedTuple):
    """The parts of a class.

    Args:
        bases: The bases as written, ``Generic[T]`` for instance.
        keywords: Keyword arguments of the class statement, without the metaclass.
        said: Attributes of the statement, by name.
        fields: Fields of the statement that the dataclass decorator removed.
        later: Attributes that were added after the statement.
        generated: Those of ``later`` that the dataclass decorator makes.
    """

    bases: tuple[Any, ...]
    keywords: dict[str, Any]
    said: dict[str, Any]
    fields: dict[str, Any]
    later: dict[str, Any]
    generated: dict[str, Any]

    def statement(self) -> tuple[Any, ...]:
        """Returns the parts that are needed to run the class statement again, without
        attributes that were added after it."""
        return tuple(self._replace(later={}, generated={}))

    def without_values(self) -> Body:
        """Returns the body without the values of the statement; its functions stay."""
        said = {
            name: value
            for name, value in self.said.items()
            if name.startswith("__") or any(inner_functions(value))
        }
        return self._replace(said=said)


def body_of(cls: type) -> Body:
    """Reads the parts of a class that is neither an enum nor a TypedDict."""
    said, later = _cut(cls)
    generated = {k: later.pop(k) for k in tuple(later) if is_generated(k, later[k])}
    # Only code that runs with the statement looks at its keywords and fields; all else
    # is set afterwards.
    runs = runs_code(cls)
    fields = _fields(cls) if runs else {}
    bases = cls.__bases__
    written = vars(cls).get("__orig_bases__", ())
    # ``Generic[T]`` becomes another base when the statement runs; what was written
    # gives the parameters once more.
    if types.resolve_bases(written) == bases:
        bases = written
        later.pop("__orig_bases__", None)
        said.pop("__orig_bases__", None)
    return Body(bases, _keywords(cls) if runs else {}, said, fields, later, generated)


def runs_code(cls: type) -> bool:
    """Returns whether a metaclass or a base runs code when the class is made."""
    metaclass: type = type(cls)
    makers = [base for base in cls.__mro__[1:] if "__init_subclass__" in vars(base)]
    modules = {maker.__module__ for maker in (*metaclass.__mro__, *makers)}
    return not modules <= set(_HOOKLESS)


def is_generated(name: str, value: object) -> bool:
    """Returns whether `dataclasses.dataclass` made the attribute."""
    if isinstance(value, types.FunctionType):
        inner = getattr(value, "__wrapped__", value)  # its repr is a wrapper
        code = getattr(inner, "__code__", value.__code__)
        return code.co_qualname.startswith("__create_fn__")
    return name in _OF_DATACLASS


def own_names(cls: type) -> dict[str, Any]:
    """Returns the attributes in a class's own ``__dict__``, without those that Python
    adds."""
    return {k: v for k, v in vars(cls).items() if not _is_pythons(cls, k, v)}


def _cut(cls: type) -> tuple[dict[str, Any], dict[str, Any]]:
    said: dict[str, Any] = {"__qualname__": cls.__qualname__}
    later: dict[str, Any] = {}
    into = said
    for number, (name, value) in enumerate(vars(cls).items()):
        # A docstring is written first; Python adds one that is missing last.
        if name in _ADDED or (name == "__doc__" and number > 3):
            into = later
        if is_generated(name, value):
            later[name] = value
        elif not _is_pythons(cls, name, value):
            into[name] = value
    if "__slots__" in later:  # of a dataclass: it makes the class a second time
        said["__slots__"] = later.pop("__slots__")
    # A class of Python 3.14 has a function in place of annotations until they are asked
    # for.
    if "__annotations__" in vars(cls) or "__annotate_func__" in vars(cls):
        said["__annotations__"] = later.pop("__annotations__", cls.__annotations__)
    return said, later


def _is_pythons(cls: type, name: str, value: object) -> bool:
    descriptors = (types.MemberDescriptorType, types.GetSetDescriptorType)
    slot = isinstance(value, descriptors) and value.__objclass__ is cls
    return slot or name in _MADE_AGAIN


def _fields(cls: type) -> dict[str, Any]:
    """Returns the fields of a dataclass that have more than a default value."""
    all_fields = vars(cls).get("__dataclass_fields__", {})
    own = vars(cls).get("__annotations__", ())
    fields = {name: all_fields[name] for name in own if name in all_fields}
    return {n: _written(f) for n, f in fields.items() if _says_more(f)}


def _says_more(field: dataclasses.Field[Any]) -> bool:
    usual = dataclasses.field()
    differs = any(getattr(field, flag) != getattr(usual, flag) for flag in _FLAGS[:4])
    factory = field.default_factory is not dataclasses.MISSING
    # In a field that no decorator has seen ``kw_only`` is MISSING.
    return differs or factory or bool(field.metadata) or bool(field.kw_only)


def _written(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """Returns the arguments of `dataclasses.field` that describe a field."""
    arguments = {flag: getattr(field, flag) for flag in _FLAGS}
    for name in ("default", "default_factory"):
        if (value := getattr(field, name)) is not dataclasses.MISSING:
            arguments[name] = value
    return arguments, dict(field.metadata)


def write_field(arguments: dict[str, Any], metadata: dict[Any, Any]) -> Any:
    """Makes a dataclass field from the arguments of `dataclasses.field`."""
    return dataclasses.field(metadata=metadata, **arguments)


def _keywords(cls: type) -> dict[str, Any]:
    """Reads, from the source of a class, the keyword arguments of its statement that
    are constants or global names."""
    module = sys.modules.get(cls.__module__)
    filename = getattr(module, "__file__", None)
    if module is None or filename is None:
        return {}
    # A class does not keep the keywords of its statement.
    written = _statements(filename, len(linecache.getlines(filename)))
    keywords = {}
    for keyword in written.get(cls.__qualname__, ()):
        match keyword.arg, keyword.value:
            case (None | "metaclass", _):
                continue
            case str(name), ast.Constant(value):
                keywords[name] = value
            case str(name), ast.Name(value) if value in vars(module):
                keywords[name] = vars(module)[value]
    return keywords


@functools.lru_cache(maxsize=64)
def _statements(filename: str, lines: int) -> dict[str, list[ast.keyword]]:
    """Reads the keyword arguments of all class statements of a file, by name of the
    class."""
    del lines  # another length is another file
    keywords: dict[str, list[ast.keyword]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.ClassDef(name=name):
                    keywords[prefix + name] = child.keywords
                    visit(child, f"{prefix}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    visit(child, f"{prefix}{name}.<locals>.")
                case _:
                    visit(child, prefix)

    try:
        visit(ast.parse("".join(linecache.getlines(filename))), "")
    except SyntaxError:  # not Python: a notebook, say
        return {}
    return keywords


def is_bare(cls: type) -> bool:
    """Returns whether the class can be made without running its metaclass."""
    return typing.is_typeddict(cls)
