"""Classes and functions that code makes arrive as they are, and that code has run.

This module is the user's: another process, which has no copy of it, gets its functions
as bytes, and they must find there what they find here. Annotations are no strings here,
because equinox reads them.
"""

import abc
import dataclasses
import enum
import functools
import json
import subprocess
import types
import typing
from typing import Any, ClassVar, Generic, NamedTuple, TypedDict, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import zstrat.program as zs

pytestmark = pytest.mark.usefixtures("programs")

T = TypeVar("T")
OFFSET = 7
MISSING = dataclasses.MISSING
CASES: dict[str, Any] = {}


def case(fn):
    """A function that must return the same on both sides."""
    CASES[fn.__name__] = fn
    return fn


LOADER = """
import json, pathlib, sys
import zstrat.program as zs
folder = pathlib.Path(sys.argv[1])
got = {}
for path in folder.glob("*.code"):
    try:
        got[path.stem] = repr(zs.load(path.read_bytes())())
    except Exception as error:
        got[path.stem] = f"{type(error).__name__}: {error}"
assert "test_program_classes" not in sys.modules
json.dump(got, sys.stdout)
"""


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """What the cases return in another process."""
    folder = tmp_path_factory.mktemp("shipped")
    for name, fn in CASES.items():
        (folder / f"{name}.code").write_bytes(zs.dump_code(fn))
    command = ["-c", LOADER, str(folder)]
    ran = programs.run(command, cwd="/", stdout=subprocess.PIPE, check=True)
    return json.loads(ran.stdout)


