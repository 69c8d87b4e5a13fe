"""What is compiled for gradients of rows: a kind for all tables whose rows look alike,
and in it a program for each bucket of rows.

A kind owns the memory that rows are gathered into, aligned so that XLA reads it without
a copy. What a program leaves in one call is lent to it again as memory for the next
(donated): fresh memory costs as much as all of the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.rows import aligned

from ._arithmetic import CALL_BYTES, FEWEST, as_rows, bucket, sizes
from ._layouts import (
    RowLayout,
    Shape,
    SlotLayouts,
    arguments_of,
    flat,
    is_apart,
    nbytes_of,
    precision,
    row_layout,
    rows_of,
    shape,
    spec,
    update_of,
    vector,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zstrat.optimizers import LeafRule
    from zstrat.ps.store._cell import Cell

ROUNDS: Final = 3
"""How often the dtypes of slots may change before they have to stay as they are."""


@dataclass(slots=True)
class RowProgram:
    """A program compiled for some number of rows.

    ``inputs`` are where value, slots with rows and gradient are put, ``opaque`` the
    same as vectors of rows, ``vectors`` as vectors of elements.
    ``scratch`` is what the last call left, or None: then ``memory`` makes it.
    """

    call: Any
    vectors: list[np.ndarray]
    inputs: list[np.ndarray]
    opaque: list[np.ndarray]
    memory: Callable[[], Any]
    scratch: Any = None

    def run(
        self, shared: Sequence[np.ndarray], operands: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The new rows, as opaque vectors, of value and slots, which are valid until
        the next call; and the new slots without rows."""
        value, *rows, gradient = self.vectors
        # Donated, so it is gone whether the call succeeds or fails.
        scratch, self.scratch = self.scratch, None
        if scratch is None:
            scratch = self.memory()
        moved, others = self.call(
            value, rows, list(shared), list(operands), gradient, scratch
        )
        fresh = [
            as_rows(np.asarray(each).reshape(rows.shape))
            for each, rows in zip(moved, self.inputs, strict=False)
        ]
        slots = [np.asarray(each) for each in others]
        self.scratch = moved
        return fresh, slots


@dataclass(slots=True)
class RowKind:
    """All updates whose rows look alike.

    ``is_apart``: the slots without rows are computed without looking at any row.
    ``most``: how many rows a call takes.
    """

    layout: RowLayout
    is_apart: bool
    most: int
    memory: list[np.ndarray]
    programs: dict[int, RowProgram] = field(default_factory=dict)

    def sizes(self, rows: int) -> list[int]:
        """The programs of the calls that so many rows need, in order."""
        return sizes(rows, self.most)


