"""optax behind XLA: the only module that imports optax, and never at start-up.

`Programs` holds those of one optimizer. A program updates a few variables at once:
``(values, slots, gradients) -> (values, slots)``, with values and slots donated. It is
compiled ahead of its first use, so that a transformation which cannot be traced for a
shape is refused before anything has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zstrat.errors import BusyError, InvalidArgumentError

from ._engine import LAYOUTS, Slots, Step, is_wide

if TYPE_CHECKING:
    from ._cell import Cell

Shapes = tuple[jax.ShapeDtypeStruct, ...]


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


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled update of a group of variables. ``layouts``: of their slots afterwards."""

    call: Any
    layouts: tuple[int, ...]
    wide: bool

    def run(self, optimizer: int, group: Sequence[Step]) -> None:
        """Updates values and slots and waits until they are there."""
        slots = [step.slots[optimizer] for step in group]
        values = tuple([step.cell.give() for step in group])
        try:
            with _precision(self.wide):
                new, leaves = self.call(
                    values,
                    tuple([each.leaves for each in slots]),
                    tuple([step.gradient for step in group]),
                )
                jax.block_until_ready(new)
        except Exception as error:  # goes on to the caller; the donated memory is gone
            for step, value in zip(group, values, strict=True):
                if isinstance(value, jax.Array) and value.is_deleted():
                    step.cell.lose(str(error))
                step.slots.pop(optimizer, None)
            raise
        for i, step in enumerate(group):
            step.cell.take_back(new[i])
            slots[i].leaves, slots[i].layout = leaves[i], self.layouts[i]


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

    def prepare(self, group: Sequence[Step]) -> None:
        """Makes missing slots, and the program if it is the first of its kind.

        Raises:
            InvalidArgumentError: The transformation cannot be traced for these shapes.
            BusyError: Too many shapes have been compiled for.
        """
        for step in group:
            if self._optimizer not in step.slots:
                step.slots[self._optimizer] = self._initial(step.cell)
        self._program(group)

    def apply(self, group: Sequence[Step]) -> None:
        """Updates values and slots, and waits until they are there."""
        self._program(group).run(self._optimizer, group)

    def _initial(self, cell: Cell) -> Slots:
        key = (cell.shape, cell.dtype)
        entry = self._initials.get(key)
        if entry is None:
            entry = self._initials[key] = self._compile_initial(cell)
        call, layout = entry
        with _precision(is_wide(cell.dtype)):
            leaves = jax.block_until_ready(call(cell.give()))
        return Slots(leaves, layout, sum(leaf.nbytes for leaf in leaves))

    def _program(self, group: Sequence[Step]) -> Program:
        optimizer = self._optimizer
        key = tuple([(s.slots[optimizer].layout, s.gradient.dtype) for s in group])
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compile(group)
        return program

    def _compile_initial(self, cell: Cell) -> tuple[Any, int]:
        def initial(value: Any) -> tuple[Any, ...]:
            # Copies, because a leaf that *is* the value (an average that starts there)
            # would be donated twice by the first step.
            return tuple(
                jnp.copy(x) for x in jax.tree.leaves(self._transformation.init(value))
            )

        wide = is_wide(cell.dtype)
        value = jax.ShapeDtypeStruct(cell.shape, cell.dtype)
        with _precision(wide), self._words(cell.shape), self._here():
            structure = jax.tree.structure(
                jax.eval_shape(self._transformation.init, value)
            )
            leaves = jax.eval_shape(initial, value)
            call = jax.jit(initial).lower(value).compile()
        return call, self._number(_Layout(value, structure, _plain(leaves)))

    def _compile(self, group: Sequence[Step]) -> Program:
        layouts = [self._layouts[s.slots[self._optimizer].layout] for s in group]
        structures = [layout.structure for layout in layouts]

        def step(values: Any, slots: Any, gradients: Any) -> tuple[Any, Any]:
            new = [
                self._transformation.step(
                    value, jax.tree.unflatten(structure, leaves), grad
                )
                for value, structure, leaves, grad in zip(
                    values, structures, slots, gradients, strict=True
                )
            ]
            states = [jax.tree.flatten(state) for _, state in new]
            for was, (_, now) in zip(structures, states, strict=True):
                if was != now:
                    raise TypeError(f"its state changes from {was} to {now}")
            return tuple(v for v, _ in new), tuple(
                tuple(leaves) for leaves, _ in states
            )

        values = tuple(layout.value for layout in layouts)
        slots = tuple(layout.leaves for layout in layouts)
        gradients = tuple(
            jax.ShapeDtypeStruct(s.gradient.shape, s.gradient.dtype) for s in group
        )
        wide = any(is_wide(s.cell.dtype) for s in group)
        shapes = [s.cell.shape for s in group]
        with _precision(wide), self._words(shapes), self._here():
            new, after = jax.eval_shape(step, values, slots, gradients)
            after = tuple(_plain(leaves) for leaves in after)
            for value, was in zip(new, values, strict=True):
                if (value.shape, value.dtype) != (was.shape, was.dtype):
                    raise TypeError(f"it turns a {was} into a {value}")
            # Slots whose dtype changes (a bfloat16 variable with float32 gradients, in
            # its first step) have no output to be donated to.
            donated = (0, 1) if after == slots else (0,)
            lowered = jax.jit(step, donate_argnums=donated).lower(
                values, slots, gradients
            )
            call = lowered.compile()
        numbers = tuple(
            self._number(_Layout(value, structure, leaves))
            for value, structure, leaves in zip(values, structures, after, strict=True)
        )
        return Program(call, numbers, wide)

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

    def _here(self) -> contextlib.AbstractContextManager[object]:
        """A parameter server computes on the CPU, whatever else the machine has."""
        return jax.default_device(self._device)

    @contextlib.contextmanager
    def _words(self, shapes: object) -> Any:
        try:
            yield
        except BusyError:
            raise
        except Exception as error:  # goes to the caller, with the optimizer's name
            raise InvalidArgumentError(
                f"optimizer {self._name!r} cannot be applied to a variable of shape "
                f"{shapes}: {type(error).__name__}: {error}"
            ) from error


def _precision(wide: bool) -> contextlib.AbstractContextManager[object]:
    """Without this, jax would take a float64 variable and give back a float32 one."""
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def _plain(leaves: Sequence[Any]) -> Shapes:
    """Without weak types: they would make equal slots look different."""
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
