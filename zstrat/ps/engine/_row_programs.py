"""What is compiled for gradients of rows: a kind for all tables whose rows look alike,
and in it a program for each bucket of rows.

`RowLayout` describes a kind to XLA: the shapes of what an update takes and gives.
A kind owns the memory that rows are gathered into, aligned so that XLA reads it without
a copy. What a program leaves in one call is lent to it again as memory for the next
(donated): fresh memory costs as much as all of the arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from zstrat.memory import aligned

from ._arithmetic import CALL_BYTES, FEWEST, as_rows, bucket, sizes
from ._flat_updates import Shape, SlotLayout, SlotLayouts, operands_of, shape, spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zstrat.optimizers import LeafRule
    from zstrat.ps.store._cell import Cell

_BYTE: Final = np.dtype(np.uint8)
NEW_ROWS: Final = 64
"""Rows of the smaller one of the two programs that make slots of rows that are born:
both are there before the first, as compiling would hold up a push."""

ROUNDS: Final = 3
"""How often the dtypes of slots may change before they have to stay as they are."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The shapes and dtypes of a row of a variable and of its slots, and of the other
    slots.

    ``leaves`` are in the order of the state: one row of those that have ``rows``, all
    of the others.
    """

    value: Shape
    rule: LeafRule
    leaves: tuple[Shape, ...]
    rows: tuple[bool, ...]
    gradient: Shape

    @property
    def gathered(self) -> list[Shape]:
        """A row of all that is gathered: value, slots with rows, gradient."""
        return [self.value, *self.split(self.leaves)[0], self.gradient]

    @property
    def shared(self) -> list[Shape]:
        return [
            leaf for leaf, has in zip(self.leaves, self.rows, strict=True) if not has
        ]

    def merge(self, rows: Iterable[Any], shared: Iterable[Any]) -> list[Any]:
        """Returns the leaves in the order of the state."""
        rows, shared = iter(rows), iter(shared)
        return [next(rows if has else shared) for has in self.rows]

    def split(self, leaves: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """Undoes `merge`."""
        pairs = list(zip(leaves, self.rows, strict=True))
        return [x for x, has in pairs if has], [x for x, has in pairs if not has]


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
        """Returns the new rows, as opaque vectors, of value and slots, which are valid
        until the next call; and the new slots without rows."""
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
        # Its rows are scattered before the next call, which then may write there.
        self.scratch = moved
        return fresh, slots


@dataclass(slots=True)
class RowKind:
    """The updates whose rows look alike, and the programs that make them.

    ``is_apart``: the slots without rows are computed without looking at any row.
    ``most``: the largest number of rows that one call takes.
    """

    layout: RowLayout
    is_apart: bool
    most: int
    memory: list[np.ndarray]
    programs: dict[int, RowProgram] = field(default_factory=dict)

    def sizes(self, rows: int) -> list[int]:
        """Returns the size of the program of each call that ``rows`` rows need."""
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
        """Number of programs that have been compiled."""
        return len(self._initials) + sum(
            len(kind.programs) for kind in list(self._alike.values())
        )

    def get(self, layout: int, gradient: np.dtype) -> RowKind | None:
        """Returns the kind of updates of variables with such slots, if it is known."""
        return self._kinds.get((layout, gradient))

    def kind(self, number: int, gradient: np.dtype, cell: Cell) -> RowKind:
        """Returns the kind of updates of variables whose slots have the layout
        ``number``, which must be one that updates keep (`steady`); it is made if it is
        new."""
        key = (number, gradient)
        kind = self._kinds.get(key)
        if kind is None:
            layout = _row_layout(self.layouts[number], gradient)
            # By how rows look and not by number: tables of other heights share
            # programs.
            kind = self._alike.get(layout)
            if kind is None:
                kind = self._alike[layout] = self._new(layout, cell)
            self._kinds[key] = kind
        return kind

    def program(self, kind: RowKind, size: int, cell: Cell) -> RowProgram:
        """Returns the program for ``size`` rows; ``cell`` is named if it cannot be
        compiled."""
        program = kind.programs.get(size)
        if program is None:
            program = kind.programs[size] = self._compile(kind, size, cell)
        return program

    def steady(self, number: int, gradient: np.dtype, cell: Cell) -> int:
        """Returns the layout that slots have after updates with such gradients: that of
        a bfloat16 variable changes with its first float32 gradient.

        Raises:
            InvalidArgumentError: The transformation cannot be applied to some rows.
        """
        key = (number, gradient)
        if key not in self._steady:
            with (
                self.layouts[number].rule.tree.arithmetic(),
                self.layouts.naming(cell),
            ):
                self._steady[key] = self._settle(number, gradient)
        return self._steady[key]

    def has_initial(self, rule: LeafRule, cell: Cell) -> bool:
        """Returns whether the programs are there that make the first slots of any rows
        of a cell that grows."""
        row = shape(cell.shape[1:], cell.dtype)
        return all((rule, row, size) in self._initials for size in _new_sizes(row))

    def initial(self, rule: LeafRule, cell: Cell, count: int) -> tuple[Any, int]:
        """Returns a program that makes the first slots of ``count`` rows of a variable,
        and how many it takes at a time."""
        row = shape(cell.shape[1:], cell.dtype)
        # Two sizes for rows that are born, so that nothing is compiled in a push.
        if cell.grows:
            few, many = _new_sizes(row)
            size = few if count <= few else many
        else:
            size = bucket(count, _most([row]))
        call = self._initials.get((rule, row, size))
        if call is None:
            jitted = jax.jit(rule.init)
            with (
                rule.tree.arithmetic(),
                self.layouts.naming(cell),
                self.layouts.on_cpu(),
            ):
                call = jitted.lower(_rows_of(size, row)).compile()
            self._initials[rule, row, size] = call
        return call, size

    def _settle(self, number: int, gradient: np.dtype) -> int:
        for _ in range(ROUNDS):
            layout = self.layouts[number]
            rows = _row_layout(layout, gradient)
            (new, *moved), shared = jax.eval_shape(
                _update_of(rows), *_arguments_of(rows, FEWEST)
            )
            if spec(new) != _rows_of(FEWEST, rows.value):
                raise TypeError(f"it turns rows of {rows.value} into {spec(new)}")
            # Dtypes alone: the number of rows is that of this trace.
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
        # One piece of memory for programs of all sizes: calls come one after the other.
        memory = [aligned((most * _nbytes_of(row),), _BYTE) for row in layout.gathered]
        with layout.rule.tree.arithmetic(), self.layouts.naming(cell):
            jaxpr = jax.make_jaxpr(_update_of(layout))(
                *_arguments_of(layout, FEWEST)
            ).jaxpr
        return RowKind(layout, _is_apart(jaxpr, layout), most, memory)

    def _compile(self, kind: RowKind, size: int, cell: Cell) -> RowProgram:
        layout = kind.layout
        update = _update_of(layout)
        with (
            layout.rule.tree.arithmetic(),
            self.layouts.naming(cell),
            self.layouts.on_cpu(),
        ):
            arguments = _arguments_of(layout, size)
            # A shape that changes with the number of rows shows only here.
            moved, shared = jax.eval_shape(update, *arguments)
            if [*map(spec, moved), *map(spec, shared)] != [
                *(_rows_of(size, row) for row in layout.gathered[:-1]),
                *layout.shared,
            ]:
                raise TypeError("its state changes with the number of rows")
            # `keep_unused`: jax would drop the argument `scratch`, which no operation
            # reads.
            jitted = jax.jit(
                _flat(update, layout, size), donate_argnums=5, keep_unused=True
            )
            value, rows, others, operands, gradient, scratch = arguments
            scratch = list(map(_vector, scratch))
            call = jitted.lower(
                _vector(value),
                list(map(_vector, rows)),
                others,
                operands,
                _vector(gradient),
                scratch,
            ).compile()

        def zeros() -> list[Any]:
            with self.layouts.on_cpu():
                return [jnp.zeros(each.shape, each.dtype) for each in scratch]

        inputs = [
            memory[: size * _nbytes_of(row)].view(row.dtype).reshape((size, *row.shape))
            for memory, row in zip(kind.memory, layout.gathered, strict=True)
        ]
        return RowProgram(
            call,
            [x.reshape(-1) for x in inputs],
            inputs,
            [as_rows(x) for x in inputs],
            zeros,
        )


def _update_of(layout: RowLayout) -> Any:
    """Returns the function of an update: ``(value, rows, shared, operands, gradient,
    scratch) -> ([value, *rows], shared)``."""

    def update(
        value: Any, rows: Any, shared: Any, operands: Any, gradient: Any, scratch: Any
    ) -> tuple[Any, Any]:
        del scratch  # nothing but memory
        new, leaves = layout.rule.step(
            value, layout.merge(rows, shared), gradient, operands
        )
        rows, shared = layout.split(leaves)
        return [new, *rows], shared

    return update


def _flat(update: Any, layout: RowLayout, size: int) -> Any:
    """Returns the update as one of vectors of elements: in rows of 16 floats XLA
    computes row by row, which takes twice as long as one long row."""

    def flattened(
        value: Any, rows: Any, shared: Any, operands: Any, gradient: Any, scratch: Any
    ) -> Any:
        vectors = [value, *rows, gradient]
        shapes = [(size, *row.shape) for row in layout.gathered]
        value, *rows, gradient = [
            vector.reshape(dims) for vector, dims in zip(vectors, shapes, strict=True)
        ]
        moved, others = update(value, rows, shared, operands, gradient, scratch)
        return [each.reshape(-1) for each in moved], others

    return flattened


def _vector(rows: Shape) -> Shape:
    """Returns the shape of the same elements in one row."""
    return shape((math.prod(rows.shape),), rows.dtype)


def _arguments_of(layout: RowLayout, size: int) -> tuple[Any, ...]:
    """Returns what `_update_of` takes, for ``size`` rows."""
    value, *rows, gradient = (_rows_of(size, row) for row in layout.gathered)
    operands = list(operands_of(layout.rule))
    return value, rows, layout.shared, operands, gradient, [value, *rows]


def _row_layout(layout: SlotLayout, gradient: np.dtype) -> RowLayout:
    """Describes rows of variables that have these slots and such gradients.

    Raises:
        TypeError: Rows are not moved one by one.
    """
    if not layout.by_rows:
        raise TypeError(layout.rule.row_dependence)
    row = layout.value.shape[1:]
    return RowLayout(
        shape(row, layout.value.dtype),
        layout.rule,
        tuple(
            shape(leaf.shape[1:] if about.rows else leaf.shape, leaf.dtype)
            for leaf, about in zip(layout.leaves, layout.about, strict=True)
        ),
        tuple(about.rows for about in layout.about),
        shape(row, gradient),
    )


def _is_apart(jaxpr: jax.extend.core.Jaxpr, layout: RowLayout) -> bool:
    """Returns whether no slot without rows is computed from any row; operands are not.
    Errs on the safe side: what an inner function returns is taken to depend on all that
    it is given."""
    shared = len(layout.shared) + len(layout.rule.uses)
    first = len(layout.gathered) - 1  # value and slots come before, the gradient after
    tainted = {*jaxpr.invars[:first], *jaxpr.invars[first + shared :]}
    for equation in jaxpr.eqns:
        variables = [v for v in equation.invars if isinstance(v, jax.extend.core.Var)]
        if not tainted.isdisjoint(variables):
            tainted.update(equation.outvars)
    outputs = jaxpr.outvars[len(jaxpr.outvars) - len(layout.shared) :]
    return not any(isinstance(v, jax.extend.core.Var) and v in tainted for v in outputs)


def _rows_of(size: int, row: Shape) -> Shape:
    """Returns the shape of ``size`` such rows."""
    return shape((size, *row.shape), row.dtype)


def _nbytes_of(row: Shape) -> int:
    return int(math.prod(row.shape) * np.dtype(row.dtype).itemsize)


def _new_sizes(row: Shape) -> tuple[int, int]:
    most = _most([row])
    return min(NEW_ROWS, most), most


def _most(rows: Iterable[Shape]) -> int:
    return max(1, CALL_BYTES // max(1, *(_nbytes_of(row) for row in rows)))
