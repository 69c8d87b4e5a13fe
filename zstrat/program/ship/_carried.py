"""What is sent together with a step, and the trial load before a step is sent.

A coordinator ships scope, settings of jax, values and arrays with a step. It traces a
step in its strategy's scope, and a worker must trace the body with the same result of
``get_strategy()``. A worker has entered no scope, so the body enters the strategy's
scope itself (`ScopedBody`). It also sets the program's settings of jax that change
results: random numbers, and the precision of matrix products.

Arrays among the arguments of a call are sent at each schedule, outside of the pickled
call. The call is traced, pickled and shipped once, with an `Input` in place of each
array, and each closure has the bytes of its own arrays. So a step that gets another
batch each time costs as much as one without arguments, except for these bytes. This
holds for arrays inside of tuples, lists and dicts; a call with other containers is
pickled whole.

`try_out` pickles and loads an object as a worker would, with new classes; arrays are
not copied. Each class is tried once, which runs its code once more here.

Only after a failure does `unpicklable` search the path to the part that cannot be
pickled. The search may be slow: it tries each part by itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import types
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from zstrat.variables import downcast_loss, is_weak, recorder

from ._classes import arriving_at, known
from ._pickler import WIDE, NotLoaded, NotShippable, Pickler, TrialUnpickler, Ways

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from contextlib import AbstractContextManager

    Buffer = bytes | memoryview


class Scoping(Protocol):
    """A strategy; on a worker it is unpickled as the worker's substitute for the
    strategy."""

    def scope(self) -> AbstractContextManager[object]: ...


@final
@dataclass(frozen=True)
class CarriedValues:
    """Values that variables of the coordinator's process had when a step was scheduled.

    They are the first argument of the shipped step, by key of the variable, and are
    traced as any argument.
    """

    keys: tuple[int, ...]
    values: tuple[Any, ...]

    def give(self) -> None:
        """Passes the values to the recorder of the step that is being traced."""
        current = recorder.get()
        assert current is not None
        current.take_values(dict(zip(self.keys, self.values, strict=True)))


register_dataclass(CarriedValues, data_fields=["values"], meta_fields=["keys"])


_SETTINGS: Final[dict[str, tuple[Any, Any]]] = {
    "jax_default_prng_impl": (jax.default_prng_impl, "threefry2x32"),
    "jax_threefry_partitionable": (jax.threefry_partitionable, True),
    "jax_default_matmul_precision": (jax.default_matmul_precision, None),
}
"""Settings of jax that change results: for each, its context manager and its default. A
default leaves the worker's own setting, from its environment say."""

_settings: Final = operator.attrgetter("jax_enable_x64", *_SETTINGS)


def jax_settings() -> tuple[Any, ...]:
    """Reads this thread's settings of jax that change results. Called at each
    schedule."""
    settings: tuple[Any, ...] = _settings(jax.config)
    return settings


def _enter(settings: tuple[Any, ...], entered: contextlib.ExitStack) -> None:
    """Sets the settings of jax on this thread, until ``entered`` is closed.

    Raises:
        RuntimeError: The setting is 64 bits, which a worker's process must have from
            its start.
    """
    is_wide, *others = settings
    if is_wide and not _settings(jax.config)[0]:
        raise RuntimeError(
            "the program computes with 64 bits (jax_enable_x64), and this worker with "
            "32: start all workers with JAX_ENABLE_X64=1"
        )
    for value, (context, default) in zip(others, _SETTINGS.values(), strict=True):
        if value != default:
            entered.enter_context(context(value))


@final
class ScopedBody:
    """The body of a shipped step: calls ``step`` in the scope of ``strategy``, with the
    values that were sent with it, and with the program's settings of jax."""

    __slots__ = ("settings", "step", "strategy")

    def __init__(
        self, step: Callable[..., Any], strategy: Scoping, settings: tuple[Any, ...]
    ) -> None:
        self.step, self.strategy, self.settings = step, strategy, settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], CarriedValues):
            args[0].give()
            args = args[1:]
        with contextlib.ExitStack() as entered:
            _enter(self.settings, entered)
            entered.enter_context(self.strategy.scope())
            return self.step(*args, **kwargs)

    def __reduce__(self) -> Any:
        return ScopedBody, (self.step, self.strategy, self.settings)


BESIDE: Final = 64 * 1024
"""An array, or the inputs of a closure, of at least this many bytes is sent in a
separate frame; smaller ones are cheaper to copy."""

_NUMBERS: Final = frozenset("biufc")


@final
class Input(NamedTuple):
    """The place of an array in pickled arguments, and where its bytes are. ``kind`` is
    the type of the array: `numpy.ndarray`, `jax.Array`, or `numpy.generic` for a scalar
    of numpy."""

    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    kind: type

    def taken(self, inputs: Buffer) -> Any:
        """Reads the array from the bytes of the inputs: a copy, or a read-only view if
        it has `BESIDE` bytes or more."""
        count = math.prod(self.shape)
        array = np.frombuffer(inputs, self.dtype, count, self.start)
        if self.kind is np.generic:
            return array[0]
        array = array.reshape(self.shape)
        # A view keeps the whole message alive: not for a few bytes.
        if array.nbytes < BESIDE or not array.flags.aligned:
            array = array.copy()
        return jnp.asarray(array) if self.kind is jax.Array else array


