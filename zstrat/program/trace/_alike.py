"""Shares one trace among calls that differ only in the variables of their arguments.

Theory of operation. Two calls are alike if their variables agree in everything except
key and name, and if equal positions have equal variables (`likeness`). The body of the
first call is traced with *stand-ins*: new handles of the same variables, which only the
arguments have. So the trace shows whether the body uses a variable as an argument or in
another way, as a global say, and whether it reads a name or a device. If the body uses
the variables only as arguments, it would do the same with other variables: the plan of
the other call is this plan with the variables replaced (`with_others`).

Law: a call that is not certainly alike is traced by itself.
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

from ._captured import reached

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from zstrat.variables import VariableHandle, VariableSpec

    from ._plan import Plan, PlannedUpdate
    from ._signature import CutCall

MAX_REACHED: Final = 3000
"""Most objects to search for captured variables. A body that reaches more objects is
traced by itself."""


@dataclass(frozen=True, slots=True)
class GivenVariables:
    """The variables of one call: the distinct components of the variables among its
    arguments, in order; ``likeness`` is equal for calls that can share a trace."""

    variables: tuple[Variable, ...]
    likeness: Hashable

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple([variable.spec.key for variable in self.variables])


def given_variables(call: CutCall) -> GivenVariables | None:
    """Returns the variables of a call; None if it has no variables, or cannot share a
    trace."""
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
    # The numbers show the pattern of equal variables: f(v, v) is not like f(v, w).
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
    """The body looks up a stand-in in a dict or a set, which may contain the variable
    itself: the body must be traced with the variable. Not an `Exception`, which bodies
    may catch."""


class StandIns:
    """The stand-ins for the variables of a call while its body is traced.

    After the trace ``is_general`` says whether other calls may use it.
    """

    def __init__(self, given: GivenVariables) -> None:
        self._made = {v.spec.key: stand_in(v) for v in given.variables}
        self._own = {id(variable) for variable in self._made.values()}
        self.is_general = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observes how the body that is traced inside of the block uses variables."""
        before = use_watcher.set(self._used)
        try:
            yield
        finally:
            use_watcher.reset(before)

    def leaf(self, leaf: Any) -> Any:
        """Returns a leaf of the arguments, or its stand-in if it is a variable."""
        if isinstance(leaf, Variable):
            return self._made[leaf.spec.key]
        if isinstance(leaf, ShardedVariable):
            whole = joined([self._made[p.spec.key] for p in leaf.components], leaf.name)
            self._own.add(id(whole))
            return whole
        return leaf

    def _used(self, variable: Any, use: VariableUse) -> None:
        """Handles a use of a variable: clears `is_general` if the body uses the name or
        hash of a stand-in, or uses the variable itself.

        Raises:
            LookedForError: The body looks up a stand-in in a dict or a set.
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
    """Returns whether the body, or an object among the arguments, holds a reference to
    one of the variables.

    The body might compare that variable with an argument (``v is self.w``,
    ``slots[v]``), and a stand-in would compare unequal.
    """
    variables = [x for x in call.leaves if isinstance(x, AbstractVariable)]
    numbers = {id(variable) for variable in (*variables, *given.variables)}
    keys = set(given.keys)
    roots = [fn, *[x for x in call.leaves if not isinstance(x, AbstractVariable)]]
    for count, thing in enumerate(reached(roots)):
        if count >= MAX_REACHED:
            return True
        if isinstance(thing, AbstractVariable):
            # Of others ``components`` may raise: a PerWorkerVariable has them only in a
            # step.
            parts = (Variable, ShardedVariable)
            components = thing.components if isinstance(thing, parts) else ()
            if any(part.spec.key in keys for part in components):
                return True
        elif type(thing) is int and thing in numbers:  # slots[id(v)]
            return True
    return False


def is_plain(plan: Plan) -> bool:
    """Returns whether the variables of the plan can be replaced: whether it has neither
    an optimizer, which has state for each variable, nor lookups."""
    updates = [(u.optimizer, u.call is None) for u in plan.updates]
    return not (plan.calls or plan.lookups) and all(x == (0, True) for x in updates)


def with_others(
    plan: Plan, before: GivenVariables, after: GivenVariables
) -> Plan | None:
    """Returns the plan with its variables replaced; None if the body itself uses one of
    the new variables."""
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