def shapes(tree):
    return [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


# Classes of equinox


class Affine(eqx.Module):
    scale: eqx.AbstractVar[float]

    @abc.abstractmethod
    def inner(self, x): ...

    def __call__(self, x):
        return self.inner(x) * self.scale + OFFSET


class Unit(Affine, strict=True):
    weight: jax.Array
    scale: float = eqx.field(static=True, default=2.0)
    act: Any = eqx.field(static=True, default=jax.nn.relu, repr=False)
    more: list = eqx.field(default_factory=list)
    bias: jax.Array = eqx.field(converter=jnp.asarray, default=1)

    def inner(self, x):
        return self.act(self.weight * x) + self.bias


class Net(eqx.Module):
    units: list[Unit]
    head: eqx.nn.Linear

    def __init__(self, key):
        self.units = [Unit(jnp.arange(3.0)), Unit(jnp.ones(3), scale=0.5)]
        self.head = eqx.nn.Linear(3, 2, key=key)

    def __check_init__(self):
        if not self.units:
            raise ValueError("no units")

    def __call__(self, x):
        for unit in self.units:
            x = unit(x)
        return self.head(x)

    def again(self):
        return type(self) is Net and Net(jax.random.key(1))


class Box(eqx.Module, Generic[T]):
    value: T


NET = Net(jax.random.key(0))
X = np.arange(3, dtype=np.float32)
BOUND = NET.units[0].__call__
STRUCTURE = jax.tree.structure(Box(1))


@case
def a_model_computes_and_is_made():
    return NET(X).tolist(), NET.again()(X).tolist(), BOUND(X).tolist()


@dataclasses.dataclass
class Doubled:
    """What it computes for itself is no field of the pytree that it is."""

    x: Any
    twice: Any = dataclasses.field(init=False)

    def __post_init__(self):
        self.twice = 2 * self.x


jax.tree_util.register_dataclass(Doubled, data_fields=["x"], meta_fields=[])


@case
def a_dataclass_computes_for_itself():
    leaves, structure = jax.tree.flatten(Doubled(3))
    return leaves, jax.tree.unflatten(structure, [5]).twice


@case
def a_model_is_the_same_pytree():
    gradient = eqx.filter_grad(lambda net: net(X).sum())(NET)
    shifted = eqx.tree_at(lambda net: net.units[0].weight, NET, jnp.zeros(3))
    paths = jax.tree_util.tree_flatten_with_path(eqx.filter(NET, eqx.is_array))[0]
    kinds = [jax.tree_util.keystr(path) for path, _ in paths]
    return shapes(gradient), shifted(X).tolist(), kinds, NET.units[0].act is jax.nn.relu


@case
def fields_of_a_model_are_as_written():
    return [
        (f.name, sorted(f.metadata), f.default is MISSING, f.default_factory is list)
        for f in dataclasses.fields(Unit)
    ]


@case
def models_refuse_what_they_refused():
    words = []
    for attempt in (
        lambda: Affine(),
        lambda: Net.__setattr__(NET, "head", 1),
        lambda: Unit(),
    ):
        try:
            words.append(attempt())
        except Exception as error:  # its words are the result
            words.append(f"{type(error).__name__}: {error}")
    return words


@case
def generic_models_and_structures():
    return Box[int](3).value, jax.tree.unflatten(STRUCTURE, [5]) == Box(5)


# Classes of a metaclass, of a base, of Python's library


class Declared(type):
    made: ClassVar[dict] = {}

    def __new__(cls, name, bases, namespace, tag="none"):
        sizes = {k: v for k, v in namespace.items() if isinstance(v, int)}
        kept = {k: v for k, v in namespace.items() if k not in sizes}
        for key, value in kept.items():
            if isinstance(value, types.FunctionType):
                kept[key] = twice(value)
        made = super().__new__(cls, name, bases, kept)
        made.sizes, made.tag = sizes, tag
        cls.made[name] = made
        return made

    def __init__(cls, name, bases, namespace, **keywords):
        super().__init__(name, bases, namespace)


def twice(fn):
    @functools.wraps(fn)
    def inner(*args):
        return 2 * fn(*args)

    return inner


class Table(metaclass=Declared, tag="table"):
    width = 3

    def area(self):
        return Table.sizes["width"] * OFFSET


class Layer:
    registry: ClassVar[dict] = {}

    def __init_subclass__(cls, key, **keywords):
        super().__init_subclass__(**keywords)
        Layer.registry[key] = cls


class Relu(Layer, key="relu"):
    def __call__(self, x):
        return max(x, 0) + OFFSET


class Parent:
    children: tuple = ()


class Child(Parent):
    pass


Parent.children = (Child,)


@case
def code_of_metaclasses_and_bases_has_run_once():
    found = Layer.registry["relu"]
    return (
        (Table().area(), Table.tag, Table.sizes, list(Declared.made)),
        (found is Relu, found()(-1), list(Layer.registry)),
        Parent.children[0] is Child,
    )


class Planet(enum.Enum):
    EARTH = (6.0, 2.0)
    MARS = (4.0, 1.0)

    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius

    @property
    def gravity(self):
        return self.mass / self.radius * OFFSET


class Right(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()
    ALL = READ | WRITE


class Labelled(int, enum.Enum):
    ONE = (1, "one")
    TWO = (2, "two")

    def __new__(cls, value, label):
        made = int.__new__(cls, value)
        made._value_, made.label = value, label
        return made


class Mode(enum.StrEnum):
    LOW = enum.auto()

    @classmethod
    def _missing_(cls, value):
        return cls.LOW


@case
def enums():
    return (
        (Planet.EARTH.gravity, Planet((4.0, 1.0)).name, Planet.MARS in Planet),
        (Right.READ | Right.WRITE is Right.ALL, Right.ALL.name, ~Right.READ),
        (Labelled(2).label, Labelled.ONE + 1, Mode("?") == "low", list(Mode)),
        (list(Right), list(Right.__members__)),
    )


class Pair(NamedTuple):
    x: int
    y: int = 2

    def total(self):
        return self.x + self.y + Pair(1).x


class Options(TypedDict, total=False):
    rate: float


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Slotted:
    a: int
    b: list = dataclasses.field(default_factory=list, compare=False)


@dataclasses.dataclass(order=True)
class Config:
    rate: float
    seed: dataclasses.InitVar[int] = 3

    def __post_init__(self, seed):
        self.made = seed


class Private:
    __slots__ = ("__hidden",)

    def __init__(self):
        self.__hidden = 5

    def shown(self):
        return self.__hidden


@case
def plain_classes():
    later = dataclasses.make_dataclass("Later", ["x"], bases=(Config,), kw_only=True)
    return (
        (Pair(3).total(), Pair(1)._replace(x=4), jax.tree.leaves(Pair(1))),
        (Options(rate=1.0), Options.__total__, Options.__optional_keys__),
        (Slotted(a=1), Slotted(a=1, b=[2]) == Slotted(a=1), Slotted.__slots__),
        (hasattr(Slotted(a=1), "__dict__"), hasattr(Private(), "__dict__")),
        (Private().shown(), Config(1) < Config(2), Config(1).made),
        (
            later(x=1, rate=2.0),
            [f.default is MISSING for f in dataclasses.fields(later)],
        ),
    )


@typing.runtime_checkable
class Runs(typing.Protocol):
    def run(self) -> int: ...


class Duck:
    def run(self):
        return __class__.__name__


class Shape(abc.ABC):
    @property
    @abc.abstractmethod
    def area(self): ...


class Square(Shape):
    area = 4


@Shape.register
class Virtual:
    pass


class Holder(Generic[T]):
    pass


class Numbers(Holder[int]):
    pass


@case
def protocols_and_abstract_classes():
    try:
        Shape()
    except TypeError as error:
        refused = str(error)
    return (
        (isinstance(Duck(), Runs), isinstance(3, Runs), Duck().run()),
        (refused, Square().area, issubclass(Virtual, Shape)),
        (Numbers.__orig_bases__ == (Holder[int],), Holder.__parameters__ == (T,)),
    )


def local():
    class One(eqx.Module):
        x: int = 3

        def other(self):
            return Two(self)

    class Two(eqx.Module):
        one: One

        def get(self):
            return self.one.x + OFFSET

    return lambda: One().other().get()


@case
def local_classes_that_know_each_other(get=local()):  # noqa: B008
    return get()


# Functions that Python's library makes


@functools.cache
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


@functools.lru_cache(maxsize=3, typed=True)
def bounded(n):
    return n + OFFSET


@functools.singledispatch
def show(x):
    return f"object {OFFSET}"


@show.register
def _(x: int):
    return f"int {mine(x)}"


@show.register(Config)
def _(x):
    return show(int(x.rate))


def mine(x):
    return x + OFFSET


@functools.wraps(fib)
def wrapped(n):
    return fib(n) + 1


class Methods:
    k = 3

    @functools.singledispatchmethod
    def kind(self, x):
        return "object"

    @kind.register
    def _(self, x: int):
        return x + self.k

    @functools.cached_property
    def slow(self):
        return self.k * OFFSET

    @functools.cache  # noqa: B019
    def kept(self, n):
        return n + self.k


@case
def functions_of_the_library():
    methods = Methods()
    return (
        (fib(20), fib.cache_info().hits, bounded(1), bounded.cache_parameters()),
        (show(2.5), show(1), show(Config(4.0)), show.__name__),
        (wrapped(5), wrapped.__wrapped__(5), wrapped.__name__),
        (methods.kind(1), methods.kind("x"), methods.slow, methods.kept(2)),
    )


@pytest.mark.parametrize("name", CASES)
def test_shipped_classes_behave_as_the_originals(there, name):
    fib.cache_clear()
    assert there[name] == repr(CASES[name]())


# What comes back, and what does not travel


def test_a_class_that_returns_is_the_original():
    method = Net.__call__
    (net,), config = zs.load(*zs.dump(([NET], Config)))
    assert (type(net), config) == (Net, Config)
    assert Net.__call__ is method
    with pytest.raises(dataclasses.FrozenInstanceError):
        net.head = 1
