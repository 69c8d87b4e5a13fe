"""One program for all whole gradients of a push, where that is worth it.

A program of each variable (`_xla`) is started by itself and wakes threads of XLA's for
itself; six of them, for the layers of a small network, cost a fifth more than one that
updates all six. A large variable does not notice, and a program of very small ones is
dearer than they are, because XLA runs its parts on several threads. So pushes of a few
variables of some size are updated together, and all others one by one. Every element is
computed by the same operations either way.

A push that names other variables than the one before needs a program of its own, so
only so many sets of variables have one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import jax

from ._slot_layouts import SlotLayouts, operands_of, precision

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from ._slots import SlotStep

MAX_JOINT_VARIABLES: Final = 16
"""Variables of one program: it is compiled in as many tenths of a second at worst."""

MIN_JOINT_BYTES: Final = 2**20
MAX_JOINT_BYTES: Final = 64 * 2**20
"""Bytes of the values of such a push: below, starting several small programs is
cheaper; above, what starting them costs does not show."""

SETS: Final = 8
"""Sets of variables that have a program in common."""

Kinds = tuple[tuple[int, "np.dtype"], ...]
"""For each variable the layout of its slots, and the dtype of its gradient."""


@dataclass(slots=True)
class JointPrograms:
    """Those of one optimizer, by what they update."""

    optimizer: int
    layouts: SlotLayouts
    programs: dict[Kinds, Any] = field(default_factory=dict)

    def takes(self, steps: Sequence[SlotStep], kinds: Kinds) -> bool:
        """Whether these, whose slots keep their layouts, are updated together."""
        return (
            2 <= len(steps) <= MAX_JOINT_VARIABLES
            and MIN_JOINT_BYTES
            <= sum([step.cell.nbytes for step in steps])
            <= MAX_JOINT_BYTES
            and (kinds in self.programs or len(self.programs) < SETS)
            and len({step.rule.tree.wide for step in steps}) == 1
        )

    def prepare(self, steps: Sequence[SlotStep], kinds: Kinds) -> None:
        """Compiles; to be called `here` (`SlotLayouts`)."""
        if kinds in self.programs:
            return
        rules = [step.rule for step in steps]
        layouts = [self.layouts[number] for number, _ in kinds]
        given = (
            [layout.value for layout in layouts],
            [layout.leaves for layout in layouts],
            [
                jax.ShapeDtypeStruct(step.gradient.shape, dtype)  # type: ignore[no-untyped-call]
                for step, (_, dtype) in zip(steps, kinds, strict=True)
            ],
            [operands_of(rule) for rule in rules],
        )

        def update(values: Any, slots: Any, gradients: Any, operands: Any) -> Any:
            each = zip(rules, values, slots, gradients, operands, strict=True)
            return [rule.step(*of_one) for rule, *of_one in each]

        with precision(rules[0].tree.wide), self.layouts.here():
            jitted = jax.jit(update, donate_argnums=(0, 1))
            self.programs[kinds] = jitted.lower(*given).compile()

    def start(self, steps: Sequence[SlotStep], kinds: Kinds) -> list[Any]:
        """Hands the work to XLA, which may do it later; returns the new values."""
        slots = [step.slots[self.optimizer] for step in steps]
        with precision(steps[0].rule.tree.wide):
            made = self.programs[kinds](
                [step.cell.give() for step in steps],
                [tuple([leaf.give() for leaf in each.cells]) for each in slots],
                [step.gradient for step in steps],
                [step.operands for step in steps],
            )
        for step, each, (value, leaves) in zip(steps, slots, made, strict=True):
            step.cell.take_back(value)
            for leaf, new in zip(each.cells, leaves, strict=True):
                leaf.take_back(new)
        return [value for value, _ in made]
