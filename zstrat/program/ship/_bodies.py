"""Reads the statement of a class back from the class.

A class keeps its names in order: first those of the statement, then those that
``type``, a metaclass, ``__init_subclass__`` or a decorator added. The first name that
is known to be added ends the statement. Fields of a dataclass, which the decorator
removes from the class or replaces by their defaults, are made again.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import linecache
import sys
import types
import typing
from typing import Any, Final, NamedTuple

from ._functions import inner_functions

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
"""Each class gets its own."""
_OF_DATACLASS: Final = frozenset(
    {"__dataclass_params__", "__dataclass_fields__", "__match_args__"}
)
_FLAGS: Final = ("init", "repr", "hash", "compare", "kw_only")
_HOOKLESS: Final = ("builtins", "abc", "typing", "enum", "typing_extensions")


class Body(NamedTuple):
    """The parts of a class.

    Args:
        bases: As written, ``Generic[T]`` for instance.
        keywords: Of the class statement, without the metaclass.
        said: Attributes of the statement, by name.
        fields: Fields of the statement that the dataclass decorator removed.
        later: Attributes that were added after the statement.
        generated: Those of them that the dataclass decorator makes.
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
        """Drops the values of the statement, and keeps its functions."""
        said = {
            name: value
            for name, value in self.said.items()
            if name.startswith("__") or any(inner_functions(value))
        }
        return self._replace(said=said)


def body_of(cls: type) -> Body:
    """Reads a class that is neither an enum nor a TypedDict."""
    said, later = _cut(cls)
    generated = {k: later.pop(k) for k in tuple(later) if is_generated(k, later[k])}
    runs = runs_code(cls)
    fields = _fields(cls) if runs else {}
    bases = cls.__bases__
    written = vars(cls).get("__orig_bases__", ())
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
    """Returns a class's own attributes, without those that Python adds."""
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
    if "__annotations__" in vars(cls) or "__annotate_func__" in vars(cls):
        said["__annotations__"] = later.pop("__annotations__", cls.__annotations__)
    return said, later


def _is_pythons(cls: type, name: str, value: object) -> bool:
    descriptors = (types.MemberDescriptorType, types.GetSetDescriptorType)
    slot = isinstance(value, descriptors) and value.__objclass__ is cls
    return slot or name in _MADE_AGAIN


def _fields(cls: type) -> dict[str, Any]:
    """Returns the fields that have more than a default value."""
    all_fields = vars(cls).get("__dataclass_fields__", {})
    own = vars(cls).get("__annotations__", ())
    fields = {name: all_fields[name] for name in own if name in all_fields}
    return {n: _written(f) for n, f in fields.items() if _says_more(f)}


def _says_more(field: dataclasses.Field[Any]) -> bool:
    usual = dataclasses.field()
    differs = any(getattr(field, flag) != getattr(usual, flag) for flag in _FLAGS[:4])
    factory = field.default_factory is not dataclasses.MISSING
    return differs or factory or bool(field.metadata) or bool(field.kw_only)


def _written(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """Returns the arguments of `dataclasses.field` for a field."""
    arguments = {flag: getattr(field, flag) for flag in _FLAGS}
    for name in ("default", "default_factory"):
        if (value := getattr(field, name)) is not dataclasses.MISSING:
            arguments[name] = value
    return arguments, dict(field.metadata)


def write_field(arguments: dict[str, Any], metadata: dict[Any, Any]) -> Any:
    """Makes a field as in the class statement."""
    return dataclasses.field(metadata=metadata, **arguments)


def _keywords(cls: type) -> dict[str, Any]:
    """Reads keywords that are constants or global names from the source."""
    module = sys.modules.get(cls.__module__)
    filename = getattr(module, "__file__", None)
    if module is None or filename is None:
        return {}
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
    """Reads the keywords of all classes of a file, by name of the class."""
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