def input_key(value: Any) -> Hashable | None:
    """Returns a key that is equal for arrays that can replace each other in a shipped
    call; None if the value is not an array of plain numbers."""
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return _key_of_jax_array(value) if isinstance(value, jax.Array) else None
    # Without bytes there is nothing to send, so it stays in the call.
    dtype = value.dtype
    if dtype.kind not in _NUMBERS or not dtype.isnative or not value.nbytes:
        return None
    return type(value), dtype, value.shape


def _key_of_jax_array(value: jax.Array) -> Hashable | None:
    """Returns the key of a jax array (see `input_key`). None for tracers, random keys,
    weak types, 64 bits, and arrays that are donated or not addressable, which the trace
    and the pickler handle."""
    if isinstance(value, jax.core.Tracer) or is_weak(value):
        return None
    dtype = value.dtype
    if not isinstance(dtype, np.dtype) or dtype.kind not in _NUMBERS or not value.size:
        return None
    # The pickler keeps 64 bits; of the others the trace says what is wrong.
    if dtype.name in WIDE or value.is_deleted() or not value.is_fully_addressable:
        return None
    return jax.Array, dtype, value.shape


def loses_bits(array: Any) -> bool:
    """Returns whether a downcast by jax would change one of the array's integers."""
    if array.dtype.itemsize < 8 or array.dtype.kind not in "iu":
        return False
    return downcast_loss(array) is not None


def bytes_of_inputs(inputs: list[Any]) -> bytes:
    """Joins the bytes of all arrays, each in C order."""
    return b"".join(
        [
            # Of a small array a copy is faster than the call.
            np.asarray(array).tobytes()
            if array.nbytes < BESIDE
            else np.ascontiguousarray(array).data
            for array in inputs
        ]
    )


