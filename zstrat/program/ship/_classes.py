"""Pickles the user's classes by running their class statement again at the receiver.

A metaclass, or a base's ``__init_subclass__``, may do work that the class does not
show: register the class with jax, collect its fields. So the receiver does not fill a
blank class. It runs the class statement again (`_functions`), with empty functions,
because functions refer to the class. Then it fills the functions, and sets attributes
that differ from the original, whatever the code did on its second run. At last it
registers pytree classes with jax, because objects that are loaded after the class may
flatten trees of it at once.

A class has a number and is made once per process, however often it arrives. A class
that returns to its own process is the original, unchanged; one that arrives again in
another process gets the changes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import threading
import types
import typing
import uuid
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ._functions import (
    Body,
    body_of,
    fill,
    inner_functions,
    is_bare,
    own_names,
    write_field,
)
from ._references import HEAP_TYPE, Registration, register

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ENUM_NAMES: Final = (
    "_missing_",
    "_generate_next_value_",
    "_ignore_",
    "_new_member_",
    "_use_args_",
)
_PLAIN_CODE: Final = ("__new_member__", "__init__")


class KnownClasses:
    """By number, the classes that were sent from this process, or arrived in it."""

    def __init__(self) -> None:
        # Weak: a class is freed with the step that uses it.
        self._numbers: weakref.WeakKeyDictionary[type, str]
        self._numbers = weakref.WeakKeyDictionary()
        self._classes: weakref.WeakValueDictionary[str, type]
        self._classes = weakref.WeakValueDictionary()
        self._arrived: weakref.WeakSet[type] = weakref.WeakSet()
        # Re-entrant: making a class runs its code, which may unpickle others.
        self._lock = threading.RLock()

    def number(self, cls: type) -> str:
        with self._lock:
            # Not the name: running a notebook's cell twice makes two classes.
            if (number := self._numbers.get(cls)) is None:
                number = uuid.uuid4().hex
                self._remember(number, cls)
            return number

    def made(self, number: str, make: functools.partial[type]) -> type:
        """Returns the class of a number; makes the class if this process does not have
        it."""
        with self._lock:
            # Made under the lock, so threads that load one class at once get the same.
            if (cls := self._classes.get(number)) is None:
                cls = make()
                self._remember(number, cls)
                self._arrived.add(cls)
            return cls

    def is_arrived(self, cls: type) -> bool:
        """Returns whether the class arrived in this process from another one."""
        with self._lock:
            return cls in self._arrived

    def reference(self, cls: type) -> list[str]:
        """Returns the number of a class ("" if it has none), its module and its
        name."""
        with self._lock:
            return [self._numbers.get(cls, ""), cls.__module__, cls.__qualname__]

    def referenced(self, number: str, module: str, name: str) -> type:
        """Returns the class to which a reference from another task refers.

        Raises:
            TypeError: This process does not have the class.
        """
        with self._lock:
            cls: Any = self._classes.get(number)
        if cls is None:
            # Imports nothing: another task must not choose which code runs here.
            cls = sys.modules.get(module)
            for part in name.split("."):
                cls = getattr(cls, part, None)
        if not isinstance(cls, type):
            raise TypeError(
                f"an element or result contains a {name} of the worker's module "
                f"{module}, and this program does not have that class: define the "
                "class outside of the dataset or step function, or import its module "
                "in the program, too"
            )
        return cls

    def trusting(self, classes: Sequence[type]) -> KnownClasses:
        """Makes a registry that has only these classes, and treats them as its own."""
        other = KnownClasses()
        for cls in classes:
            other._remember(self.number(cls), cls)
        return other

    def _remember(self, number: str, cls: type) -> None:
        self._numbers[cls] = number
        self._classes[number] = cls


known: Final = KnownClasses()
_of_thread: Final = threading.local()


def class_reference(cls: type) -> Any:
    """Returns a reference to the class, as plain strings."""
    return known.reference(cls)


def referenced_class(reference: Sequence[Any]) -> type:
    """Returns the class to which a `class_reference` from another task refers.

    Raises:
        TypeError: This process does not have the class.
    """
    match reference:
        case [str(number), str(module), str(name)]:
            return known.referenced(number, module, name)
    raise TypeError(f"malformed reference to a class: {reference!r:.200}")


@contextmanager
def arriving_at(classes: KnownClasses) -> Iterator[None]:
    """Inside of the block, uses another registry for the classes that this thread
    unpickles."""
    # On this thread alone: others may load real classes meanwhile.
    _of_thread.classes = classes
    try:
        yield
    finally:
        del _of_thread.classes


def _known() -> KnownClasses:
    return getattr(_of_thread, "classes", known)


def functions_of(cls: type) -> list[types.FunctionType]:
    """Returns the functions that are attributes in the body of a class."""
    values = own_names(cls).values()
    return [fn for value in values for fn in inner_functions(value)]


# The following functions reduce classes for pickle.

Filled = Sequence[tuple[types.FunctionType, Any]]
"""Pairs of a function of a class, and the arguments with which `fill` fills it."""


Registrations = Sequence[Registration]
"""The registration of a class with jax, or an empty list."""


def reduced_plain(reduced: tuple[Any, ...], registrations: Registrations) -> Any:
    """Reduces (as pickle does) a pytree class that cloudpickle fills."""
    *made, state, items, pairs, finish_class = reduced
    state = finish_class, state, registrations
    return *made, state, items, pairs, finish_plain


def reduced_class(
    cls: type,
    filled: Filled,
    virtual: Sequence[type],
    registrations: Registrations,
    *,
    late: bool,
) -> Any:
    """Reduces (as pickle does) a class that is not an enum.

    Args:
        virtual: Its virtual subclasses (`abc.ABCMeta.register`).
        late: Set attributes after the class is made, because they refer to the class.
    """
    number, body = known.number(cls), body_of(cls)
    if late:
        body = body.without_values()
    names = {k: v for k, v in own_names(cls).items() if k not in body.generated}
    state = filled, names, body.generated, virtual, registrations
    if is_bare(cls):
        arguments: tuple[Any, ...] = (type(cls), cls.__name__, cls.__bases__, body.said)
        return make_bare, (number, *arguments), state, None, None, finish
    arguments = (type(cls), cls.__name__, body.statement())
    return make, (number, *arguments), state, None, None, finish


def reduced_enum(
    cls: type[enum.Enum], filled: Filled, registrations: Registrations
) -> Any:
    """Reduces (as pickle does) an enum."""
    keywords, said = statement_of_enum(cls)
    members = {name: member.value for name, member in cls.__members__.items()}
    arguments = (cls.__name__, cls.__bases__, keywords, said, members)
    names, attributes = names_of_enum(cls), attributes_of_members(cls)
    state = filled, names, attributes, registrations
    return make_enum, (known.number(cls), *arguments), state, None, None, finish_enum


def reduced_instance(obj: Any) -> Any:
    """Reduces an instance of a dataclass whose ``__new__`` records each new object;
    returns None for other instances, which pickle reduces.

    equinox records objects in ``__new__`` until its metaclass has made them; loaded
    objects are complete already.
    """
    if not _facts(type(obj)).notes_new:
        return None
    return object.__new__, (type(obj),), obj.__getstate__()


def is_sentinel(obj: object) -> bool:
    """Returns whether an object is a sentinel: it has no state, and pickle would make a
    different object."""
    return _facts(type(obj)).has_usual_state and obj.__getstate__() is None


class PickledHow(NamedTuple):
    """Facts about a class that are needed to pickle its instances."""

    has_usual_state: bool
    notes_new: bool


_asked: Final[weakref.WeakKeyDictionary[type, PickledHow]] = weakref.WeakKeyDictionary()


def _facts(cls: type) -> PickledHow:
    if (facts := _asked.get(cls)) is None:
        facts = _asked[cls] = _ask(cls)
    return facts


def _ask(cls: Any) -> PickledHow:
    usual = cls.__reduce_ex__ is object.__reduce_ex__
    usual = usual and cls.__reduce__ is object.__reduce__
    notes = cls.__new__ is not object.__new__ and dataclasses.is_dataclass(cls)
    given = any(n in dir(cls) for n in ("__getnewargs__", "__getnewargs_ex__"))
    # A base in C has state that `object.__new__` does not make.
    python = all(base.__flags__ & HEAP_TYPE for base in cls.__mro__[:-1])
    return PickledHow(
        usual and cls.__getstate__ is object.__getstate__,
        usual and notes and python and not given,
    )


# The following functions make a class at the receiver; pickle calls them.


def make(number: str, metaclass: type, name: str, body: tuple[Any, ...]) -> type:
    """Makes a class, with empty functions, unless this process has it."""
    return _known().made(number, functools.partial(_run, metaclass, name, Body(*body)))


def make_bare(
    number: str, metaclass: type, name: str, bases: tuple[type, ...], said: Any
) -> type:
    """Makes a class without running its metaclass's code."""
    maker = functools.partial(type.__new__, metaclass, name, bases, dict(said))
    return _known().made(number, maker)


