"""The sources of values in a trace: placeholders, or inputs of a program.

`Discovery` makes a placeholder for each value. If every placeholder was made at the
level of the body itself, the trace is the program: `body_program` turns placeholders
into inputs. So the body of a step runs once, and its prints appear once. If one was
made inside of an equation (a body that jax traces by itself), there is no such program,
and the body is traced again, with a `Replay` of the program's inputs.

Law of the file: the equations that `body_program` drops compute only placeholders, and
from the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, no_effects

from . import _refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from zstrat.variables import SlotRule, Table, VariableHandle, VariableSpec

    from ._iterator import Element, StepIterator


SlotsKey = tuple[int, int]
"""The key of a variable and the id of an optimizer."""


class TraceFeed(Protocol):
    """A source of the values that a trace needs."""

    def value(self, spec: VariableSpec) -> jax.Array:
        """Returns the value of a variable before the step's own writes."""
        ...

    def element(self, ordinal: int, iterator: StepIterator) -> Any:
        """Returns the next element of iterator number ``ordinal``."""
        ...

    def rows(self, number: int, table: Table, shape: Sequence[int]) -> jax.Array:
        """Returns the rows of lookup ``number``, for ids of this shape."""
        ...

    def slots(self, variable: VariableHandle, rule: SlotRule) -> list[Any]:
        """Returns an optimizer's slots of a variable of this process before the
        step."""
        ...


@dataclass(frozen=True, slots=True)
class Placeholder:
    """An abstract value in a trace; equal names stand for the same value."""

    name: Hashable
    value: jax.Array


class Discovery:
    """Makes placeholders.

    ``seed`` is a traced scalar. Values computed from it are traced at every depth of
    transformation, as constants would not be. ``supply`` draws elements; a region draws
    none.
    """

    def __init__(
        self,
        seed: jax.Array,
        supply: Callable[[int, StepIterator], Element] | None = None,
    ) -> None:
        self._seed = seed
        self._supply = supply
        self._elements = 0
        self.placeholders: list[Placeholder] = []
        """All placeholders, in order."""

    def value(self, spec: VariableSpec) -> jax.Array:
        return self._abstract(("value", spec.key), spec.shape, spec.numpy_dtype)

    def element(self, ordinal: int, iterator: StepIterator) -> Any:
        assert self._supply is not None, iterator.name
        element = self._supply(ordinal, iterator)
        _refusals.refuse_random_keys(element.leaves, iterator.name)
        drawn, self._elements = self._elements, self._elements + 1
        leaves = [
            self._abstract(("element", drawn, n), x.shape, x.dtype)
            for n, x in enumerate(element.leaves)
        ]
        return element.treedef.unflatten(leaves)

    def rows(self, number: int, table: Table, shape: Sequence[int]) -> jax.Array:
        name = "rows", number
        return self._abstract(name, (*shape, *table.shape[1:]), table.dtype)

    def slots(self, variable: VariableHandle, rule: SlotRule) -> list[Any]:
        key = variable.spec.key, rule.id
        return [
            self._abstract(("slot", *key, n), kind.shape, kind.dtype)
            for n, kind in enumerate(rule.kinds)
        ]

    def _abstract(self, name: Hashable, shape: Sequence[int], dtype: Any) -> jax.Array:
        seen = jax.dtypes.canonicalize_dtype(dtype)
        array = jax.lax.broadcast(
            jax.lax.convert_element_type(self._seed, seen), tuple(shape)
        )
        # An equation of its own, even of a scalar of the seed's dtype.
        value: jax.Array = checkpoint_name(array, "zstrat made up")  # type: ignore[no-untyped-call]
        self.placeholders.append(Placeholder(name, value))
        return value


