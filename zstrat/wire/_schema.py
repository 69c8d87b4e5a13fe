"""Checks what each field of a message may hold, by functions compiled once from the
annotations.

The classes of messages are the only schema. When a message is first sent or
received, every annotation of its class becomes a *check*: a function that takes what
msgpack unpacked and returns the value of the field, or raises `Mismatch`. Nothing looks
at an annotation after that.

The values of a record or a header nearly always have the right types: one comparison of
all their types shows that, and then only nested values are checked one by one (`Row`).

A list of records is checked column by column, as one call into C returns the set of
types of a whole column: thirty completions cost three microseconds. Only when a column
is wrong are the rows checked one by one, to name the wrong row.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, get_args, get_origin, get_type_hints

import numpy as np

Check = Callable[[Any], Any]
Column = Callable[[Sequence[Any]], bool]

MAX_DEPTH: Final = 64
"""Deepest nesting of free-form data: statistics stay below ten levels, and a dict in a
step's result, which takes two levels, may be thirty deep."""

RECORDS: Final = 2**13
"""Most records of numbers alone in one list. To create so many holds up the loop for
four milliseconds, and a hostile peer might send nothing else. Senders with more records
send several messages; only a step cannot, so this bounds the variables that a step
reads or updates on one server."""

BRANCHES: Final = 2**12
"""Most records with texts, bytes or floats in one list, and most lists and maps in one
tree of plain data: to create so many takes as long as `RECORDS` of numbers."""

FEW: Final = 2**11
"""Most records in one list that themselves hold lists, maps or plain data: to create so
many takes as long as `RECORDS` of numbers."""

_NAMES: Final = {int: "an int", str: "a string", bytes: "bytes", bool: "a bool"} | {
    float: "a float"
}
_ROWS: Final = 2
"""Number of records in a list up to which it is quicker to check them one by one than
by columns."""

_PLAIN: Final = frozenset({types.NoneType, bool, int, float, str, bytes})


class Mismatch(Exception):
    """A value does not match its annotation. Containers add the position of the value
    as the error passes through them."""

    def __init__(self, expected: str, got: object) -> None:
        super().__init__(expected)
        self.expected, self.got, self.where = expected, describe(got), ""

    def inside(self, where: str) -> Mismatch:
        self.where = where + self.where
        return self


def describe(value: object) -> str:
    """Describes a value from a hostile peer in a few words: its repr may be huge or
    deep."""
    if type(value) in _PLAIN:
        text = repr(value[:40] if isinstance(value, str | bytes) else value)
        return text if len(text) <= 80 else f"{text[:80]}..."
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


class Row:
    """The checks of a fixed row of values (the fields of a record or a header), one
    check per annotation."""

    __slots__ = ("_deep", "_every", "_usual")

    def __init__(self, hints: Sequence[Any], checks: Sequence[Check]) -> None:
        self._every = list(enumerate(checks))
        self._usual = tuple(map(_usual, hints))
        self._deep = [
            (at, check) for at, check in self._every if self._usual[at] in (list, dict)
        ]

    def checks_of(self, values: list[Any]) -> list[tuple[int, Check]]:
        """Returns index and check of each value that has to be checked one by one: the
        nested values alone if all types are right, else all values."""
        return self._deep if tuple(map(type, values)) == self._usual else self._every


def _usual(hint: Any) -> type:
    """Returns the type that a valid value of the annotation has; for free-form data the
    type that it has most often."""
    if isinstance(hint, types.UnionType):
        return types.NoneType
    if hint in _NAMES:
        kind: type = hint
        return kind
    # Records and arrays arrive as lists, too.
    return dict if get_origin(hint) is dict else list


def check_for(hint: Any) -> Check:
    """Returns the function that checks a field annotated ``hint``.

    Raises:
        TypeError: Messages cannot have a field with such an annotation.
    """
    if hint in _NAMES:
        return _scalar(hint)
    if isinstance(hint, types.UnionType) and types.NoneType in get_args(hint):
        return check_tree
    if is_record(hint):
        return _record(hint)
    match get_origin(hint), get_args(hint):
        case (origin, (item,)) if origin is list:
            return _records(item) if is_record(item) else _list(item)
        case (origin, (key, item)) if origin is dict and key is str:
            return _dict(item)
    raise TypeError(f"messages cannot have a field of type {hint!r}")


def is_record(hint: Any) -> bool:
    """Returns whether ``hint`` is a NamedTuple class."""
    return isinstance(hint, type) and issubclass(hint, tuple) and hint is not tuple


def most_records(cls: type) -> int:
    """Returns how many records of a class one list may have at most."""
    hints = list(get_type_hints(cls).values())
    if all(hint is int for hint in hints):
        return RECORDS
    return BRANCHES if all(hint in _NAMES for hint in hints) else FEW


def check_tree(value: Any) -> Any:
    """Checks free-form data. The size of the header bounds the data; `BRANCHES` bounds
    the number of its lists and maps."""
    if type(value) not in _PLAIN:
        _check_branches(value)
    return value


