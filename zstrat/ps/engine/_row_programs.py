"""Compiles updates of rows: a kind for all tables whose rows have the same layout, with
a program for each bucket of numbers of rows.

`RowLayout` describes a kind to XLA: the shapes of what an update takes and returns. A
kind owns the memory that rows are gathered into, aligned so that XLA reads it without a
copy. The results of one call are donated to the next call as its memory: fresh memory
costs as much as all of the arithmetic.

Elementwise updates in float32, as of SGD, Adagrad and Adam, need no program for a
number of rows where `zstrat.native` is built: its loops update rows where they are
(`RowLoop`).
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
from zstrat.native import IS_BUILT
from zstrat.optimizers import row_operations

from ._arithmetic import CALL_BYTES, FEWEST, as_rows, bucket, sizes
from ._flat_updates import Shape, SlotLayout, SlotLayouts, operands_of, shape, spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zstrat.native import LoopProgram
    from zstrat.optimizers import LeafRule
    from zstrat.ps.store._cell import Cell

_BYTE: Final = np.dtype(np.uint8)
NEW_ROWS: Final = 64
"""The number of rows of the smaller of the two programs that make slots of new rows.
Both are compiled before rows are added, as compiling would hold up a push."""

ROUNDS: Final = 3
"""How often the dtypes of slots may change with updates before they have to stay as
they are."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The shapes and dtypes of one row of a variable and of its slots with rows, and of
    its other slots.

    ``leaves`` are in the order of the state: one row of each slot that has ``rows``,
    the whole of each other slot.
    """

    value: Shape
    rule: LeafRule
    leaves: tuple[Shape, ...]
    rows: tuple[bool, ...]
    gradient: Shape

    @property
    def gathered(self) -> list[Shape]:
        """The shapes of one row of each array that is gathered: value, slots with rows,
        gradient."""
        return [self.value, *self.split(self.leaves)[0], self.gradient]

    @property
    def shared(self) -> list[Shape]:
        return [
            leaf for leaf, has in zip(self.leaves, self.rows, strict=True) if not has
        ]

    def merge(self, rows: Iterable[Any], shared: Iterable[Any]) -> list[Any]:
        """Merges slots with rows and the other (shared) slots to leaves in the order of
        the state."""
        rows, shared = iter(rows), iter(shared)
        return [next(rows if has else shared) for has in self.rows]

    def split(self, leaves: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """Splits leaves of the state into slots with rows and shared slots; undoes
        `merge`."""
        pairs = list(zip(leaves, self.rows, strict=True))
        return [x for x, has in pairs if has], [x for x, has in pairs if not has]


@dataclass(slots=True)
class RowProgram:
    """An update compiled for some number of rows, with its memory.

    ``inputs`` is the memory for gathered rows of value, slots and gradient; ``opaque``
    are the same arrays as vectors of rows, ``vectors`` as vectors of elements.
    ``scratch`` are the results of the last call, which the next call overwrites; if
    None, ``memory`` allocates them.
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
        """Runs the program on the rows in ``inputs``. Returns the new rows of value and
        slots, as opaque vectors that are valid until the next call; and the new slots
        without rows."""
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
class RowLoop:
    """An update by compiled loops, of any number of rows.

    ``scalars`` computes, from the slots without rows and the operands, the constants of
    the loops and the new slots without rows; None if ``constants`` never change.
    """

    program: LoopProgram
    constants: np.ndarray
    scalars: Any

    def start(
        self, shared: Sequence[np.ndarray], operands: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the constants of an update, and the new slots without rows."""
        if self.scalars is None:
            return self.constants, []
        constants, slots = self.scalars(list(shared), list(operands))
        return np.asarray(constants), [np.asarray(each) for each in slots]


@dataclass(slots=True)
class RowKind:
    """The updates of tables whose rows have the same layout, and their programs.

    ``is_apart``: the slots without rows are not computed from any row. ``most``: the
    largest number of rows that one call takes. ``loop`` replaces programs, if it is not
    None.
    """

    layout: RowLayout
    is_apart: bool
    most: int
    loop: RowLoop | None
    memory: list[np.ndarray]
    programs: dict[int, RowProgram] = field(default_factory=dict)

    def sizes(self, rows: int) -> list[int]:
        """Returns the numbers of rows of the programs for all calls that ``rows`` rows
        need."""
        return sizes(rows, self.most)


class RowKinds:
    """The kinds of row updates of one optimizer, and their programs."""

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
            len(kind.programs) + (kind.loop is not None)
            for kind in list(self._alike.values())
        )

    def get(self, layout: int, gradient: np.dtype) -> RowKind | None:
        """Returns the kind of updates for slots of this layout and gradients of this
        dtype; None if it was not made yet."""
        return self._kinds.get((layout, gradient))

    def kind(self, number: int, gradient: np.dtype, cell: Cell) -> RowKind:
        """Returns the kind of updates for slots of the layout ``number``, which must be
        one that updates keep (`steady`); makes the kind if it is new."""
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
        """Returns the program of a kind for ``size`` rows; errors of its compilation
        name ``cell``."""
        program = kind.programs.get(size)
        if program is None:
            program = kind.programs[size] = self._compile(kind, size, cell)
        return program

    def steady(self, number: int, gradient: np.dtype, cell: Cell) -> int:
        """Returns the number of the layout that slots have after updates with such
        gradients: the dtypes for a bfloat16 variable change with its first float32
        gradient.

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
        """Returns whether both programs are compiled that make the initial slots for
        new rows of a growing cell."""
        row = shape(cell.shape[1:], cell.dtype)
        return all((rule, row, size) in self._initials for size in _new_sizes(row))

    def initial(self, rule: LeafRule, cell: Cell, count: int) -> tuple[Any, int]:
        """Returns a program that makes the initial slots for ``count`` rows of a
        variable, and the number of rows that one call of it takes."""
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
        with (
            layout.rule.tree.arithmetic(),
            self.layouts.naming(cell),
            self.layouts.on_cpu(),
        ):
            jaxpr = jax.make_jaxpr(_update_of(layout))(
                *_arguments_of(layout, FEWEST)
            ).jaxpr
            loop = _loop_of(layout) if IS_BUILT else None
        return RowKind(layout, _is_apart(jaxpr, layout), most, loop, memory)

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
    """Returns an update as a function for XLA: ``(value, rows, shared, operands,
    gradient, scratch) -> ([value, *rows], shared)``."""

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


def _loop_of(layout: RowLayout) -> RowLoop | None:
    """Returns the update as compiled loops; None if they cannot compute it."""
    # By shapes alone, an array without rows might look like one with rows.
    arrays = any(leaf.shape for leaf in layout.shared)
    if layout.gradient.dtype != np.float32 or arrays:
        return None
    operations = row_operations(
        layout.rule,
        (FEWEST, *layout.value.shape),
        tuple([np.dtype(leaf.dtype) for leaf in layout.leaves]),
    )
    if operations is None:
        return None
    operands = list(operands_of(layout.rule))
    call = jax.jit(operations.scalars).lower(layout.shared, operands).compile()
    if not operations.is_fixed:
        return RowLoop(operations.program, np.zeros(0, np.float32), call)
    constants, _ = call([], [])
    return RowLoop(operations.program, np.asarray(constants), None)


def _flat(update: Any, layout: RowLayout, size: int) -> Any:
    """Returns the update as a function of vectors of elements: for rows of 16 floats
    XLA computes row by row, which takes twice as long as one long vector."""

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
    """Returns the shape of the elements of all rows as one vector."""
    return shape((math.prod(rows.shape),), rows.dtype)


def _arguments_of(layout: RowLayout, size: int) -> tuple[Any, ...]:
    """Returns the shapes of the arguments of `_update_of`, for ``size`` rows."""
    value, *rows, gradient = (_rows_of(size, row) for row in layout.gathered)
    operands = list(operands_of(layout.rule))
    return value, rows, layout.shared, operands, gradient, [value, *rows]


def _row_layout(layout: SlotLayout, gradient: np.dtype) -> RowLayout:
    """Returns the layout of one row of variables that have these slots and such
    gradients.

    Raises:
        TypeError: Rows cannot be updated one by one.
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
    """Returns whether no slot without rows is computed from any row (operands do not
    count as rows). May err towards False: the results of an inner function are taken to
    depend on all its arguments."""
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
    """Returns the shape of ``size`` rows, each of the shape ``row``."""
    return shape((size, *row.shape), row.dtype)


def _nbytes_of(row: Shape) -> int:
    return int(math.prod(row.shape) * np.dtype(row.dtype).itemsize)


def _new_sizes(row: Shape) -> tuple[int, int]:
    most = _most([row])
    return min(NEW_ROWS, most), most


def _most(rows: Iterable[Shape]) -> int:
    return max(1, CALL_BYTES // max(1, *(_nbytes_of(row) for row in rows)))
