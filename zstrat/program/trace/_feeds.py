"""Where the values come from that a trace meets: made up, or inputs of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name

from . import _refusals
from ._made_up import MadeUp

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from zstrat.variables import SlotRule, Table, VariableHandle, VariableSpec

    from ._iterator import Element, StepIterator


SlotsKey = tuple[int, int]
"""The key of a variable and the number of an optimizer."""


class TraceFeed(Protocol):
    """Where the values come from that the trace meets."""

    def value(self, spec: VariableSpec) -> jax.Array:
        """The value of a variable before the step's own writes."""
        ...

    def element(self, ordinal: int, iterator: StepIterator) -> Any:
        """The next element of the ``ordinal``-th iterator among the arguments."""
        ...

    def rows(self, number: int, table: Table, shape: Sequence[int]) -> jax.Array:
        """The rows of the lookup of this number, for ids of this shape."""
        ...

    def slots(self, variable: VariableHandle, rule: SlotRule) -> list[Any]:
        """What the optimizer keeps beside a variable of this process before the
        step."""
        ...


class Discovery:
    """Makes up abstract values.

    ``seed`` is a traced scalar: what is computed from it is a traced value at every
    depth of transformation, which a constant would not be. ``supply`` gives what is
    drawn; a region draws nothing.
    """

    def __init__(
        self,
        seed: jax.Array,
        supply: Callable[[int, StepIterator], Element] | None = None,
    ) -> None:
        self._seed = seed
        self._supply = supply
        self._elements = 0
        self.made_up: list[MadeUp] = []
        """All values that were made up, in order."""

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
        made = jax.lax.broadcast(
            jax.lax.convert_element_type(self._seed, seen), tuple(shape)
        )
        # An equation of its own, even of a scalar of the seed's dtype.
        value: jax.Array = checkpoint_name(made, "zstrat made up")  # type: ignore[no-untyped-call]
        self.made_up.append(MadeUp(name, value))
        return value


class Replay:
    """Hands out the inputs of the program."""

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
            what = f"{rule.optimizer!r} moves {variable.spec}"
            raise _refusals.changed(self._step, what)
        return self._slots[key]
