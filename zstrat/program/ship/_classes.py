"""The user's classes, made again where they arrive, by running their metaclass.

A metaclass, or a base's ``__init_subclass__``, may do work that nobody sees in the
class: register it with jax, note its fields. So a class is not filled into a blank one.
Its statement (`_bodies`) is run again, with empty functions (`_functions`), because
functions refer to the class. Then functions are filled, and what differs from the
original is set: the original is the truth, whatever the code did on its second run.
Last, a class that is a pytree is registered with jax: objects that arrive after it, as
handles that hold a tree of it, may flatten theirs at once.

A class travels with a number of its own and is made once per process, however often it
arrives. A class that comes home is the one that left, untouched; one that arrives again
gets what has changed.
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

from ._bodies import Body, body_of, is_bare, own_names, write_field
from ._functions import fill, inner_functions
from ._pytrees import HEAP_TYPE, Registration, register

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
    """Classes that left this process, and those that arrived in it, by number."""

    def __init__(self) -> None:
        # Held by nobody here: a class of a step that is forgotten is freed with it.
        self._numbers: weakref.WeakKeyDictionary[type, str]
        self._numbers = weakref.WeakKeyDictionary()
        self._classes: weakref.WeakValueDictionary[str, type]
        self._classes = weakref.WeakValueDictionary()
        self._arrived: weakref.WeakSet[type] = weakref.WeakSet()
        # Again by the same thread: to make a class runs its code, which may unpickle
        # others.
        self._lock = threading.RLock()

    def number(self, cls: type) -> str:
        with self._lock:
            # A number for good, not the name: two classes of a notebook's cell that was
            # run twice are different ones.
            if (number := self._numbers.get(cls)) is None:
                number = uuid.uuid4().hex
                self._remember(number, cls)
            return number

    def made(self, number: str, make: functools.partial[type]) -> type:
        """The class of that number, which is made if it is not here."""
        with self._lock:
            if (found := self._classes.get(number)) is None:
                found = make()
                self._remember(number, found)
                self._arrived.add(found)
            return found

    def is_arrived(self, cls: type) -> bool:
        """Whether it was made here, and is not one of the program's own."""
        with self._lock:
            return cls in self._arrived

    def reference(self, cls: type) -> list[str]:
        """The number of a class that left or arrived ("" for any other), its module
        and its name there."""
        with self._lock:
            return [self._numbers.get(cls, ""), cls.__module__, cls.__qualname__]

    def referenced(self, number: str, module: str, name: str) -> type:
        """The class of which another task has such a reference.

        Raises:
            TypeError: It is not here.
        """
        with self._lock:
            found: Any = self._classes.get(number)
        if found is None:
            # Nothing is imported: another task must not decide which code runs here.
            found = sys.modules.get(module)
            for part in name.split("."):
                found = getattr(found, part, None)
        if not isinstance(found, type):
            raise TypeError(
                f"an element or result has a {name} in it, a class of the module "
                f"{module} of the worker, which this program does not have: define the "
                "class outside of the dataset or step function, or import its module "
                "in the program, too"
            )
        return found

    def trusting(self, classes: Sequence[type]) -> KnownClasses:
        """Others that know nothing but these, as their own."""
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
    """What names the class to a task that has it, too; of plain strings."""
    return known.reference(cls)


def referenced_class(reference: Sequence[Any]) -> type:
    """The class here that `class_reference` has named in another task.

    Raises:
        TypeError: It is not here.
    """
    match reference:
        case [str(number), str(module), str(name)]:
            return known.referenced(number, module, name)
    raise TypeError(f"this is no reference to a class: {reference!r:.200}")


@contextmanager
def arriving_at(classes: KnownClasses) -> Iterator[None]:
    """What this thread unpickles inside is known there alone."""
    _of_thread.classes = classes
    try:
        yield
    finally:
        del _of_thread.classes


def _known() -> KnownClasses:
    return getattr(_of_thread, "classes", known)


def functions_of(cls: type) -> list[types.FunctionType]:
    """The functions that the class consists of."""
    found = own_names(cls).values()
    return [fn for value in found for fn in inner_functions(value)]


# What pickle needs of a class.

Filled = Sequence[tuple[types.FunctionType, Any]]
"""Functions of a class and what they are filled with."""


Registrations = Sequence[Registration]
"""That of a class with jax, if it has one."""


