"""What slots look like, numbered, and what the rows of a variable and of its slots do.

One `SlotLayouts` belongs to one optimizer. It knows what the transformation keeps
beside a variable (by shapes alone, nothing is computed) and says in whose name a
failure is. Layouts have numbers, so that variables which look alike share programs.

An update of some rows is made here, too, with all that XLA is told of its kind
(`_row_programs`): the shapes of what it takes and gives, and the function that is
compiled.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.extend.core
import numpy as np

from zstrat.errors import BusyError, InvalidArgumentError

from ._slots import LAYOUTS, SlotArray, Slots

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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

    @property
    def is_wide(self) -> bool:
        """Whether it is traced and run with 64 bits."""
        return self.rule.tree.wide


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
        """The number of the layout that a new variable's slots have.

        Raises:
            InvalidArgumentError: The transformation cannot be traced for this shape.
            BusyError: Too many shapes have been compiled for.
        """
        key = (rule, cell.shape, cell.dtype)
        number = self._initial.get(key)
        if number is None:
            with precision(rule.tree.wide), self.words(cell), self.here():
                kinds = rule.kinds(cell.shape[0] if cell.shape else None)
            about = tuple([SlotArray(slot.name, slot.rows) for slot in rule.slots])
            layout = SlotLayout(spec(cell), rule, tuple(map(spec, kinds)), about)
            number = self._initial[key] = self.number(layout)
        return number

    def adopted(self, unbound: Unbound, rule: LeafRule, cell: Cell) -> Slots:
        """Slots that were loaded before anybody knew the rule.

        Raises:
            InvalidArgumentError: They are not what the rule keeps, or not all of it.
        """
        layout = self._layouts[self.initial(rule, cell)]
        pairs = zip(layout.about, layout.leaves, strict=True)
        wanted = [(leaf, tuple(s.shape), np.dtype(s.dtype)) for leaf, s in pairs]
        cells = unbound.taken(wanted, f"optimizer {self.name!r}")
        leaves = tuple(map(spec, cells))
        number = self.number(SlotLayout(layout.value, rule, leaves, layout.about))
        return Slots(cells, layout.about, number)

    def number(self, layout: SlotLayout) -> int:
        """
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


def precision(wide: bool) -> Context:
    """Without this, jax would take a float64 variable and give back a float32 one."""
    return cast("Context", jax.enable_x64(True)) if wide else contextlib.nullcontext()


def spec(array: Any) -> Shape:
    """Without a weak type, which would make equal slots look different."""
    return shape(array.shape, array.dtype)


def shape(dims: tuple[int, ...], dtype: Any) -> Shape:
    return jax.ShapeDtypeStruct(dims, dtype)  # type: ignore[no-untyped-call]


def operands_of(rule: LeafRule) -> tuple[Shape, ...]:
    """What the operands that it takes look like."""
    kinds = rule.tree.cut().operand_kinds
    return tuple([spec(kinds[number]) for number in rule.uses])


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What a row of a variable and of its slots looks like, and the other slots.

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

    @property
    def is_wide(self) -> bool:
        """Whether it is traced and run with 64 bits."""
        return self.rule.tree.wide

    def merge(self, rows: Iterable[Any], shared: Iterable[Any]) -> list[Any]:
        """The leaves in the order of the state."""
        rows, shared = iter(rows), iter(shared)
        return [next(rows if has else shared) for has in self.rows]

    def split(self, leaves: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """Inverse of `merge`."""
        pairs = list(zip(leaves, self.rows, strict=True))
        return [x for x, has in pairs if has], [x for x, has in pairs if not has]


def update_of(layout: RowLayout) -> Any:
    """``(value, rows, shared, operands, gradient, scratch) -> ([value, *rows],
    shared)``."""

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


def flat(update: Any, layout: RowLayout, size: int) -> Any:
    """The update of vectors of elements: in rows of 16 floats XLA computes row by row,
    in one long row half as long."""

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


def vector(rows: Shape) -> Shape:
    """The same elements in one row."""
    return shape((math.prod(rows.shape),), rows.dtype)


def arguments_of(layout: RowLayout, size: int) -> tuple[Any, ...]:
    """What `update_of` takes, for ``size`` rows."""
    value, *rows, gradient = (rows_of(size, row) for row in layout.gathered)
    operands = list(operands_of(layout.rule))
    return value, rows, layout.shared, operands, gradient, [value, *rows]


def row_layout(layout: SlotLayout, gradient: np.dtype) -> RowLayout:
    """
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


def is_apart(jaxpr: jax.extend.core.Jaxpr, layout: RowLayout) -> bool:
    """Whether no slot without rows is computed from any row; operands are not. Errs on
    the safe side: what an inner function returns is taken to depend on all that it is
    given."""
    shared = len(layout.shared) + len(layout.rule.uses)
    first = len(layout.gathered) - 1  # value and slots come before, gradient behind
    tainted = {*jaxpr.invars[:first], *jaxpr.invars[first + shared :]}
    for equation in jaxpr.eqns:
        variables = [v for v in equation.invars if isinstance(v, jax.extend.core.Var)]
        if not tainted.isdisjoint(variables):
            tainted.update(equation.outvars)
    outputs = jaxpr.outvars[len(jaxpr.outvars) - len(layout.shared) :]
    return not any(isinstance(v, jax.extend.core.Var) and v in tainted for v in outputs)


def rows_of(size: int, row: Shape) -> Shape:
    """So many of these rows."""
    return shape((size, *row.shape), row.dtype)


def nbytes_of(row: Shape) -> int:
    return int(math.prod(row.shape) * np.dtype(row.dtype).itemsize)
