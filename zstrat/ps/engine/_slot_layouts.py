"""What the slots of variables look like, numbered.

One `SlotLayouts` belongs to one optimizer. It knows what the transformation keeps
beside a variable (by shapes alone, nothing is computed) and names the optimizer in what
goes wrong. Layouts have numbers, so that variables which look alike share programs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from zstrat.errors import BusyError, InvalidArgumentError

from ._slots import LAYOUTS, SlotArray, Slots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.optimizers import LeafRule
    from zstrat.ps.store._cell import Cell

    from ._slots import Unbound

Shape = jax.ShapeDtypeStruct
Context = contextlib.AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """What the slots of a variable look like, and the rule that moves it, of all that
    are moved alike."""

    value: Shape
    rule: LeafRule
    leaves: tuple[Shape, ...]
    about: tuple[SlotArray, ...]

    @property
    def by_rows(self) -> bool:
        """Whether updates of some rows are possible."""
        return not self.rule.row_dependence


class SlotLayouts:
    """The layouts of one optimizer, by number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._device = jax.local_devices(backend="cpu")[0]
        self._numbers: dict[SlotLayout, int] = {}
        self._layouts: list[SlotLayout] = []
        self._initial: dict[tuple[LeafRule, tuple[int, ...], np.dtype], int] = {}

    def __getitem__(self, number: int) -> SlotLayout:
        return self._layouts[number]

    def initial(self, rule: LeafRule, cell: Cell) -> int:
        """Returns the number of the layout that a new variable's slots have.

        Raises:
            InvalidArgumentError: The transformation cannot be traced for this shape.
            BusyError: Too many shapes have been compiled for.
        """
        dims = cell.shape
        if cell.grows:  # one layout for all heights
            dims = (rule.kind.shape[0], *dims[1:])
        key = (rule, dims, cell.dtype)
        number = self._initial.get(key)
        if number is None:
            with rule.tree.arithmetic(), self.words(cell), self.here():
                kinds = rule.kinds(dims[0] if dims else None)
            about = tuple([SlotArray(slot.name, slot.rows) for slot in rule.slots])
            value = shape(dims, cell.dtype)
            layout = SlotLayout(value, rule, tuple(map(spec, kinds)), about)
            number = self._initial[key] = self.number(layout)
        return number

    def adopted(self, unbound: Unbound, rule: LeafRule, cell: Cell) -> Slots:
        """Slots that were loaded before their update rule was known.

        Raises:
            InvalidArgumentError: They are not what the rule keeps, or not all of it.
        """
        layout = self._layouts[self.initial(rule, cell)]
        pairs = zip(layout.about, layout.leaves, strict=True)
        wanted = [(leaf, tuple(s.shape), np.dtype(s.dtype)) for leaf, s in pairs]
        cells = unbound.taken(wanted, f"optimizer {self.name!r}")
        # With the heights of the layout, which those of a table do not have.
        leaves = tuple(
            shape(dims, cell.dtype)
            for cell, (_, dims, _) in zip(cells, wanted, strict=True)
        )
        number = self.number(SlotLayout(layout.value, rule, leaves, layout.about))
        return Slots(cells, layout.about, number)

    def number(self, layout: SlotLayout) -> int:
        """Returns the number of a layout; a new one gets the next.

        Raises:
            BusyError: Too many shapes have been compiled for.
        """
        number = self._numbers.get(layout)
        if number is None:
            if len(self._layouts) >= LAYOUTS:
                raise BusyError(
                    f"{LAYOUTS} shapes have optimizer slots in this session already"
                )
            number = self._numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return number

    def here(self) -> Context:
        """A parameter server computes on the CPU, whatever else the machine has."""
        return cast("Context", jax.default_device(self._device))

    @contextlib.contextmanager
    def words(self, cell: Cell) -> Iterator[None]:
        """Names the optimizer in what goes wrong while it is traced or compiled."""
        try:
            yield
        except Exception as error:  # goes to the caller, with the optimizer's name
            raise InvalidArgumentError(
                f"optimizer {self.name!r} cannot be applied to {cell.dtype.name}"
                f"{list(cell.shape)}: {type(error).__name__}: {error}"
            ) from error


def spec(array: Any) -> Shape:
    """Returns the shape and dtype without a weak type, which would make equal slots
    look different."""
    return shape(array.shape, array.dtype)


def shape(dims: tuple[int, ...], dtype: Any) -> Shape:
    return jax.ShapeDtypeStruct(dims, dtype)  # type: ignore[no-untyped-call]


def operands_of(rule: LeafRule) -> tuple[Shape, ...]:
    """Describes the operands that it takes."""
    kinds = rule.tree.cut().operand_kinds
    return tuple([spec(kinds[number]) for number in rule.uses])
