"""Looks a function through before it is differentiated: what it looks up, and uses.

The function is traced twice, and none of these traces is run. The first one finds its
lookups, the second one has their rows as inputs and their ids as outputs. Then the ids
of one lookup after the other are computed, with the rows of those before, and handed to
whoever captures: to the step, its lookups are those of its own body. The second trace
also tells which of the values the result depends on at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zstrat.program.trace import _refusals
from zstrat.program.trace._flow import Flow
from zstrat.program.trace._where import claimed

from ._substitution import Substitution

if TYPE_CHECKING:
    from zstrat.variables import TraceRecorder, VariableHandle

    from ._substitution import Sought

Call = Callable[[list[Any], Substitution], Any]
"""Calls the function with these arrays among its arguments, under that recorder; gives
what is differentiated, without aux."""


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What was found. ``ids`` and ``rows`` are those of ``sought``; ``late`` the values
    by key that were asked for; ``used_given`` (by number) and ``used_keys`` say on
    which arrays and values the result depends."""

    sought: list[Sought]
    ids: list[jax.Array]
    rows: list[jax.Array]
    late: dict[int, jax.Array]
    used_given: frozenset[int]
    used_keys: frozenset[int]

    def rows_of(self, rows: list[jax.Array]) -> Callable[[int, Sought], jax.Array]:
        """Hands these rows out in order, in place of ``rows``."""

        def handed(number: int, sought: Sought) -> jax.Array:
            known = self.sought[number] if number < len(self.sought) else None
            if known is None or not _is_same(known, sought):
                raise _refusals.changed(
                    "zs.value_and_grad", f"it looks up other rows of {sought.table}"
                )
            return rows[number]

        return handed


@dataclass(frozen=True, slots=True)
class Survey:
    """A function to be looked through.

    ``late`` are variables, by key, whose values are read only if it asks for them.
    """

    call: Call
    outer: TraceRecorder
    given: list[Any]
    stand_for: list[VariableHandle | None]
    values: dict[int, jax.Array]
    late: dict[int, VariableHandle]

    def run(self) -> Surveyed:
        """Traces it and does its lookups.

        Raises:
            Exception: Whatever the function raises.
        """
        sought, keys = self._found()
        flow = self._traced(sought, keys)
        first = flow.outputs - len(sought)
        late: dict[int, jax.Array] = {}
        rows: list[jax.Array] = []
        ids: list[jax.Array] = []
        values = [self.values[key] for key in sorted(self.values)]
        known = [*self.given, *values]

        def given(number: int) -> Any:
            if number < len(known):
                return known[number]
            number -= len(known)
            return (
                late_value(keys[number])
                if number < len(keys)
                else rows[number - len(keys)]
            )

        def late_value(key: int) -> jax.Array:
            if key not in late:
                late[key] = self.outer.read(self.late[key])
            return late[key]

        for number, wanted in enumerate(sought):
            part, needed = flow.part([first + number])
            ids += part(*[given(n) for n in needed])
            with claimed(wanted.where):
                rows.append(self.outer.lookup(wanted.table, ids[-1]))
        used = flow.inputs_of(range(first))
        names = [*sorted(self.values), *keys]
        return Surveyed(
            sought,
            ids,
            rows,
            {key: late_value(key) for key in keys},
            frozenset(n for n in range(len(self.given)) if used >> n & 1),
            frozenset(
                key for n, key in enumerate(names, len(self.given)) if used >> n & 1
            ),
        )

    def _found(self) -> tuple[list[Sought], list[int]]:
        """The lookups, and which of the late values are asked for."""
        keys: list[int] = []
        found: list[Substitution] = []

        def abstract(seed: jax.Array, given: Any, values: Any) -> None:
            def like(shape: tuple[int, ...], dtype: Any) -> jax.Array:
                seen: Any = jax.dtypes.canonicalize_dtype(dtype)
                return jax.lax.broadcast(seed.astype(seen), shape)

            def value_of(variable: VariableHandle) -> jax.Array:
                if variable.spec.key not in keys:
                    keys.append(variable.spec.key)
                return like(variable.shape, variable.dtype)

            recording = self._substitution(
                given,
                values,
                late=self.late,
                value_of=value_of,
                rows_of=lambda _, sought: like(_shape(sought), sought.table.dtype),
            )
            found.append(recording)
            self.call(given, recording)

        jax.eval_shape(abstract, np.zeros((), np.float32), self.given, self.values)
        return found[-1].sought, keys

    def _traced(self, sought: list[Sought], keys: list[int]) -> Flow:
        """The function with rows as inputs (the last ones) and ids as outputs."""
        checked = Surveyed(sought, [], [], {}, frozenset(), frozenset())

        def replayed(given: Any, values: Any, late: Any, rows: Any) -> Any:
            known = dict(
                zip((*sorted(self.values), *keys), (*values, *late), strict=True)
            )
            recording = self._substitution(given, known, rows_of=checked.rows_of(rows))
            result = self.call(given, recording)
            return result, [lookup.ids for lookup in recording.sought]

        kind: Any = jax.ShapeDtypeStruct  # untyped
        late = [kind(self.late[k].shape, self.late[k].dtype) for k in keys]
        rows = [kind(_shape(s), s.table.dtype) for s in sought]
        values = [self.values[key] for key in sorted(self.values)]
        return Flow(jax.make_jaxpr(replayed)(self.given, values, late, rows))

    def _substitution(
        self, given: Any, values: dict[int, jax.Array], **how: Any
    ) -> Substitution:
        handed = list(zip(given, self.stand_for, strict=True))
        return Substitution(self.outer, values, handed, is_staged=True, **how)


def _shape(sought: Sought) -> tuple[int, ...]:
    return (*sought.ids.shape, *sought.table.shape[1:])


def _is_same(one: Sought, other: Sought) -> bool:
    return (one.table, one.ids.shape, one.via) == (
        other.table,
        other.ids.shape,
        other.via,
    )