def make_enum(
    number: str,
    name: str,
    bases: tuple[type, ...],
    keywords: Mapping[str, Any],
    said: Mapping[str, Any],
    members: Mapping[str, Any],
) -> type:
    """Makes an enum from its values, without running the code that it has for making
    members."""

    def write(namespace: Any) -> None:
        for key, value in said.items():
            namespace[key] = value
        for key, value in members.items():
            # Or a function among the values would become a method.
            namespace[key] = enum.member(value)

    return _known().made(
        number,
        functools.partial(types.new_class, name, bases, dict(keywords), write),
    )


def finish(cls: type, state: Any) -> None:
    """Completes a class: fills its functions, sets attributes that differ, and
    registers it with jax."""
    functions, names, generated, subclasses, registrations = state
    # A class of this program that comes back to it is not changed.
    if not _known().is_arrived(cls):
        return
    for fn, remaining in functions:
        fill(fn, remaining)
    own = vars(cls)
    # Fields of the statement, which only the decorator removes: it does not run again.
    for name in [name for name in own if own[name].__class__ is _Field]:
        type.__delattr__(cls, name)
    for name, value in names.items():
        if own.get(name, own) is not value:
            # Past the metaclass, whose own ``__setattr__`` may refuse.
            type.__setattr__(cls, name, value)
    for name, value in generated.items():
        # What the class has already was generated for it.
        if name not in own:
            type.__setattr__(cls, name, value)
    registered: Any = cls
    for subclass in subclasses:
        registered.register(subclass)
    _register(registrations)