class RowKinds:
    """The kinds and programs of one optimizer."""

    def __init__(self, layouts: SlotLayouts) -> None:
        self.layouts = layouts
        self._kinds: dict[tuple[int, np.dtype], RowKind] = {}
        self._alike: dict[RowLayout, RowKind] = {}
        self._steady: dict[tuple[int, np.dtype], int] = {}
        self._initials: dict[tuple[LeafRule, Shape, int], Any] = {}

    @property
    def count(self) -> int:
        """How many programs have been compiled."""
        return len(self._initials) + sum(
            len(kind.programs) for kind in list(self._alike.values())
        )

    def get(self, layout: int, gradient: np.dtype) -> RowKind | None:
        """The kind of updates of variables with such slots, if it is known."""
        return self._kinds.get((layout, gradient))

    def kind(self, number: int, gradient: np.dtype, cell: Cell) -> RowKind:
        """The same; slots of this layout keep their dtypes (`steady`)."""
        key = (number, gradient)
        kind = self._kinds.get(key)
        if kind is None:
            layout = row_layout(self.layouts[number], gradient)
            kind = self._alike.get(layout)
            if kind is None:
                kind = self._alike[layout] = self._new(layout, cell)
            self._kinds[key] = kind
        return kind

    def program(self, kind: RowKind, size: int, cell: Cell) -> RowProgram:
        """The program for ``size`` rows; ``cell`` is named if it cannot be compiled."""
        program = kind.programs.get(size)
        if program is None:
            program = kind.programs[size] = self._compile(kind, size, cell)
        return program

    def steady(self, number: int, gradient: np.dtype, cell: Cell) -> int:
        """The layout that slots have after updates with such gradients: that of a
        bfloat16 variable changes with its first float32 gradient.

        Raises:
            InvalidArgumentError: The transformation cannot be applied to some rows.
        """
        key = (number, gradient)
        if key not in self._steady:
            with precision(self.layouts[number].is_wide), self.layouts.words(cell):
                self._steady[key] = self._settle(number, gradient)
        return self._steady[key]

    def initial(self, rule: LeafRule, cell: Cell) -> tuple[Any, int]:
        """A program that makes the first slots of the rows of a variable, and how many
        it takes at a time."""
        row = shape(cell.shape[1:], cell.dtype)
        size = bucket(cell.shape[0], _most([row]))
        call = self._initials.get((rule, row, size))
        if call is None:
            jitted = jax.jit(rule.init)
            with (
                precision(rule.tree.wide),
                self.layouts.words(cell),
                self.layouts.here(),
            ):
                call = jitted.lower(rows_of(size, row)).compile()
            self._initials[rule, row, size] = call
        return call, size

    def _settle(self, number: int, gradient: np.dtype) -> int:
        for _ in range(ROUNDS):
            layout = self.layouts[number]
            rows = row_layout(layout, gradient)
            (new, *moved), shared = jax.eval_shape(
                update_of(rows), *arguments_of(rows, FEWEST)
            )
            if spec(new) != rows_of(FEWEST, rows.value):
                raise TypeError(f"it turns rows of {rows.value} into {spec(new)}")
            after = [
                shape(leaf.shape, new.dtype)
                for leaf, new in zip(
                    layout.leaves, rows.merge(moved, shared), strict=True
                )
            ]
            if tuple(after) == layout.leaves:
                return number
            number = self.layouts.number(replace(layout, leaves=tuple(after)))
        raise TypeError("the dtypes of its state change with every update")

    def _new(self, layout: RowLayout, cell: Cell) -> RowKind:
        most = _most(layout.gathered)
        memory = [aligned((most * nbytes_of(row),), _BYTE) for row in layout.gathered]
        with precision(layout.is_wide), self.layouts.words(cell):
            jaxpr = jax.make_jaxpr(update_of(layout))(
                *arguments_of(layout, FEWEST)
            ).jaxpr
        return RowKind(layout, is_apart(jaxpr, layout), most, memory)

    def _compile(self, kind: RowKind, size: int, cell: Cell) -> RowProgram:
        layout = kind.layout
        update = update_of(layout)
        with (
            precision(layout.is_wide),
            self.layouts.words(cell),
            self.layouts.here(),
        ):
            arguments = arguments_of(layout, size)
            # A shape that changes with the number of rows shows only here.
            moved, shared = jax.eval_shape(update, *arguments)
            if [*map(spec, moved), *map(spec, shared)] != [
                *(rows_of(size, row) for row in layout.gathered[:-1]),
                *layout.shared,
            ]:
                raise TypeError("its state changes with the number of rows")
            jitted = jax.jit(
                flat(update, layout, size), donate_argnums=5, keep_unused=True
            )
            value, rows, others, operands, gradient, scratch = arguments
            scratch = list(map(vector, scratch))
            call = jitted.lower(
                vector(value),
                list(map(vector, rows)),
                others,
                operands,
                vector(gradient),
                scratch,
            ).compile()

        def zeros() -> list[Any]:
            with self.layouts.here():
                return [jnp.zeros(each.shape, each.dtype) for each in scratch]

        inputs = [
            memory[: size * nbytes_of(row)].view(row.dtype).reshape((size, *row.shape))
            for memory, row in zip(kind.memory, layout.gathered, strict=True)
        ]
        return RowProgram(
            call,
            [x.reshape(-1) for x in inputs],
            inputs,
            [as_rows(x) for x in inputs],
            zeros,
        )


_BYTE: Final = np.dtype(np.uint8)


def _most(rows: Iterable[Shape]) -> int:
    return max(1, CALL_BYTES // max(1, *(nbytes_of(row) for row in rows)))
