"""Any optax transformation, applied where the variable lives.

A transformation is registered once per session (shipped code, loaded by the caller's
`load_code`), probed for what it needs to see at a time (`zstrat.ps._probe`), and then
compiled by XLA per shape and dtype. Value and slots are donated, so that an update
writes where they are; a reader's lease turns that into an update beside it
(`zstrat.ps._cell` has the proof). Each variable has a program of its own: XLA runs the
parts of a larger one on several threads, and waking those costs more than starting
four small programs (110 us against 40 for four arrays of 512 floats).

jax and optax are imported when the first optimizer is loaded and not before: a ps that
is never asked to optimise never imports them. They live behind `zstrat.ps._xla`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from zstrat.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from zstrat.wire import UpdateOp, VariableEntry

from ._arithmetic import is_floating

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._cell import Cell
    from ._xla import Programs

LAYOUTS: Final = 4096
"""Distinct (shape, dtype, slots) that a session may have compiled programs for."""


@dataclass(slots=True)
class Slots:
    """What an optimizer keeps for one variable: flat leaves, on the device of the ps.

    ``layout`` numbers (shape and dtype of the variable; structure, shapes and dtypes of
    the leaves): two variables of one layout share a program.
    """

    leaves: tuple[object, ...]
    layout: int
    nbytes: int


class Step(NamedTuple):
    """One gradient for one variable. ``slots`` is the variable's, by optimizer."""

    cell: Cell
    slots: dict[int, Slots]
    gradient: np.ndarray


@dataclass(frozen=True, slots=True)
class Registered:
    """An optimizer with its compiled programs.

    ``rows``: it may be applied to parts of a variable. Its methods run on one thread at
    a time, which owns the variables.
    """

    optimizer: int
    name: str
    digest: bytes
    rows: bool
    programs: Programs

    def prepare(self, steps: Sequence[Step]) -> None:
        """Compiles what `apply` will need, and makes slots; changes no value.

        Raises:
            InvalidArgumentError: The transformation cannot be applied to this shape.
        """
        for step in steps:
            self.programs.prepare(step)

    def is_prepared(self, slots: dict[int, Slots], gradient: np.ndarray) -> bool:
        """Whether `prepare` for such a step would have nothing to do."""
        mine = slots.get(self.optimizer)
        return mine is not None and self.programs.has(mine.layout, gradient.dtype)

    def apply(self, steps: Sequence[Step]) -> None:
        """Applies one gradient to each variable (which occurs once), and waits."""
        self.programs.apply(steps)


class OptimizerEngine:
    """The optimizers of one session. `load` may run on any thread, the rest belongs to
    the owner of the store."""

    def __init__(self, load_code: Callable[[bytes], object]) -> None:
        """``load_code`` turns shipped bytes into an optax GradientTransformation."""
        self._load_code = load_code
        self._registered: dict[int, Registered] = {}

    def __contains__(self, optimizer: int) -> bool:
        return optimizer in self._registered

    @property
    def programs(self) -> int:
        """How many programs have been compiled."""
        return sum(each.programs.count for each in list(self._registered.values()))

    def __len__(self) -> int:
        return len(self._registered)

    def load(self, optimizer: int, name: str, code: bytes) -> Registered:
        """Loads and probes a transformation. Cost: 0.5 to 2 s, more with the first one.

        Raises:
            InvalidArgumentError: It is no transformation, or one that cannot run where
                it sees one variable at a time; says what to write instead.
            Exception: Whatever loading the code raises.
        """
        from ._probe import probe
        from ._xla import Programs, Transformation

        if optimizer <= 0:
            raise InvalidArgumentError(
                f"optimizer {name!r}: id {optimizer} is not above 0"
            )
        transformation = Transformation.check(name, self._load_code(code))
        rows = probe(name, transformation)
        digest = _digest(code)
        programs = Programs(optimizer, name, transformation)
        return Registered(optimizer, name, digest, rows, programs)

    def register(self, new: Registered) -> None:
        """Makes a loaded optimizer known under its id. The same again is no error.

        Raises:
            AlreadyExistsError: The id is taken by another one.
        """
        old = self._registered.get(new.optimizer)
        if old is not None and old.digest != new.digest:
            raise AlreadyExistsError(
                f"optimizer {new.optimizer} is {old.name!r} already, and {new.name!r} "
                "is not the same"
            )
        if old is None:
            self._registered[new.optimizer] = new

    def is_registered(self, optimizer: int, code: bytes) -> bool:
        """Whether this very code is known under this id."""
        known = self._registered.get(optimizer)
        return known is not None and known.digest == _digest(code)

    def clear(self) -> None:
        """Forgets all optimizers and their programs."""
        self._registered = {}

    def check(
        self,
        optimizer: int,
        op: UpdateOp,
        entry: VariableEntry,
        cell: Cell,
        operands: Sequence[np.ndarray],
    ) -> Registered:
        """The optimizer, if it takes such a gradient for a variable.

        A gradient of another floating dtype than the variable's is handed to optax as
        it is (but for 64 bits, see `fitting`): slots and update get the dtypes that
        optax gives them, and the new value is cast to the variable's dtype, as by
        `optax.apply_updates`.

        Raises:
            NotFoundError: The optimizer does not exist.
            InvalidArgumentError: The gradient does not fit, or the optimizer may not be
                applied to parts of a variable and the variable is one.
        """
        known = self._registered.get(optimizer)
        if known is None:
            raise NotFoundError(
                f"variable {entry.name!r}: no optimizer with id {optimizer} is there"
            )
        who = f"variable {entry.name!r}, optimizer {known.name!r}"
        if op is not UpdateOp.OPTIMIZE:
            raise InvalidArgumentError(
                f"{who}: gradients of rows arrive with sharded tables; send a dense one"
            )
        if len(operands) != 1:
            raise InvalidArgumentError(
                f"{who}: expected 1 gradient, got {len(operands)}"
            )
        if entry.sharded and not known.rows:
            raise InvalidArgumentError(
                f"{who}: it looks at more than one row at a time (a norm, a trust "
                "ratio, factored moments), so on the parts of a sharded variable it "
                "would compute something else; keep this variable in one piece, or use "
                "an optimizer that works element by element (sgd, adam, adagrad, "
                "rmsprop, lion, ...)"
            )
        (gradient,) = operands
        if gradient.shape != cell.shape:
            raise InvalidArgumentError(
                f"{who}: expected a gradient of shape {cell.shape}, got "
                f"{gradient.shape}"
            )
        if not _is_differentiable(cell.dtype, gradient.dtype):
            raise InvalidArgumentError(
                f"{who}: expected a floating-point gradient for {cell.dtype.name}, got "
                f"{gradient.dtype.name}"
            )
        return known


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=16).digest()


def fitting(gradient: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The gradient as jax would take it: 64 bits only for a variable of 64 bits."""
    if is_wide(gradient.dtype) and not is_wide(dtype):
        return gradient.astype(np.complex64 if dtype.kind == "c" else np.float32)
    return gradient


def is_wide(dtype: np.dtype) -> bool:
    return dtype.itemsize > (8 if dtype.kind == "c" else 4)


def _is_differentiable(value: np.dtype, gradient: np.dtype) -> bool:
    if value.kind == "c":
        return gradient.kind == "c"
    return is_floating(value) and is_floating(gradient)
