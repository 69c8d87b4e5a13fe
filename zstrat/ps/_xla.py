"""optax behind XLA: the only module that imports optax, and never at start-up.

`Programs` holds those of one optimizer. A program updates one variable: ``(value,
slots, gradient) -> (value, slots)``, with value and slots donated. It is compiled ahead
of its first use, so that a transformation which cannot be traced for a shape is refused
before anything has changed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import optax

from zstrat.errors import BusyError, InvalidArgumentError

from ._cell import Cell
from ._slots import LAYOUTS, Leaf, Slots, Step, is_wide

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

Shapes = tuple[jax.ShapeDtypeStruct, ...]
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

    def step(self, value: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = self.update(gradient, state, value)
        return optax.apply_updates(value, updates), state


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the slots of a variable look like; equal ones share programs."""

    value: jax.ShapeDtypeStruct
    structure: Any
    leaves: Shapes
    about: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled update. ``after`` is the layout of the slots that it leaves."""

    call: Any
    after: int
    wide: bool

    def start(self, optimizer: int, step: Step) -> Any:
        """Hands the work to XLA, which may do it later; returns the new value."""
        cell, slots = step.cell, step.slots[optimizer]
        with _precision(self.wide):
            given = tuple([leaf.give() for leaf in slots.cells])
            value, leaves = self.call(cell.give(), given, step.gradient)
        cell.take_back(value)
        if slots.layout == self.after:
            for leaf, new in zip(slots.cells, leaves, strict=True):
                leaf.take_back(new)
        else:
            slots.cells = tuple(map(Cell.on_device, leaves))
            slots.layout = self.after
        return value


class Programs:
    """The programs of one optimizer, by what they were compiled for."""

    def __init__(
        self, optimizer: int, name: str, transformation: Transformation
    ) -> None:
        self._optimizer, self._name = optimizer, name
        self._transformation = transformation
        self._device = jax.local_devices(backend="cpu")[0]
        self._programs: dict[object, Program] = {}
        self._initials: dict[object, tuple[Any, int]] = {}
        self._numbers: dict[_Layout, int] = {}
        self._layouts: list[_Layout] = []

    @property
    def count(self) -> int:
        """How many have been compiled."""
        return len(self._programs) + len(self._initials)

    def has(self, layout: int, gradient: np.dtype) -> bool:
        """Whether the program for slots of this layout is compiled."""
        return (layout, gradient) in self._programs

    def prepare(self, step: Step) -> None:
        """Makes missing slots, and the program if it is the first of its kind.

        Raises:
            InvalidArgumentError: The transformation cannot be traced for this shape.
            BusyError: Too many shapes have been compiled for.
        """
        if self._optimizer not in step.slots:
            step.slots[self._optimizer] = self._initial(step.cell)
        self._program(step)

    def apply(self, steps: Sequence[Step]) -> None:
        """Updates values and slots, and waits until they are there."""
        started: list[tuple[Step, Any]] = []
        try:
            for step in steps:
                started.append((step, None))
                value = self._program(step).start(self._optimizer, step)
                started[-1] = (step, value)
            for _, value in started:
                value.block_until_ready()
        except Exception as error:
            # Goes to the caller. Only XLA itself can fail here (it is out of memory,
            # say), and it may have been writing in place: what it had is lost.
            for step, value in started:
                if value is None and _is_whole(step.cell.give()):
                    continue
                step.cell.lose(str(error))
                step.slots.pop(self._optimizer, None)
            raise

    def _initial(self, cell: Cell) -> Slots:
        key = (cell.shape, cell.dtype)
        entry = self._initials.get(key)
        if entry is None:
            entry = self._initials[key] = self._compile_initial(cell)
        call, layout = entry
        with _precision(is_wide(cell.dtype)):
            leaves = call(cell.give())
        return Slots(
            tuple(map(Cell.on_device, leaves)), self._layouts[layout].about, layout
        )

    def _program(self, step: Step) -> Program:
        key = (step.slots[self._optimizer].layout, step.gradient.dtype)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compile(step)
        return program

    def _compile_initial(self, cell: Cell) -> tuple[Any, int]:
        init = self._transformation.init

        def initial(value: Any) -> tuple[Any, ...]:
            # Copies, because a leaf that *is* the value (an average that starts there)
            # would be donated twice by the first step.
            return tuple(jnp.copy(leaf) for leaf in jax.tree.leaves(init(value)))

        value = _spec(cell)
        with _precision(is_wide(cell.dtype)), self._words(cell), self._here():
            structure = jax.tree.structure(jax.eval_shape(init, value))
            leaves = tuple(map(_spec, jax.eval_shape(initial, value)))
            call = jax.jit(initial).lower(value).compile()
            about = _about(init, value)
        return call, self._number(_Layout(value, structure, leaves, about))

    def _compile(self, step: Step) -> Program:
        layout = self._layouts[step.slots[self._optimizer].layout]

        def update(value: Any, leaves: Any, gradient: Any) -> tuple[Any, Any]:
            state = jax.tree.unflatten(layout.structure, leaves)
            new, state = self._transformation.step(value, state, gradient)
            leaves, structure = jax.tree.flatten(state)
            if structure != layout.structure:
                raise TypeError(
                    f"its state changes from {layout.structure} to {structure}"
                )
            return new, tuple(leaves)

        wide = is_wide(step.cell.dtype)
        gradient = _spec(step.gradient)
        with _precision(wide), self._words(step.cell), self._here():
            new, leaves = jax.eval_shape(update, layout.value, layout.leaves, gradient)
            if _spec(new) != layout.value:
                raise TypeError(f"it turns a {layout.value} into a {_spec(new)}")
            after = tuple(map(_spec, leaves))
            # Slots whose dtype changes (a bfloat16 variable with float32 gradients, in
            # its first step) have no output that they could be donated to.
            donated = (0, 1) if after == layout.leaves else (0,)
            jitted = jax.jit(update, donate_argnums=donated)
            call = jitted.lower(layout.value, layout.leaves, gradient).compile()
        about = layout.about
        number = self._number(_Layout(layout.value, layout.structure, after, about))
        return Program(call, number, wide)

    def _number(self, layout: _Layout) -> int:
        number = self._numbers.get(layout)
        if number is None:
            if len(self._layouts) >= LAYOUTS:
                raise BusyError(
                    f"{LAYOUTS} shapes have optimizer slots in this session already"
                )
            number = self._numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return number

    def _here(self) -> Context:
        """A parameter server computes on the CPU, whatever else the machine has."""
        return cast("Context", jax.default_device(self._device))

    @contextlib.contextmanager
    def _words(self, cell: Cell) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # goes to the caller, with the optimizer's name
            raise InvalidArgumentError(
                f"optimizer {self._name!r} cannot be applied to {cell.dtype.name}"
                f"{list(cell.shape)}: {type(error).__name__}: {error}"
            ) from error


def _about(init: Any, value: jax.ShapeDtypeStruct) -> tuple[Leaf, ...]:
    """The leaves of ``init(value)``: those that grow by a row with the variable have
    its rows."""
    found, _ = jax.tree_util.tree_flatten_with_path(jax.eval_shape(init, value))
    names = [jax.tree_util.keystr(path) for path, _ in found]
    here: list[tuple[int, ...]] = [tuple(leaf.shape) for _, leaf in found]
    if not value.shape:
        return tuple(Leaf(name, False) for name in names)
    more = jax.ShapeDtypeStruct((value.shape[0] + 1, *value.shape[1:]), value.dtype)  # type: ignore[no-untyped-call]
    there = [tuple(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(init, more))]
    return tuple(
        Leaf(name, a != b and b == (more.shape[0], *a[1:]))
        for name, a, b in zip(names, here, there, strict=True)
    )


def _precision(wide: bool) -> Context:
    """Without this, jax would take a float64 variable and give back a float32 one."""
    return cast("Context", jax.enable_x64(True)) if wide else contextlib.nullcontext()


def _is_whole(value: object) -> bool:
    return not (isinstance(value, jax.Array) and value.is_deleted())


def _spec(array: Any) -> jax.ShapeDtypeStruct:
    """Without a weak type, which would make equal slots look different."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]
