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

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from zstrat.variables import (
    LOCAL,
    AbstractVariable,
    CopyStorage,
    DeviceStorage,
    ShardedVariable,
    UnboundStorage,
    Variable,
    VariableUse,
    joined,
    stand_in,
    use_watcher,
)

from ._reach import reached

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from zstrat.variables import VariableHandle, VariableSpec

    from ._plan import Plan, PlannedUpdate
    from ._signature import CutCall

MAX_REACHED: Final = 3000
"""Objects that are looked at for what a body has captured. One with more is traced by
itself, as it was before anything was shared."""


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
    """The variables of a call; None: it has none, or one that is not like any other."""
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
    treedef, fingerprints, *rest = key
    alike = [
        (type(leaf), *[_fingerprint(part, numbers) for part in leaf.components])
        if isinstance(leaf, AbstractVariable)
        else fingerprint
        for leaf, fingerprint in zip(call.leaves, fingerprints, strict=True)
    ]
    return GivenVariables(tuple(found.values()), (treedef, tuple(alike), *rest))


def _may_be_shared(variable: Variable) -> bool:
    """Whether it is no copy, which is a row of another variable, and none whose value
    came along from another process."""
    storage = variable.storage
    is_carried = isinstance(storage, UnboundStorage) and variable.spec.ps == LOCAL
    return not (isinstance(storage, CopyStorage) or is_carried)


def _fingerprint(variable: VariableHandle, numbers: Mapping[int, int]) -> Hashable:
    spec, storage = variable.spec, variable.storage
    part = spec.part and replace(spec.part, whole="")
    ps = LOCAL if spec.ps == LOCAL else 0
    alike = replace(spec, key=numbers[spec.key], name="", ps=ps, part=part)
    place = (
        (storage.pool, storage.is_apart) if isinstance(storage, DeviceStorage) else ()
    )
    return type(variable), alike, type(storage), place


class LookedForError(BaseException):
    """The body looks for a stand-in in a dict or a set, which knows the variable itself
    at most: it has to be traced with that. No `Exception`, which a body may catch."""


class StandIns:
    """In place of the variables of a call while its body is traced. ``is_general``
    tells afterwards whether it may be shared."""

    def __init__(self, given: GivenVariables) -> None:
        self._made = {v.spec.key: stand_in(v) for v in given.variables}
        self._own = {id(variable) for variable in self._made.values()}
        self.is_general = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches while the body is traced inside."""
        before = use_watcher.set(self._used)
        try:
            yield
        finally:
            use_watcher.reset(before)

    def leaf(self, leaf: Any) -> Any:
        """What the body is given in place of a leaf of the arguments."""
        if isinstance(leaf, Variable):
            return self._made[leaf.spec.key]
        if isinstance(leaf, ShardedVariable):
            made = joined([self._made[p.spec.key] for p in leaf.components], leaf.name)
            self._own.add(id(made))
            return made
        return leaf

    def _used(self, variable: Any, use: VariableUse) -> None:
        """The body uses one: of an argument's, only the stand-in is known to be it, and
        its name and its hash are not those of the others.

        Raises:
            LookedForError: It looks for a stand-in in a dict or a set.
        """
        is_own = id(variable) in self._own
        if use is not VariableUse.VALUE:
            self.is_general = self.is_general and not is_own
        elif variable.spec.key in self._made:
            self.is_general = self.is_general and is_own
        if is_own and use is VariableUse.HASH:
            raise LookedForError


def has_captured(fn: Any, call: CutCall, given: GivenVariables) -> bool:
    """Whether the body may reach one of the variables in another way, and compare it
    with an argument (``v is self.w``, ``slots[v]``), which a stand-in would not
    stand: it holds it, or an object among the arguments does."""
    variables = [x for x in call.leaves if isinstance(x, AbstractVariable)]
    numbers = {id(variable) for variable in (*variables, *given.variables)}
    keys = set(given.keys)
    roots = [fn, *[x for x in call.leaves if not isinstance(x, AbstractVariable)]]
    for count, thing in enumerate(reached(roots)):
        if count >= MAX_REACHED:
            return True
        if isinstance(thing, AbstractVariable):
            parts = (Variable, ShardedVariable)
            mine = thing.components if isinstance(thing, parts) else ()
            if any(part.spec.key in keys for part in mine):
                return True
        elif type(thing) is int and thing in numbers:  # slots[id(v)]
            return True
    return False


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
