"""Calls that differ only in which variables they are given share one trace.

Theory of operation. Two calls are alike if their variables agree in all but key and
name and if the same places have the same variable (`likeness`). Of the first one the
body is traced with *stand-ins*: handles of the same variables that only the arguments
have. So the trace tells whether the body met a variable as an argument or by itself, as
a global say, and whether it asked for a name or a device. If it met them as arguments
alone, what it does with them it would do with any others: its plan with others in their
place (`with_others`) is the plan of the other call.

Law of the file: where that is not known for certain the call is traced by itself.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from zstrat.variables import (
    LOCAL,
    AbstractVariable,
    CopyHome,
    Detached,
    DeviceHome,
    Module,
    ShardedVariable,
    Variable,
    asked_name,
    joined,
    met,
    stand_in,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping

    from zstrat.variables import VariableHandle, VariableSpec

    from ._plan import Plan, PlannedUpdate
    from ._signature import CutCall

MAX_REACHED: Final = 1000
"""Objects that are looked at for what a body has captured. One with more is traced by
itself, as it was before anything was shared."""


_OURS: Final = ("jax", "jaxlib", "numpy", "zstrat")
"""Packages whose objects are not looked into, but for modules and step functions."""


@dataclass(frozen=True, slots=True)
class GivenVariables:
    """The variables of one call: the distinct components of its arguments, in order,
    and what other calls have in common with it."""

    variables: tuple[Variable, ...]
    likeness: Hashable

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple([variable.spec.key for variable in self.variables])


def given_variables(call: CutCall) -> GivenVariables | None:
    """Those of a call; None: it has none, or one that is not like any other."""
    found: dict[int, Variable] = {}
    for leaf in call.leaves:
        if isinstance(leaf, Variable | ShardedVariable):
            found.update((part.spec.key, part) for part in leaf.components)
        elif isinstance(leaf, AbstractVariable):
            return None
    if not found or not all(map(_may_be_shared, found.values())):
        return None
    numbers = {key: number for number, key in enumerate(found)}
    key: Any = call.key  # as `cut` makes it
    treedef, marks, *rest = key
    alike = [
        (type(leaf), *[_mark(part, numbers) for part in leaf.components])
        if isinstance(leaf, AbstractVariable)
        else mark
        for leaf, mark in zip(call.leaves, marks, strict=True)
    ]
    return GivenVariables(tuple(found.values()), (treedef, tuple(alike), *rest))


def _may_be_shared(variable: Variable) -> bool:
    """Not a copy, which is a row of another variable, and not one whose value came
    along from another process."""
    home = variable.home
    is_carried = isinstance(home, Detached) and variable.spec.ps == LOCAL
    return not (isinstance(home, CopyHome) or is_carried)


def _mark(variable: VariableHandle, numbers: Mapping[int, int]) -> Hashable:
    spec, home = variable.spec, variable.home
    part = spec.part and replace(spec.part, whole="")
    ps = LOCAL if spec.ps == LOCAL else 0
    alike = replace(spec, key=numbers[spec.key], name="", ps=ps, part=part)
    place = (home.residence, home.is_apart) if isinstance(home, DeviceHome) else ()
    return type(variable), alike, type(home), place


class StandIns:
    """In place of the variables of a call while its body is traced. ``is_general``
    tells afterwards whether it may be shared."""

    def __init__(self, given: GivenVariables) -> None:
        self._made = {v.spec.key: stand_in(v) for v in given.variables}
        self._own = {id(variable) for variable in self._made.values()}
        self.is_general = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The trace of the body is inside."""
        before, named = met.set(self.met), asked_name.set(self.named)
        try:
            yield
        finally:
            met.reset(before)
            asked_name.reset(named)

    def leaf(self, leaf: Any) -> Any:
        """What the body is given in place of a leaf of the arguments."""
        if isinstance(leaf, Variable):
            return self._made[leaf.spec.key]
        if isinstance(leaf, ShardedVariable):
            made = joined([self._made[p.spec.key] for p in leaf.components], leaf.name)
            self._own.add(id(made))
            return made
        return leaf

    def met(self, variable: VariableHandle) -> None:
        """The body uses one: of an argument's, only the stand-in is known to be it."""
        if variable.spec.key in self._made and id(variable) not in self._own:
            self.is_general = False

    def named(self, variable: object) -> None:
        """The body asks for a name or a device."""
        if id(variable) in self._own:
            self.is_general = False


def has_captured(fn: Any, given: GivenVariables) -> bool:
    """Whether the body may hold one of the variables itself, and compare it with an
    argument (``v is self.w``, ``slots[v]``), which a stand-in would not stand."""
    keys = set(given.keys)
    seen: set[int] = set()
    waiting = [fn]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if len(seen) > MAX_REACHED:
            return True
        if isinstance(thing, AbstractVariable):
            parts = (Variable, ShardedVariable)
            mine = thing.components if isinstance(thing, parts) else ()
            if any(part.spec.key in keys for part in mine):
                return True
        else:
            waiting += _held(thing)
    return False


def _held(thing: Any) -> Iterable[Any]:
    """What an object refers to, as far as variables lie there."""
    if isinstance(thing, FunctionType):
        names = list(_names(thing.__code__))
        found = [thing.__globals__[name] for name in names if name in thing.__globals__]
        cells = [cell for cell in thing.__closure__ or () if _is_full(cell)]
        found += [cell.cell_contents for cell in cells]
        defaults = [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        return [*found, *defaults, *vars(thing).values()]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, dict):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, list | tuple | set | frozenset):
        return list(thing)
    if isinstance(thing, type | ModuleType):
        return []
    is_module = isinstance(thing, Module)
    if not is_module and type(thing).__module__.partition(".")[0] in _OURS:
        return [getattr(thing, "body", None)]  # of a step function in the body
    return _attributes(thing)


def _attributes(thing: Any) -> Iterable[Any]:
    try:
        return list(vars(thing).values())
    except TypeError:  # it has no room for any
        return []


def _is_full(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def is_plain(plan: Plan) -> bool:
    """Whether other variables may take the place of those of the plan: it has no
    optimizer, which knows each variable by itself, and looks no rows up."""
    updates = [(u.optimizer, u.call is None) for u in plan.updates]
    return not (plan.calls or plan.lookups) and all(x == (0, True) for x in updates)


def with_others(
    plan: Plan, before: GivenVariables, after: GivenVariables
) -> Plan | None:
    """The plan of a call with other variables; None: the body itself has one of them,
    which it does not know to be an argument."""
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
