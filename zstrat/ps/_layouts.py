"""What slots look like, numbered, so that variables which look alike share programs.

One `Layouts` belongs to one optimizer. It knows what the transformation makes of a
variable (by shapes alone, nothing is computed) and says in whose name a failure is.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import optax

from zstrat.errors import BusyError, InvalidArgumentError

from ._slots import LAYOUTS, Leaf, is_wide

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from ._cell import Cell

Shape = jax.ShapeDtypeStruct
Context = contextlib.AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class Transformation:
    """An optax transformation, with its functions checked to be there."""

    init: Any
    update: Any

    @staticmethod
    def check(name: str, loaded: object) -> Transformation:
        """
        Raises:
            InvalidArgumentError: ``loaded`` is no optax transformation.
        """
        if not isinstance(loaded, optax.GradientTransformation):
            raise InvalidArgumentError(
                f"optimizer {name!r}: expected an optax.GradientTransformation, got "
                f"{type(loaded).__module__}.{type(loaded).__qualname__}"
            )
        return Transformation(loaded.init, loaded.update)

    def leaves(self, value: Any) -> tuple[Any, ...]:
        """The state of a new variable, flat. Copies, because a leaf that *is* the value
        (an average that starts there) would be donated twice by the first step."""
        return tuple(jnp.copy(leaf) for leaf in jax.tree.leaves(self.init(value)))

    def step(
        self, structure: Any, value: Any, leaves: Any, gradient: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """One update of a value and of the leaves of its state."""
        state = jax.tree.unflatten(structure, leaves)
        updates, state = self.update(gradient, state, value)
        leaves, after = jax.tree.flatten(state)
        if after != structure:
            raise TypeError(f"its state changes from {structure} to {after}")
        return optax.apply_updates(value, updates), tuple(leaves)


@dataclass(frozen=True, slots=True)
class Layout:
    """What the slots of a variable look like.

    ``by_rows``: every leaf has the variable's rows or does not depend on how many there
    are, so that updates of some rows are possible.
    """

    value: Shape
    structure: Any
    leaves: tuple[Shape, ...]
    about: tuple[Leaf, ...]
    by_rows: bool


class Layouts:
    """The layouts of one optimizer, by number."""

    def __init__(self, name: str, transformation: Transformation) -> None:
        self.name, self.transformation = name, transformation
        self._device = jax.local_devices(backend="cpu")[0]
        self._numbers: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._initial: dict[tuple[tuple[int, ...], np.dtype], int] = {}

    def __getitem__(self, number: int) -> Layout:
        return self._layouts[number]

    def initial(self, cell: Cell) -> int:
        """The number of the layout that a new variable's slots have.

        Raises:
            InvalidArgumentError: The transformation cannot be traced for this shape.
            BusyError: Too many shapes have been compiled for.
        """
        key = (cell.shape, cell.dtype)
        number = self._initial.get(key)
        if number is None:
            with precision(is_wide(cell.dtype)), self.words(cell), self.here():
                layout = _initial(self.transformation, spec(cell))
            number = self._initial[key] = self.number(layout)
        return number

    def number(self, layout: Layout) -> int:
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


def _initial(transformation: Transformation, value: Shape) -> Layout:
    state = jax.eval_shape(transformation.init, value)
    found, structure = jax.tree_util.tree_flatten_with_path(state)
    leaves = tuple(map(spec, jax.eval_shape(transformation.leaves, value)))
    names = [jax.tree_util.keystr(path) for path, _ in found]
    if not value.shape:
        about = tuple(Leaf(name, rows=False) for name in names)
        return Layout(value, structure, leaves, about, by_rows=False)
    more = shape((value.shape[0] + 1, *value.shape[1:]), value.dtype)
    grown = [leaf.shape for leaf in jax.eval_shape(transformation.leaves, more)]
    pairs = list(zip(leaves, grown, strict=True))
    rows = [_has_rows(leaf.shape, after, value.shape[0]) for leaf, after in pairs]
    about = tuple(Leaf(name, has) for name, has in zip(names, rows, strict=True))
    by_rows = all(
        has or leaf.shape == after
        for has, (leaf, after) in zip(rows, pairs, strict=True)
    )
    return Layout(value, structure, leaves, about, by_rows)


def _has_rows(before: tuple[int, ...], after: tuple[int, ...], rows: int) -> bool:
    return before[:1] == (rows,) and after == (rows + 1, *before[1:])
