"""Dataclasses that are made quickly: ``@dataclass`` as in the standard library.

The standard library writes and compiles up to seven functions for each class, a third
of a millisecond, and a process has three hundred classes before it says its first word.
Here all classes are compared, hashed, shown and kept from changes by the same
functions; of a frozen class ``__init__`` alone is compiled.

Law: a class is to its users what the standard library makes of it, but for two things:
the words of `FrozenInstanceError`, and that the standard library does not know that a
class is frozen, so one that it freezes itself cannot be derived from it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, FrozenInstanceError, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """As `dataclasses.dataclass`."""
        if cls is None:
            return lambda cls: _made(cls, **options)
        return _made(cls, **options)


def _made(
    cls: Any,
    *,
    frozen: bool = False,
    slots: bool = False,
    init: bool = True,
    eq: bool = True,
    repr: bool = True,  # noqa: A002  # the words of the standard library
    **others: bool,
) -> Any:
    own = dict(vars(cls))
    if not cls.__doc__:  # which is made of the signature else
        cls.__doc__ = cls.__name__
    made: Any = dataclasses.dataclass(
        init=init and not frozen, eq=False, repr=False, slots=slots, **others
    )(cls)
    given: dict[str, Any] = {}
    if repr:
        given["__repr__"] = _shown
    if eq:
        given["__eq__"], hashed = _comparing(made)
        given["__hash__"] = hashed if frozen else None
    if frozen:
        given["__setattr__"], given["__delattr__"] = _refusing(made)
        if init:
            given["__init__"] = _init_of(made)
        if slots:
            given["__getstate__"], given["__setstate__"] = _state, _set_state
    if "__eq__" in own and own.get("__hash__") is None:
        own.pop("__hash__", None)  # Python's, not the author's
    for name in given.keys() - own.keys():
        setattr(made, name, given[name])
    return made


def _init_of(cls: Any) -> Callable[..., None]:
    """Sets the fields of a frozen class, as that of the standard library does."""
    known: dict[str, Any] = {"set__": object.__setattr__, "missing__": MISSING}
    arguments, lines = ["self"], []
    for each in fields(cls):
        name = value = each.name
        is_made, has_default = each.default_factory, each.default is not MISSING
        if each.kw_only:
            raise TypeError(
                f"{cls.__qualname__}.{name} is given by its name alone, which only "
                "dataclasses.dataclass knows"
            )
        if has_default:
            known[f"default__{name}"] = each.default
        elif is_made is not MISSING:
            known[f"make__{name}"] = is_made
            value = f"make__{name}() if {name} is missing__ else {name}"
        if each.init and has_default:
            arguments.append(f"{name}=default__{name}")
        elif each.init:
            arguments.append(name if is_made is MISSING else f"{name}=missing__")
        elif has_default:
            value = f"default__{name}"
        elif is_made is MISSING:
            continue  # `__post_init__` sets it
        else:
            value = f"make__{name}()"
        lines.append(f"  set__(self, {name!r}, {value})")
    if getattr(cls, "__post_init__", None) is not None:
        lines.append("  self.__post_init__()")
    text = "\n".join(
        [
            f"def make({', '.join(known)}):",
            f" def __init__({', '.join(arguments)}):",
            *(lines or ["  pass"]),
            " return __init__",
        ]
    )
    names: dict[str, Any] = {}
    exec(text, {"__name__": cls.__module__}, names)
    init: Any = names["make"](**known)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    hints = {each.name: each.type for each in fields(cls) if each.init}
    init.__annotations__ = {**hints, "return": None}
    return init  # type: ignore[no-any-return]  # what was compiled


def _comparing(cls: Any) -> tuple[Callable[..., Any], Callable[..., int]]:
    """``__eq__`` and ``__hash__``."""
    values = _values_of([each.name for each in fields(cls) if each.compare])

    def equal(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values(self) == values(other)

    def hashed(self: Any) -> int:
        return hash(values(self))

    return equal, hashed


def _values_of(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    if not names:
        return lambda value: ()
    (name,) = names
    return lambda value: (getattr(value, name),)


def _refusing(cls: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """``__setattr__`` and ``__delattr__``. A class that is derived may have more."""
    names = frozenset([each.name for each in fields(cls)])

    def refuse(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"{type(self).__name__}.{name} stays as it is")

    def set_one(self: Any, name: str, value: object) -> None:
        refuse(self, name)
        super(cls, self).__setattr__(name, value)

    def delete(self: Any, name: str) -> None:
        refuse(self, name)
        super(cls, self).__delattr__(name)

    return set_one, delete


@recursive_repr()
def _shown(self: Any) -> str:
    names = [each.name for each in fields(self) if each.repr]
    shown = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
    return f"{type(self).__qualname__}({shown})"


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in fields(self)]


def _set_state(self: Any, state: Sequence[Any]) -> None:
    for each, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)