def reduced_plain(reduced: tuple[Any, ...], registrations: Registrations) -> Any:
    """A class that cloudpickle has reduced, and that is a pytree."""
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
    """A class that is no enum.

    Args:
        virtual: Its virtual subclasses (`abc.ABCMeta.register`).
        late: Attributes that may refer to the class are not in its body.
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
    """How an enum is pickled."""
    keywords, said = statement_of_enum(cls)
    members = {name: member.value for name, member in cls.__members__.items()}
    arguments = (cls.__name__, cls.__bases__, keywords, said, members)
    names, attributes = names_of_enum(cls), attributes_of_members(cls)
    state = filled, names, attributes, registrations
    return make_enum, (known.number(cls), *arguments), state, None, None, finish_enum


def reduced_instance(obj: Any) -> Any:
    """An instance of a dataclass with a ``__new__`` that notes each new object.

    equinox keeps objects there until its metaclass says that they are made. Objects
    that arrive are made already. None for any other, which pickle knows to make.
    """
    if not _facts(type(obj)).notes_new:
        return None
    return object.__new__, (type(obj),), obj.__getstate__()


def is_sentinel(obj: object) -> bool:
    """Whether it has no state, and pickle would make another one of its class."""
    return _facts(type(obj)).has_usual_state and obj.__getstate__() is None


class PickledHow(NamedTuple):
    """What pickling an instance asks of its class."""

    has_usual_state: bool
    notes_new: bool


_asked: Final[weakref.WeakKeyDictionary[type, PickledHow]] = weakref.WeakKeyDictionary()


def _facts(cls: type) -> PickledHow:
    if (found := _asked.get(cls)) is None:
        found = _asked[cls] = _ask(cls)
    return found


def _ask(cls: Any) -> PickledHow:
    usual = cls.__reduce_ex__ is object.__reduce_ex__
    usual = usual and cls.__reduce__ is object.__reduce__
    notes = cls.__new__ is not object.__new__ and dataclasses.is_dataclass(cls)
    given = any(n in dir(cls) for n in ("__getnewargs__", "__getnewargs_ex__"))
    # A base in C keeps a state that `object.__new__` would not make.
    python = all(base.__flags__ & HEAP_TYPE for base in cls.__mro__[:-1])
    return PickledHow(
        usual and cls.__getstate__ is object.__getstate__,
        usual and notes and python and not given,
    )


# How a class is made where it arrives: these are called by pickle.


def make(number: str, metaclass: type, name: str, body: tuple[Any, ...]) -> type:
    """Makes a class unless it is here. Its functions are not filled yet."""
    return _known().made(number, functools.partial(_run, metaclass, name, Body(*body)))


def make_bare(
    number: str, metaclass: type, name: str, bases: tuple[type, ...], said: Any
) -> type:
    """Makes a class without its metaclass' code."""
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
    """Makes an enum of its values. Code of its own does not run for its members."""

    def write(namespace: Any) -> None:
        for key, value in said.items():
            namespace[key] = value
        for key, value in members.items():
            namespace[key] = enum.member(value)

    return _known().made(
        number,
        functools.partial(types.new_class, name, bases, dict(keywords), write),
    )


def finish(cls: type, state: Any) -> None:
    """Fills the functions, sets what differs, and registers the class with jax."""
    functions, names, generated, subclasses, registrations = state
    if not _known().is_arrived(cls):
        return
    for fn, remaining in functions:
        fill(fn, remaining)
    own = vars(cls)
    for name in [name for name in own if own[name].__class__ is _Field]:
        type.__delattr__(cls, name)
    for name, value in names.items():
        if own.get(name, own) is not value:
            type.__setattr__(cls, name, value)
    for name, value in generated.items():
        if name not in own:
            type.__setattr__(cls, name, value)
    registered: Any = cls
    for subclass in subclasses:
        registered.register(subclass)
    _register(registrations)


def finish_plain(cls: type, state: Any) -> None:
    """Fills a class as cloudpickle does, and registers it with jax."""
    finish_class, given, registrations = state
    finish_class(cls, given)
    _register(registrations)


def _register(registrations: Registrations) -> None:
    for registration in registrations:
        register(registration)


def finish_enum(cls: Any, state: Any) -> None:
    """Fills the functions, and gives members what their own code gave them."""
    functions, names, attributes, registrations = state
    if not _known().is_arrived(cls):
        return
    for fn, remaining in functions:
        fill(fn, remaining)
    for name in _PLAIN_CODE:
        if name in vars(cls) and name not in names:
            type.__delattr__(cls, name)
    for name, value in names.items():
        type.__setattr__(cls, name, value)
    for name, given in attributes.items():
        vars(cls[name]).update(given)
    _register(registrations)


def statement_of_enum(cls: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of an enum, and names that it needs while its members are made."""
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
    """What an enum has besides its members."""
    names = {}
    for name, value in own_names(cls).items():
        sunder = name.startswith("_") and name.endswith("_") and name[1] != "_"
        if name not in cls.__members__ and (not sunder or name in _ENUM_NAMES):
            names[name] = value
    return names


def attributes_of_members(cls: type[enum.Enum]) -> dict[str, Any]:
    """What members have besides their value, by their names."""
    pythons = ("_name_", "_value_", "_sort_order_", "__objclass__", "_hashable_values_")
    return {
        name: {k: v for k, v in vars(member).items() if k not in pythons}
        for name, member in cls.__members__.items()
        if name == member.name
    }


def _plain_member(cls: Any, *args: Any) -> Any:
    """A member made of its value, for `enum`."""
    data = cls._member_type_
    value = args if len(args) != 1 else args[0]
    member = object.__new__(cls) if data is object else data.__new__(cls, value)
    member._value_ = value
    return member


def _plain_init(self: Any, *args: Any) -> None:
    """Stands for code that would ask for what the value was made of."""


def _run(metaclass: type, name: str, body: Body) -> type:
    fields = {key: write_field(*value) for key, value in body.fields.items()}

    def write(namespace: Any) -> None:
        for key, value in (body.said | fields).items():
            namespace[key] = value

    keywords = {"metaclass": metaclass, **body.keywords}
    return types.new_class(name, body.bases, keywords, write)


_Field: Final = type(typing.cast("Any", write_field({}, {})))