class Replay:
    """Returns the inputs of a program."""

    def __init__(
        self,
        step: str,
        values: dict[int, jax.Array],
        elements: Sequence[Any],
        rows: Sequence[jax.Array] = (),
        slots: Mapping[SlotsKey, list[Any]] | None = None,
    ) -> None:
        self._step = step
        self._values = values
        self._elements = iter(elements)
        self._rows = rows
        self._slots = {} if slots is None else slots

    def value(self, spec: VariableSpec) -> jax.Array:
        if spec.key not in self._values:
            raise _refusals.changed(self._step, f"it reads {spec}")
        return self._values[spec.key]

    def element(self, ordinal: int, iterator: StepIterator) -> Any:
        try:
            return next(self._elements)
        except StopIteration:
            what = f"it draws one more element of {iterator.name}"
            raise _refusals.changed(self._step, what) from None

    def rows(self, number: int, table: Table, shape: Sequence[int]) -> jax.Array:
        wanted = (*shape, *table.shape[1:])
        if number >= len(self._rows) or self._rows[number].shape != wanted:
            raise _refusals.changed(self._step, f"it looks up other rows of {table}")
        return self._rows[number]

    def slots(self, variable: VariableHandle, rule: SlotRule) -> list[Any]:
        key = variable.spec.key, rule.id
        if key not in self._slots:
            what = f"{rule.optimizer!r} updates {variable.spec}"
            raise _refusals.changed(self._step, what)
        return self._slots[key]


@dataclass(frozen=True, slots=True)
class BodyProgram:
    """A body as a program of its inputs and of named values.

    Args:
        closed: From the inputs and the values of ``names`` to the flat outputs.
        tree: The treedef of the outputs.
    """

    closed: ClosedJaxpr
    names: tuple[Hashable, ...]
    tree: Any

    def kind_of(self, name: Hashable) -> Any:
        """Returns shape and dtype of a named value; None if it is not used."""
        if name not in self.names:
            return None
        return self.closed.in_avals[self.names.index(name) - len(self.names)]

    def __call__(self, inputs: Sequence[Any], values: Mapping[Hashable, Any]) -> Any:
        """Computes the outputs. Called in a trace of jax."""
        given = [values[name] for name in self.names]
        return self.tree.unflatten(jaxpr_as_fun(self.closed)(*inputs, *given))


def body_program(
    closed: ClosedJaxpr, placeholders: Sequence[Placeholder], tree: Any
) -> BodyProgram | None:
    """Turns placeholders into inputs; None if one was made inside of an equation.

    Args:
        closed: From a seed and the inputs to the outputs, then the placeholders.
        tree: The treedef of the outputs.
    """
    jaxpr: Any = closed.jaxpr
    count = len(jaxpr.outvars) - len(placeholders)
    wanted, made = jaxpr.outvars[:count], jaxpr.outvars[count:]
    makers = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    if not all(not isinstance(var, Literal) and var in makers for var in made):
        return None
    given = set(made)
    left = [eqn for eqn in jaxpr.eqns if given.isdisjoint(eqn.outvars)]
    eqns = _without(jaxpr.invars[0], left, wanted)
    if eqns is None or len(given) < len(made):
        return None
    effects = set(no_effects).union(*[eqn.effects for eqn in eqns])
    cut = jaxpr.replace(
        invars=[*jaxpr.invars[1:], *made], outvars=wanted, eqns=eqns, effects=effects
    )
    names = tuple([placeholder.name for placeholder in placeholders])
    return BodyProgram(ClosedJaxpr(cut, closed.consts), names, tree)


def _without(seed: Any, eqns: list[Any], wanted: Sequence[Any]) -> list[Any] | None:
    """Drops the equations that depend on the seed; None if one of these is needed, or
    has an effect."""
    tainted = {seed}
    for eqn in eqns:
        if any(not isinstance(x, Literal) and x in tainted for x in eqn.invars):
            tainted.update(eqn.outvars)
    needed = {x for x in wanted if not isinstance(x, Literal)}
    kept: list[Any] = []
    for eqn in reversed(eqns):
        is_tainted = not tainted.isdisjoint(eqn.outvars)
        if is_tainted and (eqn.effects or not needed.isdisjoint(eqn.outvars)):
            return None
        if not is_tainted:
            kept.append(eqn)
            needed.update(x for x in eqn.invars if not isinstance(x, Literal))
    return None if seed in needed else kept[::-1]