def _check_branches(tree: Any) -> None:
    """Checks the number of lists and maps in a tree, level by level and not by
    recursion: a hostile tree may be as deep as Python's stack, and may have thousands
    of branches on each level."""
    branches, seen = [tree], 0
    for _ in range(MAX_DEPTH):
        seen += len(branches)
        if seen > BRANCHES:
            raise Mismatch(f"at most {BRANCHES} lists and maps of plain data", tree)
        below: list[Any] = []
        for branch in branches:
            if type(branch) is dict:
                _check_keys(branch)
                below += branch.values()
            elif type(branch) is list:
                below += branch
            else:
                raise Mismatch("plain data", branch)
        branches = [item for item in below if type(item) not in _PLAIN]
        if not branches:
            return
    raise Mismatch(f"plain data nested at most {MAX_DEPTH} deep", branches[0])


def _check_keys(value: dict[Any, Any]) -> None:
    if not set(map(type, value)) <= {str}:
        wrong = next(key for key in value if type(key) is not str)
        raise Mismatch("strings as keys", wrong)


def _scalar(kind: type) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not kind:  # bool is a subclass of int, and not an int here
            raise Mismatch(_NAMES[kind], value)
        return value

    return check


def _list(item: Any) -> Check:
    column, each = _column(item), check_for(item)

    def check(value: Any) -> Any:
        if type(value) is not list:
            raise Mismatch("a list", value)
        # All at once first; one by one only to say which of them is wrong.
        if not column(value):
            _each(value, each)
        return value

    return check


def _dict(item: Any) -> Check:
    each = check_for(item)

    def check(value: Any) -> Any:
        if type(value) is not dict:
            raise Mismatch("a map", value)
        _check_keys(value)
        for key, inner in value.items():
            try:
                each(inner)
            except Mismatch as wrong:
                raise wrong.inside(f"[{key[:40]!r}]") from None
        return value

    return check


def _record(cls: type) -> Check:
    """Returns the check that converts a list of values to a NamedTuple of the class."""
    hints = get_type_hints(cls)
    if any(map(is_record, hints.values())):
        raise TypeError(f"{cls.__name__}: a record inside a record is not supported")
    # `tuple.__new__`: a NamedTuple's own constructor is a function of Python.
    names, size, make = list(hints), len(hints), partial(tuple.__new__, cls)
    row = Row(list(hints.values()), list(map(check_for, hints.values())))

    def check(value: Any) -> Any:
        if type(value) is not list or len(value) != size:
            raise Mismatch(f"a list of {', '.join(names)}", value)
        for at, inner in row.checks_of(value):
            try:
                # In place: the list is msgpack's, and nobody else has it.
                value[at] = inner(value[at])
            except Mismatch as wrong:
                raise wrong.inside(f".{names[at]}") from None
        return make(value)

    return check


def _records(cls: type) -> Check:
    columns = [_column(hint) for hint in get_type_hints(cls).values()]
    each, make = _record(cls), partial(tuple.__new__, cls)
    most = most_records(cls)

    def check(value: Any) -> Any:
        if type(value) is not list:
            raise Mismatch("a list", value)
        # Before its items are looked at, which takes the time that this limits.
        if len(value) > most:
            raise Mismatch(f"a list of at most {most}", value)
        if len(value) > _ROWS and _all_right(columns, value):
            return list(map(make, value))
        return _each(value, each)

    return check


def _all_right(columns: list[Column], rows: list[Any]) -> bool:
    """Returns whether every column of the rows holds valid values. False: some value
    may be wrong, so the rows must be checked one by one."""
    # One call into C per property; a row that is wrong is looked for later.
    if set(map(type, rows)) != {list} or set(map(len, rows)) != {len(columns)}:
        return False
    for right, column in zip(columns, zip(*rows, strict=True), strict=True):
        if not right(column):
            return False
    return True


def _each(values: list[Any], check: Check) -> list[Any]:
    """Checks values one by one and returns them; the error names the index of a wrong
    value."""
    checked = []
    for place, value in enumerate(values):
        try:
            checked.append(check(value))
        except Mismatch as wrong:
            raise wrong.inside(f"[{place}]") from None
    return checked


def _column(hint: Any) -> Column:
    """Returns a quick test of all values of a column at once, which returns False if
    some may be wrong."""
    if hint in _NAMES:
        only = frozenset({hint})
    elif isinstance(hint, types.UnionType):
        only = _PLAIN
    else:
        check = check_for(hint)
        return lambda values: _passes(check, values)
    return lambda values: set(map(type, values)) <= only


def _passes(check: Check, values: Iterable[Any]) -> bool:
    try:
        for value in values:
            check(value)
    except Mismatch:
        return False
    return True


Arrays = tuple[np.ndarray, ...]


PlainTree = (
    None | bool | int | float | str | bytes | list["PlainTree"] | dict[str, "PlainTree"]
)
"""Free-form plain data, for statistics, layouts of results, details of an error."""