def cut_inputs(value: Any, count: list[int]) -> Any:
    """Replaces each array of an argument by an `Input`.

    Args:
        count: A list of one number, the bytes of the inputs so far; the number is
            increased.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([cut_inputs(item, count) for item in value])
    if kind is dict:
        return {name: cut_inputs(item, count) for name, item in value.items()}
    if input_key(value) is None:
        return value
    start = count[0]
    count[0] += value.nbytes
    kinds = np.ndarray, np.generic, jax.Array
    kind = next(kind for kind in kinds if isinstance(value, kind))
    return Input(start, value.dtype, value.shape, kind)


def fill_inputs(value: Any, inputs: Buffer) -> Any:
    """Replaces each `Input` by its array from these bytes; inverse of `cut_inputs`."""
    kind = type(value)
    if kind is Input:
        return value.taken(inputs)
    if kind is tuple or kind is list:
        return kind([fill_inputs(item, inputs) for item in value])
    if kind is dict:
        return {name: fill_inputs(item, inputs) for name, item in value.items()}
    return value


MAX_COMPARED_OBJECTS: Final = 1000
"""Most objects to compare after a trial load; only the first ones are compared."""

tried: Final[weakref.WeakSet[type]] = weakref.WeakSet()
"""Classes that a trial load has shown to arrive complete; the pickler's lock guards the
set."""


def try_out(obj: object, ways: Ways) -> None:
    """Loads an object in this process as a worker would, with new classes.

    Raises:
        NotShippable: The object cannot be loaded, or changes.
    """
    # Arrays and handles are not copied for a trial.
    kept: list[Any] = []
    with Pickler.session(None, ways, kept) as (pickler, stream):
        # In this order: pickling the object finds the instances.
        pickler.dump((obj, pickler.instances))
    stream.seek(0)
    try:
        # As on a worker: each class that has not arrived whole before is made once
        # more.
        with arriving_at(known.trusting(list(tried))):
            _, arrived = TrialUnpickler(stream, kept, ways).load()
    except Exception as error:  # user code runs in it: `find_way` says where
        raise NotLoaded from error
    if change := difference(pickler.instances, arrived):
        raise NotShippable(*change)
    # Only now: a class that failed is tried again the next time.
    tried.update(pickler.made)


def difference(sent: Sequence[Any], arrived: Sequence[Any]) -> tuple[Any, str] | None:
    """Finds the first object that is a different pytree after loading; returns it and a
    description of the difference, or None.

    Args:
        sent: Objects of the user's classes.
        arrived: The loaded objects, in the same order.
    """
    seen: set[int] = set()
    for before, after in zip(
        sent[:MAX_COMPARED_OBJECTS], arrived[:MAX_COMPARED_OBJECTS], strict=True
    ):
        if id(before) not in seen and (words := _differs(before, after, seen)):
            return before, words
    return None


def _differs(before: Any, after: Any, seen: set[int]) -> str:
    # As ``is_leaf`` jax calls it for each node, so objects inside are not compared
    # again.
    def note(node: Any) -> bool:
        seen.add(id(node))
        return False

    try:
        here = _leaves(before, note)
    except Exception:  # its own flatten refuses this object: not a pytree here
        return ""
    try:
        there = _leaves(after)
    except Exception as error:  # it goes to the user, as a difference
        return f"it cannot be flattened there ({error})"
    if [path for path, _ in here] != [path for path, _ in there]:
        return f"it has the leaves {_paths(here)} here and {_paths(there)} there"
    for (path, one), (_, other) in zip(here, there, strict=True):
        if (one is before) != (other is after):
            return "jax knows its class as a pytree only on one side"
        if one is not before and type(one).__qualname__ != type(other).__qualname__:
            return (
                f"{path} is a {type(one).__name__} here, a {type(other).__name__} there"
            )
    return ""


def _leaves(tree: Any, note: Any = None) -> list[tuple[str, Any]]:
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=note)[0]
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in paths]


def _paths(leaves: list[tuple[str, Any]]) -> str:
    names = [path or "itself" for path, _ in leaves[:8]]
    return f"{', '.join(names)}{', ...' if len(leaves) > 8 else ''}" or "(none)"


_CLASS: Final = "its class"
MAX_DEPTH: Final = 16
"""Limit of the depth of a search: longer paths would not help the user."""
MAX_PARTS: Final = 10_000
"""Limit of the number of parts in a search."""


def unpicklable(
    obj: object, picklable: Callable[[object], bool]
) -> tuple[str, list[object]]:
    """Finds the innermost part of an object that cannot be pickled by itself.

    Returns:
        The path of the part, which is empty for the object itself, and the parts along
        the path, from the object to the innermost part.
    """
    path: list[str] = []
    chain, seen = [obj], {id(obj)}
    while len(path) < MAX_DEPTH:
        for label, part in _parts(obj):
            # The first part that fails by itself is followed inwards.
            if id(part) not in seen and not picklable(part):
                seen.add(id(part))
                path.append(label)
                obj = part
                chain.append(part)
                break
        else:
            break
    if path and path[-1] == _CLASS:  # a message about its instance is clearer
        path.pop()
        chain.pop()
    return " -> ".join(path), chain


def find_value(obj: object, wanted: object) -> str:
    """Finds the path to a part of an object; returns "" if the part is not found."""
    seen = {id(obj)}
    queue: list[tuple[list[str], object]] = [([], obj)]
    for path, node in queue:
        for label, part in _parts(node):
            if part is wanted:
                return " -> ".join([*path, label])
            if id(part) not in seen and len(path) < MAX_DEPTH and len(seen) < MAX_PARTS:
                seen.add(id(part))
                queue.append(([*path, label], part))
    return ""


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts that pickle would visit, approximately, each with a label."""
    match obj:
        case types.FunctionType():
            yield from _captured(obj)
        case types.MethodType():
            yield "the instance of the method", obj.__self__
            yield "the method", obj.__func__
        case functools.partial():
            yield "the function of the partial", obj.func
            yield from _parts(obj.args)
            yield from _parts(obj.keywords)
        case ScopedBody():
            yield from _parts(obj.step)
        case dict():
            for key, value in obj.items():
                yield f"item {key!r:.60}", value
        case list() | tuple() | set() | frozenset():
            for number, value in enumerate(obj):
                yield f"item {number}", value
        case type():
            for name, value in vars(obj).items():
                own = isinstance(value, types.FunctionType)
                if own or not name.startswith(("__", "_abc_")):
                    yield f"class attribute {name!r}", value
        case types.ModuleType():
            for name, value in vars(obj).items():
                if not name.startswith("__"):
                    yield f"module attribute {name!r}", value
        case _:
            yield from _attributes(obj)
            yield _CLASS, type(obj)


def _captured(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    cells = fn.__closure__ or ()
    for name, cell in zip(fn.__code__.co_freevars, cells, strict=True):
        try:
            yield f"captured name {name!r}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _global_names(fn.__code__):
        if name in fn.__globals__:
            yield f"global name {name!r}", fn.__globals__[name]
    for number, value in enumerate(fn.__defaults__ or ()):
        yield f"default {number}", value
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield f"default of {name!r}", value


def _global_names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.extend(_global_names(constant))
    return list(dict.fromkeys(names))


def _attributes(obj: object) -> Iterator[tuple[str, Any]]:
    attributes: dict[str, Any] = {}
    for cls in type(obj).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = cls.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    attributes[name] = member.__get__(obj)
                except AttributeError:  # never assigned
                    continue
    with contextlib.suppress(TypeError):  # no __dict__
        attributes |= vars(obj)
    for name, value in attributes.items():
        yield f"attribute {name!r}", value
