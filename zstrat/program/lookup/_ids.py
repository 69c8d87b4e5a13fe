"""The ids of a level, out of what a step was given and what it read so far.

Law of the file: ids leave a program as one vector per dtype, whatever the number of
lookups; ids that are elements of the batch as they are do not go through one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.program.trace._flow import Flow
    from zstrat.program.trace._retrace import Traced

    from ._lookups import Level


class RowPlace(NamedTuple):
    """Where the rows of a lookup are: in which block of which level, from where."""

    level: int
    block: int
    start: int
    shape: tuple[int, ...]


class TraceInputs:
    """Where the inputs of the trace are, by number, among ``given`` and ``blocks``."""

    def __init__(self, traced: Traced, places: Sequence[RowPlace]) -> None:
        self.data = traced.inputs
        self._first = traced.inputs + traced.reads
        self._values = {
            traced.inputs + read: traced.inputs + place
            for place, read in enumerate(traced.kept)
        }
        self._places = places

    def of(
        self,
        number: int,
        given: Sequence[Any] | Mapping[int, Any],
        blocks: Sequence[Any],
    ) -> Any:
        """The input, inside a program."""
        if number < self.data:
            return given[number]
        if number < self._first:
            return given[self._values[number]]
        place = self._places[number - self._first]
        rows = blocks[place.level][place.block]
        count = math.prod(place.shape)
        rows = jax.lax.slice_in_dim(rows, place.start, place.start + count)
        return rows.reshape(*place.shape, *rows.shape[1:])

    def givens(self, numbers: Sequence[int]) -> list[int]:
        """Which of ``given`` these inputs are, without the rows."""
        return [
            number if number < self.data else self._values[number]
            for number in numbers
            if number < self._first
        ]


class Ids:
    """The ids of one level: taken from the batch, or computed by a program."""

    def __init__(
        self, level: Level, flow: Flow, first: int, inputs: TraceInputs, name: str
    ) -> None:
        self._taken: list[int | None] = []
        computed: dict[Any, list[int]] = {}
        places: list[tuple[Any, int, int]] = []
        counts: dict[Any, int] = {}
        for output in [first + number for number in level.order]:
            source = flow.input_at_origin(output)
            self._taken.append(source if source in range(inputs.data) else None)
            if self._taken[-1] is not None:
                places.append((None, 0, 0))
                continue
            kind = flow.kind_of(output)
            start = counts.get(kind.dtype.name, 0)
            counts[kind.dtype.name] = start + math.prod(kind.shape)
            places.append((kind.dtype.name, start, counts[kind.dtype.name]))
            computed.setdefault(kind.dtype.name, []).append(output)
        self._places = places
        self._program = _compiled(flow, computed, inputs, name) if computed else None

    def __call__(self, given: list[Any], blocks: list[Any]) -> np.ndarray:
        computed: dict[Any, np.ndarray] = {}
        if self._program is not None:
            made = self._program(given, blocks)
            computed = {dtype: np.asarray(ids) for dtype, ids in made.items()}
        parts = [
            np.ravel(given[source])
            if source is not None
            else computed[dtype][start:stop]
            for source, (dtype, start, stop) in zip(
                self._taken, self._places, strict=True
            )
        ]
        return np.concatenate(parts, dtype=np.int64, casting="unsafe")


def _compiled(
    flow: Flow, computed: dict[Any, list[int]], inputs: TraceInputs, name: str
) -> Callable[..., Any]:
    """A program that gives the ids of each dtype as one vector."""
    outputs = [output for same in computed.values() for output in same]
    part, needed = flow.part(outputs)
    chosen = inputs.givens(needed)

    def program(given: list[Any], blocks: list[Any]) -> Any:
        known = dict(zip(chosen, given, strict=True))
        made = part(*[inputs.of(number, known, blocks) for number in needed])
        ids = dict(zip(outputs, made, strict=True))
        return {
            dtype: jnp.concatenate([ids[output].reshape(-1) for output in same])
            for dtype, same in computed.items()
        }

    program.__name__ = program.__qualname__ = f"{name}_ids"
    jitted = jax.jit(program)
    return lambda given, blocks: jitted([given[number] for number in chosen], blocks)
