"""`TracedBody`: the body of a step as a function of arrays, which programs compile.

It runs the program that discovery has found, or else traces the body again. (Prints of
the second trace are suppressed.)
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

    from ._feeds import BodyProgram, SlotsKey
    from ._plan import Plan, Template


class BodyOutputs(NamedTuple):
    """The outputs of a body: arrays of its result, operands of each update, values and
    slots of variables that it updates itself, and ids of its lookups."""

    results: list[jax.Array]
    operands: list[list[jax.Array]]
    moved: list[jax.Array]
    slots: list[list[jax.Array]]
    ids: list[jax.Array]


def outputs_of(
    capture: Capture,
    arrays: list[jax.Array],
    moved: Sequence[int] | None = None,
    slots: Sequence[SlotsKey] | None = None,
) -> BodyOutputs:
    """Collects the outputs of a trace, of these variables or of all that it updates."""
    moves = capture.moves
    return BodyOutputs(
        arrays,
        [list(update.operands) for update in capture.updates],
        [moves.values[key][1] for key in (moves.values if moved is None else moved)],
        [moves.slots[key][2] for key in (moves.slots if slots is None else slots)],
        [lookup.ids for lookup in capture.lookups],
    )


@final
@dataclass(frozen=True, slots=True)
class TracedBody:
    """The body of one plan.

    ``moved`` and ``slots`` are the keys of the variables and slots that it updates
    itself, in order; ``program`` is None if the body must be traced again.
    """

    plan: Plan
    template: Template
    moved: list[int]
    slots: list[SlotsKey]
    program: BodyProgram | None

    def takes(self, values: Mapping[int, Any]) -> bool:
        """Whether the program was traced for such values of the variables."""
        if self.program is None:
            return True  # a new trace takes any
        kinds = {key: self.program.kind_of(("value", key)) for key in values}
        return all(
            kind is None
            or (kind.shape, kind.dtype) == (values[key].shape, values[key].dtype)
            for key, kind in kinds.items()
        )

    def replayed(self) -> TracedBody:
        """Returns this body without its program."""
        return replace(self, program=None)

    def __call__(
        self,
        inputs: Sequence[Any],
        leaves: Sequence[Any],
        values: Mapping[int, Any],
        rows: Sequence[Any] = (),
        slots: Mapping[SlotsKey, list[Any]] | None = None,
    ) -> BodyOutputs:
        """Computes the outputs, in a trace of jax.

        Args:
            leaves: Of the elements that it draws.
            values: Of the variables that it reads, by key.
            rows: Of its lookups.

        Raises:
            RuntimeError: The body does something else than in its first trace.
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
        made: BodyOutputs = self.program(inputs, known)
        return made

    def _again(
        self,
        inputs: Sequence[Any],
        leaves: Sequence[Any],
        values: Mapping[int, Any],
        rows: Sequence[Any],
        slots: Mapping[SlotsKey, list[Any]],
    ) -> BodyOutputs:
        drawn = self.template.drawn(leaves)
        feed = Replay(self.plan.function, dict(values), drawn, rows, slots)
        capture = Capture(feed, self.template.iterators)
        with printed_before():
            structure, arrays = self.template.run(capture, inputs)
        self.plan.require_same(capture, structure)
        return outputs_of(capture, arrays, self.moved, self.slots)
