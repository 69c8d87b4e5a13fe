"""Tables of which a window pulls only the rows that its steps look up.

The ids of all steps are computed before the first one, and their rows are looked up at
once. The worker's copy of the table has these rows, and zeros elsewhere, where no step
looks. So its size is that of the table, but what travels is as small as the rows.

That is right if the ids depend on nothing that is pulled, and the step uses the table
in no other way: its result, and its gradients, depend on the table's value by look-ups
alone; the gradient has rows that it looks up; and new slots do not depend on values.
Other tables are pulled whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp

from zstrat.program.trace._context import printed_before
from zstrat.program.trace._flow import Flow
from zstrat.program.trace._where import claimed
from zstrat.variables import rows_of_component

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.variables import SlotRule, Table, TraceRecorder, VariableHandle

    from ._window_recorder import StepLookup, WindowRecorder

    Replay = Callable[
        [Any, Sequence[Any], dict[int, Any], Sequence[Any]],
        tuple[WindowRecorder, Sequence[Any]],
    ]


@final
class TableRows:
    """The look-ups of a step in tables of which rows are enough.

    Args:
        replay: Traces the step with its number, the leaves of its elements, values of
            variables by key, and the rows of its look-ups; returns the recorder and the
            arrays of the result.
        lookups: What the step has looked up when it was first traced.
        leaves: The leaves of the elements of a step.
        variables: All variables that the step reads or trains.
        rules: The slots that it moves, each with the key of its variable.
    """

    def __init__(
        self,
        replay: Replay,
        lookups: Sequence[StepLookup],
        leaves: Sequence[Any],
        variables: Sequence[VariableHandle],
        rules: Sequence[tuple[int, SlotRule]],
    ) -> None:
        self._lookups = lookups
        flow, count, rows_updated = _traced(replay, lookups, leaves, variables)
        first_value = 1 + len(leaves)
        used = flow.inputs_of(range(flow.outputs)) >> first_value
        used_keys = {v.spec.key for n, v in enumerate(variables) if used >> n & 1}
        moving = {key for key, rule in rules if _begins_with_values(rule)}
        several: dict[int, set[Table]] = {}
        for lookup in lookups:
            for key in lookup.table.keys:
                several.setdefault(key, set()).add(lookup.table)
        self._numbers: list[int] = []
        for table in dict.fromkeys(lookup.table for lookup in lookups):
            keys = set(table.keys)
            own = [n for n, lookup in enumerate(lookups) if lookup.table == table]
            origins = {x for n in own for x in flow.origin(count + n)}
            if (
                not keys & (used_keys | moving)
                and not flow.has_effects
                and all(len(several[key]) == 1 for key in keys)
                and not flow.inputs_of([count + n for n in own]) >> first_value
                and all(
                    number is not None and origins.issuperset(flow.origin(number))
                    for updated, number in rows_updated
                    if keys & set(updated)
                )
            ):
                self._numbers += own
        if self._numbers:
            wanted = [count + number for number in self._numbers]
            self._part, self._needed = flow.part(wanted)

    @property
    def keys(self) -> frozenset[int]:
        """The keys of the variables that need not be pulled whole."""
        tables = [self._lookups[number].table for number in self._numbers]
        return frozenset(key for table in tables for key in table.keys)

    def pulled(
        self, outer: TraceRecorder, numbers: jax.Array, leaves: Sequence[jax.Array]
    ) -> dict[int, jax.Array]:
        """Looks the rows of several steps up; returns the tables, by key, with zeros
        for all other rows.

        Args:
            numbers: Of the steps, ``[steps]``.
            leaves: Those of their elements, each ``[steps, ...]``.
        """
        if not self._numbers:
            return {}

        def ids_of(given: tuple[Any, Sequence[Any]]) -> list[jax.Array]:
            known = [given[0], *given[1]]
            return self._part(*[known[number] for number in self._needed])

        found: dict[int, jax.Array] = {}
        all_ids = jax.lax.map(ids_of, (numbers, list(leaves)))
        for number, ids in zip(self._numbers, all_ids, strict=True):
            table, _, where = self._lookups[number]
            flat = ids.reshape(-1)
            with claimed(where):
                rows = outer.lookup(table, flat)
            for place, component in enumerate(table.components):
                key, zeros = component.spec.key, jnp.zeros(component.shape, rows.dtype)
                own = rows_of_component(table, place, flat)
                found[key] = found.get(key, zeros).at[own].set(rows, mode="drop")
        return found


def _traced(
    replay: Replay,
    lookups: Sequence[StepLookup],
    leaves: Sequence[Any],
    variables: Sequence[VariableHandle],
) -> tuple[Flow, int, list[tuple[tuple[int, ...], int | None]]]:
    """Traces the step from its number, elements, values, and rows of look-ups. Its last
    outputs are the ids of look-ups, from the number that is returned. Also returns of
    each gradient the keys of its variable, and the output with its rows."""
    updated: list[tuple[tuple[int, ...], int | None]] = []
    counts: list[int] = []

    def program(
        number: Any, leaves: Sequence[Any], values: Sequence[Any], rows: Sequence[Any]
    ) -> list[Any]:
        known = {v.spec.key: x for v, x in zip(variables, values, strict=True)}
        recording, arrays = replay(number, leaves, known, rows)
        call = recording.call
        assert call is not None
        outputs = list(arrays)
        updated.clear()
        for _, target, sparse, own in call.leaves():
            keys = tuple([part.spec.key for part in target.components])
            updated.append((keys, len(outputs) if sparse else None))
            outputs += own
        counts[:] = [len(outputs)]
        return [*outputs, *[lookup.ids for lookup in recording.lookups]]

    with printed_before():
        closed = jax.make_jaxpr(program)(
            0,
            list(leaves),
            [_zeros(v.shape, v.dtype) for v in variables],
            [
                _zeros((*x.ids.shape, *x.table.shape[1:]), x.table.dtype)
                for x in lookups
            ],
        )
    return Flow(closed), counts[0], updated


def _begins_with_values(rule: SlotRule) -> bool:
    """Returns whether new slots depend on the value of the variable."""
    flow = Flow(rule.leaf.initial(rule.size))
    return bool(flow.inputs_of(range(flow.outputs)))


def _zeros(shape: Sequence[int], dtype: Any) -> Any:
    kind: Any = jax.ShapeDtypeStruct
    return kind(tuple(shape), jax.dtypes.canonicalize_dtype(dtype))
