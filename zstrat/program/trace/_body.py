"""A traced body as a function of arrays: what programs are compiled of.

It is the program that was found in the trace, or, where there is none, the body itself,
which is traced again. What it prints then was printed already.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ._capture import Capture
from ._context import printed_before
from ._feeds import Replay

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import jax

    from ._feeds import SlotsKey
    from ._made_up import BodyProgram
    from ._plan import Plan, Template


class Made(NamedTuple):
    """What a body makes: arrays of its result, operands of each update, values and
    slots of variables that it moves, and ids of its lookups."""

    results: list[jax.Array]
    operands: list[list[jax.Array]]
    moved: list[jax.Array]
    slots: list[list[jax.Array]]
    ids: list[jax.Array]


def made_by(
    capture: Capture,
    arrays: list[jax.Array],
    moved: Sequence[int] | None = None,
    slots: Sequence[SlotsKey] | None = None,
) -> Made:
    """What a trace has made; of these variables, else of all that it moves."""
    moves = capture.moves
    return Made(
        arrays,
        [list(update.operands) for update in capture.updates],
        [moves.values[key][1] for key in (moves.values if moved is None else moved)],
        [moves.slots[key][2] for key in (moves.slots if slots is None else slots)],
        [lookup.ids for lookup in capture.lookups],
    )


@final
@dataclass(frozen=True, slots=True)
class TracedBody:
    """The body of one plan. ``moved`` and ``slots`` are the keys of what it moves, in
    order; ``program`` is None if the body has to be traced again."""

    plan: Plan
    template: Template
    moved: list[int]
    slots: list[SlotsKey]
    program: BodyProgram | None

    def takes(self, values: Mapping[int, Any]) -> bool:
        """Whether the program was traced for such values of the variables."""
        if self.program is None:
            return True  # whatever they are
        kinds = {key: self.program.kind_of(("value", key)) for key in values}
        return all(
            kind is None
            or (kind.shape, kind.dtype) == (values[key].shape, values[key].dtype)
            for key, kind in kinds.items()
        )

    def replayed(self) -> TracedBody:
        """The same without the program."""
        return replace(self, program=None)

    def __call__(
        self,
        inputs: Sequence[Any],
        leaves: Sequence[Any],
        values: Mapping[int, Any],
        rows: Sequence[Any] = (),
        slots: Mapping[SlotsKey, list[Any]] | None = None,
    ) -> Made:
        """What it makes of the leaves of elements, values of variables, rows of lookups
        and slots. Called in a trace of jax.

        Raises:
            RuntimeError: The body does something else than in the trace before.
        """
        slots = {} if slots is None else slots
        if self.program is None:
            return self._again(inputs, leaves, values, rows, slots)
        known: dict[Any, Any] = {("value", key): x for key, x in values.items()}
        known.update({("rows", n): x for n, x in enumerate(rows)})
        for key, arrays in slots.items():
            known.update({("slot", *key, n): x for n, x in enumerate(arrays)})
        given = iter(leaves)
        for drawn, treedef in enumerate(self.template.elements):
            for n in range(treedef.num_leaves):
                known["element", drawn, n] = next(given)
        made: Made = self.program(inputs, known)
        return made

    def _again(
        self,
        inputs: Sequence[Any],
        leaves: Sequence[Any],
        values: Mapping[int, Any],
        rows: Sequence[Any],
        slots: Mapping[SlotsKey, list[Any]],
    ) -> Made:
        drawn = self.template.drawn(leaves)
        feed = Replay(self.plan.function, dict(values), drawn, rows, slots)
        capture = Capture(feed, self.template.iterators)
        with printed_before():
            structure, arrays = self.template.run(capture, inputs)
        self.plan.require_same(capture, structure)
        return made_by(capture, arrays, self.moved, self.slots)
