"""Shares one trace among calls that differ only in the variables of their arguments.

Theory of operation. Two calls are alike if their variables agree in everything except
key and name, and if equal positions have equal variables (`likeness`). The body of the
first call is traced with *stand-ins*: new handles of the same variables, which only the
arguments have. So the trace shows whether the body uses a variable as an argument or in
another way, as a global say, and whether it reads a name or a device. If it uses them
only as arguments, it would do the same with other variables: the plan of the other call
is this plan with the variables replaced (`with_others`).

Law: a call that is not certainly alike is traced by itself.

The search for the objects that a call can reach follows functions (cells, defaults,
globals by name), modules by the names that functions use, classes, and the references
that the garbage collector reports. It skips packages that hold no objects of users.
"""

from __future__ import annotations

import dis
import gc
import inspect
import os
import sys
import sysconfig
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from zstrat.variables import (
    LOCAL,
    AbstractVariable,
    CopyStorage,
    DeviceStorage,
    Module,
    ShardedVariable,
    UnboundStorage,
    Variable,
    VariableUse,
    joined,
    stand_in,
    use_watcher,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping

    from zstrat.variables import VariableHandle, VariableSpec

    from ._plan import Plan, PlannedUpdate
    from ._signature import CutCall


_OURS: Final = ("jax", "jaxlib", "numpy", "optax", "zstrat")
"""Packages whose objects are skipped, except modules and step functions."""

_OTHERS: Final = frozenset(
    (
        "absl",
        "chex",
        "einops",
        "equinox",
        "flax",
        "grain",
        "haiku",
        "jaxtyping",
        "keras",
        "orbax",
        "scipy",
        "tensorflow",
        "torch",
        "treescope",
    )
)
"""Packages that hold variables of zstrat in objects at most, not in their own modules
and classes."""

_LEAVES: Final = frozenset(
    {str, bytes, int, float, complex, bool, type(None), CodeType}
)

_CONTAINERS: Final = (
    Module,
    partial,
    dict,
    list,
    tuple,
    set,
    frozenset,
    deque,
)
"""Types of containers that are searched, whichever package has made them."""

_OF_PYTHON: Final = ("builtins", "collections", "functools")
"""Modules of the types of functions and containers."""

_LIBRARY: Final = sysconfig.get_path("stdlib") + os.sep

_MAX_ITEMS: Final = 1000
"""Limit of items of a container of functions; one with more is data."""


def reached(
    roots: Iterable[Any], *, only_code: bool = False, classes: bool = True
) -> Iterator[Any]:
    """Yields the roots and the objects that they hold, each once, the nearest first.
    Not looked into are variables.

    Args:
        only_code: Of an object only its class counts, and what it wraps; large
            containers do not.
        classes: Search the methods of classes, whether the roots call them or not.
    """
    seen: dict[int, Any] = {}  # they stay, or others would get their ids
    waiting = deque(roots)
    while waiting:
        thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        yield thing
        kind = type(thing)
        if isinstance(thing, type) and not classes:
            continue
        if kind in _LEAVES or isinstance(thing, AbstractVariable):
            continue
        held = _held(thing)
        if only_code and not isinstance(thing, type):
            is_code = kind.__module__ in _OF_PYTHON or issubclass(kind, partial)
            if not (_is_ours(kind) or (is_code and len(held) <= _MAX_ITEMS)):
                held = [kind, inspect.getattr_static(thing, "__wrapped__", None)]
        waiting += held


def captured_values(fn: Any, *, classes: bool = True) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of the cells and globals that the functions of users
    read, which a function reaches; without ``classes`` not those of methods."""
    for thing in reached([fn], only_code=True, classes=classes):
        if not isinstance(thing, FunctionType) or is_known(thing.__module__):
            continue
        code, known = thing.__code__, thing.__globals__
        for name, cell in zip(code.co_freevars, thing.__closure__ or (), strict=True):
            yield from [(name, x) for x in gc.get_referents(cell)]
        for name in dict.fromkeys(_globals(code)):
            if name in known:
                yield name, known[name]


def _globals(code: CodeType) -> Iterator[str]:
    """Yields the names of globals; ``co_names`` has those of attributes, too."""
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield each.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _held(thing: Any) -> list[Any]:
    """Returns what an object refers to, as far as variables are there."""
    # Not all of its globals, which are the whole module: those that it names follow.
    if isinstance(thing, FunctionType):
        apart = thing.__globals__, getattr(thing, "__builtins__", None)
        parts = [x for x in gc.get_referents(thing) if not any(x is y for y in apart)]
        return parts if is_known(thing.__module__) else [*parts, *_named_by(thing)]
    if isinstance(thing, weakref.ref):
        return [thing()]
    if isinstance(thing, ModuleType):
        return []  # by the names of functions alone
    if isinstance(thing, type):
        return [] if is_known(thing.__module__) else gc.get_referents(thing)
    if not isinstance(thing, _CONTAINERS) and _is_ours(type(thing)):
        # Of a step function in the body, and of one that jax has wrapped.
        return [getattr(thing, name, None) for name in ("body", "__wrapped__")]
    return [type(thing), *gc.get_referents(thing)]


def _named_by(thing: FunctionType) -> list[Any]:
    """Finds globals, and attributes of modules that a global or an ``import`` in the
    body names."""
    names = dict.fromkeys(_names(thing.__code__))
    cells = [x for cell in thing.__closure__ or () for x in gc.get_referents(cell)]
    objects = [
        known[x]
        for known in (thing.__globals__, sys.modules)
        for x in names
        if x in known
    ]
    modules = [x for x in (*objects, *cells) if isinstance(x, ModuleType)]
    seen = set()
    # Names of the body may be attributes at any depth (``a.b.c``), so each of them is
    # looked up in each module.
    while modules:
        module = modules.pop()
        if module.__name__ in seen or is_known(module.__name__):
            continue
        seen.add(module.__name__)
        here = [vars(module)[name] for name in names if name in vars(module)]
        modules += [x for x in here if isinstance(x, ModuleType)]
        objects += here
    return objects


def _is_ours(kind: type) -> bool:
    return _package(kind.__module__) in _OURS


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def is_known(module: str | None) -> bool:
    """Returns whether a module is not a user's, so that it holds no variables."""
    package = _package(module)
    if package in _OURS or package in _OTHERS:
        return True
    if package not in sys.stdlib_module_names or package == "__main__":
        return False
    # A user's file may have the name of one: test.py, code.py, profile.py.
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is None or (file.startswith(_LIBRARY) and "site-packages" not in file)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


MAX_REACHED: Final = 3000
"""Limit of objects to search for captured variables. A body that reaches more is traced
by itself."""


@dataclass(frozen=True, slots=True)
class GivenVariables:
    """The variables of one call: the distinct components of its arguments, in order;
    ``likeness`` is equal for calls that are alike."""

    variables: tuple[Variable, ...]
    likeness: Hashable

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple([variable.spec.key for variable in self.variables])


def given_variables(call: CutCall) -> GivenVariables | None:
    """Returns the variables of a call; None if it has none, or cannot share."""
    variables: dict[int, Variable] = {}
    for leaf in call.leaves:
        if isinstance(leaf, Variable | ShardedVariable):
            variables.update((part.spec.key, part) for part in leaf.components)
        elif isinstance(leaf, AbstractVariable):
            return None
    for variable in variables.values():
        storage = variable.storage
        is_carried = isinstance(storage, UnboundStorage) and variable.spec.ps == LOCAL
        if isinstance(storage, CopyStorage) or is_carried:
            return None  # a row of another variable; or a value sent with the step
    if not variables:
        return None
    numbers = {key: number for number, key in enumerate(variables)}
    key: Any = call.key  # as `cut` makes it
    treedef, fingerprints, *rest = key
    alike = [
        (type(leaf), *[_fingerprint(part, numbers) for part in leaf.components])
        if isinstance(leaf, AbstractVariable)
        else fingerprint
        for leaf, fingerprint in zip(call.leaves, fingerprints, strict=True)
    ]
    return GivenVariables(tuple(variables.values()), (treedef, tuple(alike), *rest))


def _fingerprint(variable: VariableHandle, numbers: Mapping[int, int]) -> Hashable:
    spec, storage = variable.spec, variable.storage
    # What may differ between variables of one program: names, key, and which server has
    # them.
    part = spec.part and replace(spec.part, whole="")
    ps = LOCAL if spec.ps == LOCAL else 0
    alike = replace(spec, key=numbers[spec.key], name="", ps=ps, part=part)
    place = (
        (storage.pool, storage.is_apart) if isinstance(storage, DeviceStorage) else ()
    )
    return type(variable), alike, type(storage), place


class LookedForError(BaseException):
    """The body looks up a stand-in in a dict or a set, which may have the variable
    itself: it must be traced with that. Not an `Exception`, which bodies may catch."""


class StandIns:
    """The stand-ins for the variables of a call while its body is traced.

    After the trace ``is_general`` says whether other calls may share it.
    """

    def __init__(self, given: GivenVariables) -> None:
        self._made = {v.spec.key: stand_in(v) for v in given.variables}
        self._own = {id(variable) for variable in self._made.values()}
        self.is_general = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches uses of variables by the body that is traced inside."""
        before = use_watcher.set(self._used)
        try:
            yield
        finally:
            use_watcher.reset(before)

    def leaf(self, leaf: Any) -> Any:
        """Returns the object that replaces a leaf of the arguments."""
        if isinstance(leaf, Variable):
            return self._made[leaf.spec.key]
        if isinstance(leaf, ShardedVariable):
            whole = joined([self._made[p.spec.key] for p in leaf.components], leaf.name)
            self._own.add(id(whole))
            return whole
        return leaf

    def _used(self, variable: Any, use: VariableUse) -> None:
        """Clears `is_general` if the body uses the name or hash of a stand-in, or uses
        the variable itself.

        Raises:
            LookedForError: It looks up a stand-in in a dict or a set.
        """
        is_own = id(variable) in self._own
        if use is not VariableUse.VALUE:
            self.is_general = self.is_general and not is_own
        # A variable of the arguments, but not by its stand-in: the body has it from
        # elsewhere.
        elif variable.spec.key in self._made:
            self.is_general = self.is_general and is_own
        if is_own and use is VariableUse.HASH:
            raise LookedForError


def has_captured(fn: Any, call: CutCall, given: GivenVariables) -> bool:
    """Returns whether the body, or an object among the arguments, holds one of the
    variables.

    The body might compare it with an argument (``v is self.w``, ``slots[v]``), and a
    stand-in would compare unequal.
    """
    variables = [x for x in call.leaves if isinstance(x, AbstractVariable)]
    numbers = {id(variable) for variable in (*variables, *given.variables)}
    keys = set(given.keys)
    roots = [fn, *[x for x in call.leaves if not isinstance(x, AbstractVariable)]]
    for count, thing in enumerate(reached(roots)):
        if count >= MAX_REACHED:
            return True
        if isinstance(thing, AbstractVariable):
            parts = (Variable, ShardedVariable)
            components = thing.components if isinstance(thing, parts) else ()
            if any(part.spec.key in keys for part in components):
                return True
        elif type(thing) is int and thing in numbers:  # slots[id(v)]
            return True
    return False


def is_plain(plan: Plan) -> bool:
    """Returns whether the variables of the plan can be replaced: it has no optimizer,
    which has state for each variable, and no lookups."""
    updates = [(u.optimizer, u.call is None) for u in plan.updates]
    return not (plan.calls or plan.lookups) and all(x == (0, True) for x in updates)


def with_others(
    plan: Plan, before: GivenVariables, after: GivenVariables
) -> Plan | None:
    """Replaces the variables of a plan; None if the body itself uses one of the new
    variables."""
    others = dict(zip(before.keys, after.variables, strict=True))
    captured = {spec.key for spec in plan.specs} - others.keys()
    if not captured.isdisjoint(after.keys):
        return None

    def handle_of(variable: VariableHandle) -> VariableHandle:
        return others.get(variable.spec.key, variable)

    def spec_of(spec: VariableSpec) -> VariableSpec:
        return others[spec.key].spec if spec.key in others else spec

    def update_of(update: PlannedUpdate) -> PlannedUpdate:
        specs = tuple(map(spec_of, update.specs))
        table = update.table
        if table is not None:
            components = tuple(map(handle_of, table.components))
            whole = components[0].spec.part
            name = components[0].spec.name if whole is None else whole.whole
            table = replace(table, name=name, components=components)
        return replace(update, specs=specs, table=table)

    return replace(
        plan,
        reads=tuple(map(spec_of, plan.reads)),
        updates=tuple(map(update_of, plan.updates)),
        variables=tuple(map(handle_of, plan.variables)),
        targets=tuple([(tuple(map(handle_of, vs)), o) for vs, o in plan.targets]),
        moves=tuple([(tuple(map(spec_of, specs)), op) for specs, op in plan.moves]),
    )