def finish_plain(cls: type, state: Any) -> None:
    """Completes a class as cloudpickle does, and registers it with jax."""
    finish_class, given, registrations = state
    finish_class(cls, given)
    _register(registrations)


def _register(registrations: Registrations) -> None:
    for registration in registrations:
        register(registration)


def finish_enum(cls: Any, state: Any) -> None:
    """Completes an enum: fills its functions, and sets the attributes of its
    members."""
    functions, names, attributes, registrations = state
    if not _known().is_arrived(cls):
        return
    for fn, remaining in functions:
        fill(fn, remaining)
    # They were needed only to make the members.
    for name in _PLAIN_CODE:
        if name in vars(cls) and name not in names:
            type.__delattr__(cls, name)
    for name, value in names.items():
        type.__setattr__(cls, name, value)
    for name, given in attributes.items():
        vars(cls[name]).update(given)
    _register(registrations)


def statement_of_enum(cls: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the keyword arguments of an enum's class statement, and the names that
    are needed to make its members."""
    keywords: dict[str, Any] = {"metaclass": type(cls)}
    if issubclass(cls, enum.Flag):
        keywords["boundary"] = cls._boundary_
    said: dict[str, Any] = {"__module__": cls.__module__}
    said["__qualname__"] = cls.__qualname__
    if isinstance(cls._new_member_, types.FunctionType):
        said["__new__"] = _plain_member
    if cls.__init__ is not enum.Enum.__init__:
        said["__init__"] = _plain_init
    return keywords, said


def names_of_enum(cls: type[enum.Enum]) -> dict[str, Any]:
    """Returns the attributes of an enum other than its members."""
    names = {}
    for name, value in own_names(cls).items():
        sunder = name.startswith("_") and name.endswith("_") and name[1] != "_"
        if name not in cls.__members__ and (not sunder or name in _ENUM_NAMES):
            names[name] = value
    return names


def attributes_of_members(cls: type[enum.Enum]) -> dict[str, Any]:
    """Returns the attributes of an enum's members other than their value, by name of
    the member."""
    pythons = ("_name_", "_value_", "_sort_order_", "__objclass__", "_hashable_values_")
    return {
        name: {k: v for k, v in vars(member).items() if k not in pythons}
        for name, member in cls.__members__.items()
        # An alias is the same member.
        if name == member.name
    }


def _plain_member(cls: Any, *args: Any) -> Any:
    """Makes a member of an enum from its value; used in place of the enum's
    ``__new__``."""
    data = cls._member_type_
    value = args if len(args) != 1 else args[0]
    member = object.__new__(cls) if data is object else data.__new__(cls, value)
    member._value_ = value
    return member


def _plain_init(self: Any, *args: Any) -> None:
    """Does nothing; used in place of an ``__init__`` that needs the original
    arguments."""


def _run(metaclass: type, name: str, body: Body) -> type:
    fields = {key: write_field(*value) for key, value in body.fields.items()}

    def write(namespace: Any) -> None:
        for key, value in (body.said | fields).items():
            namespace[key] = value

    keywords = {"metaclass": metaclass, **body.keywords}
    return types.new_class(name, body.bases, keywords, write)


_Field: Final = type(typing.cast("Any", write_field({}, {})))
