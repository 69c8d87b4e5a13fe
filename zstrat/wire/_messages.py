"""Messages, as plain values: their base, and the decorator that makes their classes.

The messages are the only contract between tasks of different roles. A message is a
frozen dataclass of ints, strings, bytes and arrays; `_codec` derives the layout on the
wire and the validation from the annotations, so an added field is checked, too. A field
``arrays`` travels as raw buffer frames after the header.

The messages are by subject, a file for each: of connections (`_link_messages`), of any
task and of groups (`_task_messages`), of variables, snapshots, rounds, replicas, and
closures (`_step_messages`). Numbers of kinds are part of the protocol: never reuse one
(the import fails if two are equal). Increase `PROTOCOL` with every change that an
older peer would misunderstand.
"""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    NoReturn,
    TypeVar,
    dataclass_transform,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class Message:
    """The base of all classes of messages. ``kind`` is the number with which the header
    of a message begins."""

    __slots__ = ()

    kind: ClassVar[int]


M = TypeVar("M", bound=Message)

MESSAGES: Final[dict[int, type[Message]]] = {}
"""All classes of messages by their kinds, as `message` has made them."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def message(cls: type[M]) -> type[M]:
    """Makes a class of messages: a frozen dataclass with slots.

    All messages share the same functions for construction, comparison, repr and refusal
    of changes. A dataclass compiles its own functions, which takes half a millisecond
    for each of the sixty messages in every process.
    """
    made: Any = dataclass(init=False, slots=True, eq=False, repr=False)(cls)
    made.__init__ = _init_of(made)
    made.__eq__, made.__hash__, made.__repr__ = _equal, _hash, _shown
    made.__setattr__ = made.__delattr__ = _refuse
    # By default pickle would set the slots by `setattr`, which is refused.
    made.__reduce__ = _reduced
    other = MESSAGES.get(made.kind)
    if other is not None:
        raise TypeError(
            f"zstrat.wire: {made.__name__} and {other.__name__} both have kind "
            f"{made.kind}; {max(MESSAGES) + 1} is free"
        )
    MESSAGES[made.kind] = made
    made_class: type[M] = made
    return made_class


def _init_of(cls: Any) -> Callable[..., None]:
    known = fields(cls)
    # The slots themselves: `setattr` is refused, as messages are frozen.
    puts = [getattr(cls, each.name).__set__ for each in known]
    defaults = tuple([x.default for x in known if x.default is not MISSING])
    count, needed = len(known), len(known) - len(defaults)
    if any(each.default_factory is not MISSING for each in known):
        needed = count  # fewer are put together by `_bound`

    def init(message: Any, *given: Any, **named: Any) -> None:
        if named or not needed <= len(given) <= count:
            given = _bound(cls, given, named)
        elif len(given) < count:
            given += defaults[len(given) - needed :]
        for put, value in zip(puts, given, strict=True):
            put(message, value)

    return init


def _bound(cls: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the values of all fields of a message class, in order, from positional
    (``given``) and keyword arguments."""
    values = list(given)
    for each in fields(cls)[len(given) :]:
        if each.name in named:
            values.append(named.pop(each.name))
        elif each.default is not MISSING:
            values.append(each.default)
        elif each.default_factory is not MISSING:
            values.append(each.default_factory())
        else:
            raise TypeError(f"{cls.__name__} has no value for {each.name!r}")
    if named or len(values) > len(fields(cls)):
        raise TypeError(
            f"{cls.__name__} has the fields {', '.join(cls.__match_args__)}: got "
            f"{len(given)} values and {sorted(named)}"
        )
    return tuple(values)


def _refuse(message: Any, name: str, *value: object) -> NoReturn:
    raise FrozenInstanceError(f"{type(message).__name__}.{name} cannot be changed")


def _reduced(message: Any) -> tuple[Any, ...]:
    return type(message), _values(message)


def _values(message: Any) -> tuple[Any, ...]:
    return tuple([getattr(message, name) for name in message.__match_args__])


def _equal(message: Any, other: Any) -> Any:
    if type(other) is not type(message):
        return NotImplemented
    return _compared(message) == _compared(other)


def _compared(message: Any) -> tuple[Any, ...]:
    """Returns the values of the fields that take part in comparisons of messages."""
    return tuple([getattr(message, x.name) for x in fields(message) if x.compare])


def _hash(message: Any) -> int:
    return hash(_compared(message))


def _shown(message: Any) -> str:
    names = message.__match_args__
    shown = ", ".join(f"{name}={getattr(message, name)!r}" for name in names)
    return f"{type(message).__qualname__}({shown})"
