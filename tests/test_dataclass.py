"""A class of `zstrat.dataclass` beside the same one of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from zstrat.dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

MAKERS = {"ours": dataclass, "python": dataclasses.dataclass}
OPTIONS = [
    dict(zip(("frozen", "slots", "eq", "repr"), chosen, strict=True))
    for chosen in itertools.product((False, True), repeat=4)
]


def point(make: Callable[..., Any], **options: bool) -> Any:
    class Point:
        """With every kind of field."""

        x: float
        label: str = "none"
        hidden: int = dataclasses.field(default=7, compare=False, repr=False)
        notes: list[str] = dataclasses.field(default_factory=list)
        squared: float = dataclasses.field(init=False)
        made: list[int] = dataclasses.field(init=False, default_factory=list)
        count: int = dataclasses.field(init=False, default=3)

        def __post_init__(self) -> None:
            object.__setattr__(self, "squared", self.x**2)

    return make(**options)(Point)


def outcome(call: Callable[[], object]) -> object:
    """What comes back, or the type of the error and, of ours too, all that it says."""
    try:
        return call()
    except dataclasses.FrozenInstanceError as error:
        return type(error)
    except (TypeError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_class_is_what_the_standard_library_makes_of_it(
    options: dict[str, bool],
) -> None:
    told = {name: told_of(point(make, **options)) for name, make in MAKERS.items()}
    assert told["ours"] == told["python"]


def told_of(cls: Any) -> list[object]:
    one, same, other = cls(2.0), cls(x=2.0, hidden=1), cls(3.0, notes=["a"])
    is_shown = cls.__repr__ is not object.__repr__
    return [
        [repr(each) for each in (one, other) if is_shown],
        one == same,
        one == other,
        one != same,
        one == 2.0,
        cls.__hash__ is None,
        cls.__match_args__,
        getattr(cls, "__slots__", None),
        cls.__doc__,
        list(inspect.signature(cls).parameters),
        [p.default for p in inspect.signature(cls).parameters.values()][:3],
        dataclasses.asdict(other),
        dataclasses.asdict(dataclasses.replace(one, label="new")),
        outcome(lambda: dataclasses.replace(one, count=4)),
        dataclasses.asdict(copy.deepcopy(other)),
        one.notes is same.notes,
        outcome(lambda: setattr(one, "x", 1.0)),
        outcome(lambda: delattr(one, "x")),
        outcome(cls),
        outcome(lambda: cls(1.0, wrong=2)),
        [(f.name, f.init, f.compare, f.type) for f in dataclasses.fields(cls)],
    ]


@dataclass(frozen=True, slots=True)
class Pair:
    left: object
    right: object = None


@dataclass(frozen=True, slots=True)
class Triple(Pair):
    third: object = 3


@dataclass(frozen=True)
class Nothing:
    pass


@dataclass(frozen=True)
class One:
    value: object


class Named(One):
    """Has a name that may change."""

    name: str


@dataclass(slots=True)
class Own:
    """What its author has written stays."""

    value: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    def __hash__(self) -> int:
        return 5

    def __repr__(self) -> str:
        return "own"


@dataclass(frozen=True, slots=True)
class EqualByName:
    """Its author compares, and leaves the hash to us."""

    name: str
    at: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EqualByName) and other.name == self.name


def test_equal_values_are_equal_keys() -> None:
    found = {Pair(1, "a"): "pair", Triple(1, "a"): "triple", One(1): "one"}
    assert found[Pair(1, "a")] == "pair"
    assert found[Triple(1, "a", 3)] == "triple"
    assert found[One(1)] == "one"
    assert Nothing() == Nothing()
    assert hash(Nothing()) == hash(Nothing())
    assert Pair(1) != Triple(1)
    assert hash(EqualByName("a", 1)) != hash(EqualByName("a", 2))
    nan = float("nan")
    assert One(nan) == One(nan)
    assert Pair(nan, 1) == Pair(nan, 1)


def test_pickles_and_copies_are_equal() -> None:
    for value in (Pair(1, [2]), Triple(1, 2, 3), Nothing(), One((1, 2))):
        for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
            assert again == value
            assert type(again) is type(value)


def test_a_class_that_is_derived_may_have_more() -> None:
    named = Named(1)
    named.name = "a"
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"Named\.value stays"):
        named.value = 2  # type: ignore[misc]
    del named.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        Pair(1).new = 2  # type: ignore[attr-defined]


def test_what_an_author_has_written_stays() -> None:
    assert Own(1) == Own(2)
    assert hash(Own(1)) == 5
    assert repr(Own(1)) == "own"


def test_a_value_that_holds_itself_is_shown() -> None:
    held: list[object] = []
    held.append(One(held))
    assert repr(held) == "[One(value=[...])]"
    own = One([])
    own.value.append(own)  # type: ignore[attr-defined]
    assert repr(own) == "One(value=[...])"


def test_patterns_take_it_apart() -> None:
    match Triple(1, 2):
        case Pair(1, right):
            assert right == 2
        case _:
            pytest.fail("no match")


def test_fields_by_name_alone_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Late\.value is given by its name alone"):

        @dataclass(frozen=True, kw_only=True)
        class Late:
            value: int


def test_fields_without_a_default_come_first() -> None:
    with pytest.raises((TypeError, SyntaxError), match="default"):

        @dataclass(frozen=True)
        class Wrong:
            first: int = 1
            second: int  # type: ignore[misc]
