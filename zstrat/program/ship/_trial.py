"""Trials: loads an object in this process before it is sent, and finds bad parts.

`try_out` pickles and loads an object as a worker would, with new classes; arrays are
not copied. Each class is tried once, which runs its code once more here.

Only after a failure does `unpicklable` search the path to the part that cannot be
pickled. That may be slow: it tries each part by itself.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from typing import TYPE_CHECKING, Any, Final

import jax

from ._carried import ScopedBody
from ._classes import arriving_at, known
from ._pickler import NotLoaded, NotShippable, Pickler, TrialUnpickler, Ways

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


MAX_COMPARED_OBJECTS: Final = 1000
"""Limit of objects to compare; only the first ones are."""

tried: Final[weakref.WeakSet[type]] = weakref.WeakSet()
"""Classes that arrived whole; the pickler's lock guards it."""


def try_out(obj: object, ways: Ways) -> None:
    """Loads an object here as a worker would, with new classes.

    Raises:
        NotShippable: It cannot be loaded, or changes.
    """
    kept: list[Any] = []
    with Pickler.session(None, ways, kept) as (pickler, stream):
        # In this order: pickling the object finds the instances.
        pickler.dump((obj, pickler.instances))
    stream.seek(0)
    try:
        with arriving_at(known.trusting(list(tried))):
            _, arrived = TrialUnpickler(stream, kept, ways).load()
    except Exception as error:  # user code runs in it: `find_way` says where
        raise NotLoaded from error
    if change := difference(pickler.instances, arrived):
        raise NotShippable(*change)
    tried.update(pickler.made)


def difference(sent: Sequence[Any], arrived: Sequence[Any]) -> tuple[Any, str] | None:
    """Finds the first object that is another pytree after loading, and describes it.

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
"""Limit of the depth of a search; longer paths do not help."""
MAX_PARTS: Final = 10_000
"""Limit of parts in a search."""


def unpicklable(
    obj: object, picklable: Callable[[object], bool]
) -> tuple[str, list[object]]:
    """Finds the innermost part that cannot be pickled by itself.

    Returns:
        Its path, which is empty for the object itself, and the parts along the path,
        from the object to the innermost part.
    """
    path: list[str] = []
    chain, seen = [obj], {id(obj)}
    while len(path) < MAX_DEPTH:
        for label, part in _parts(obj):
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
    """Finds the path to a part of an object; "" if it is not found."""
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
    """Iterates over the parts that pickle would visit, roughly, with labels."""
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
