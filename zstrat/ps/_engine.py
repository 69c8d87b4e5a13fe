"""Any optax transformation, applied where the variable lives.

A transformation is registered once per session (shipped code, loaded by the caller's
`load_code`), probed for what it needs to see at a time (`zstrat.ps._probe`), and then
compiled by XLA per shape and dtype. Value and slots are donated, so that an update
writes where they are; a reader's lease turns that into an update beside it
(`zstrat.ps._cell` has the proof). Each variable has a program of its own: XLA runs the
parts of a larger one on several threads, and waking those costs more than starting
four small programs (110 us against 40 for four arrays of 512 floats).

Gradients of some rows are gathered, updated and scattered (`zstrat.ps._xla_rows`).

jax and optax are imported when the first optimizer is loaded and not before: a ps that
is never asked to optimise never imports them. They live behind `zstrat.ps._xla`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zstrat.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from zstrat.wire import UpdateOp, VariableEntry

from ._arithmetic import check_rows, is_floating
from ._slots import is_wide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ._cell import Cell
    from ._row_calls import Ready
    from ._slots import Ahead, RowStep, Slots, Step
    from ._xla import Programs


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

    def prepare(self, steps: Sequence[Step], ahead: Ahead) -> None:
        """Compiles what `apply` will need, and makes slots, unless an earlier update of
        the push comes in between (`complete`); changes no value.

        Raises:
            InvalidArgumentError: The transformation cannot be applied to this shape.
            ResourceExhaustedError: There is no memory for slots.
        """
        for step in steps:
            self.programs.prepare(step, ahead)

    def complete(
        self, steps: Sequence[Step], rows: Sequence[RowStep], ahead: Ahead
    ) -> None:
        """Makes what `prepare` left for later: the turn of these updates has come."""
        self.programs.complete(steps)
        self.programs.rows.complete(rows, ahead)

    def make_slots(self, cell: Cell) -> Slots:
        """New slots for a variable.

        Raises:
            InvalidArgumentError: The transformation cannot be applied to this shape.
        """
        return self.programs.make_slots(cell)

    def retype(self, slots: Slots, dtypes: Mapping[int, np.dtype]) -> None:
        """Gives leaves, by their places, other dtypes."""
        self.programs.retype(slots, dtypes)

    def is_prepared(self, steps: Sequence[Step]) -> bool:
        """Whether `prepare` for such steps would have nothing to do."""
        for step in steps:
            mine = step.slots.get(self.optimizer)
            if mine is None or not self.programs.has(mine.layout, step.gradient.dtype):
                return False
        return True

    def apply(self, steps: Sequence[Step]) -> None:
        """Applies one gradient to each variable (which occurs once), and waits."""
        self.programs.apply(steps)

    def prepare_rows(self, steps: Sequence[RowStep], ahead: Ahead) -> None:
        """`prepare` for gradients of rows, which are sorted and distinct."""
        self.programs.rows.prepare(steps, ahead)

    def ready_rows(self, steps: Sequence[RowStep]) -> list[Ready] | None:
        """What `apply_ready` needs if `prepare_rows` has nothing to do, and all rows
        can be written where they are; None if not."""
        return self.programs.rows.ready(steps)

    def apply_ready(self, ready: Sequence[Ready]) -> None:
        """`apply_rows` without more ado."""
        self.programs.rows.apply_ready(ready)

    def apply_rows(self, steps: Sequence[RowStep]) -> None:
        """Applies gradients to rows of each variable (which occurs once)."""
        self.programs.rows.apply(steps)


class OptimizerEngine:
    """The optimizers of one session. `load` may run on any thread, the rest belongs to
    the owner of the store."""

    def __init__(self, load_code: Callable[[bytes], object]) -> None:
        """``load_code`` turns shipped bytes into an optax GradientTransformation."""
        self.load_code = load_code
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
        from ._layouts import Transformation
        from ._probe import probe
        from ._xla import Programs

        if optimizer <= 0:
            raise InvalidArgumentError(
                f"optimizer {name!r}: id {optimizer} is not above 0"
            )
        transformation = Transformation.check(name, self.load_code(code))
        rows = probe(name, transformation)
        digest = _digest(code)
        programs = Programs(optimizer, name, transformation)
        return Registered(optimizer, name, digest, rows, programs)

    def get(self, optimizer: int) -> Registered:
        """
        Raises:
            NotFoundError: The optimizer does not exist.
        """
        known = self._registered.get(optimizer)
        if known is None:
            raise NotFoundError(f"no optimizer with id {optimizer} is there")
        return known

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

    def forget(self, optimizer: int) -> None:
        """Its id is free again, if it was taken."""
        self._registered.pop(optimizer, None)

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
    ) -> tuple[Registered, bool]:
        """The optimizer, if it takes such a gradient for a variable, and whether the
        rows that it names are in any order but sorted and distinct.

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
        rows = op is UpdateOp.OPTIMIZE_ROWS
        if len(operands) != 1 + rows:
            want = "indices and gradient rows" if rows else "1 gradient"
            raise InvalidArgumentError(f"{who}: expected {want}, got {len(operands)}")
        if (entry.sharded or rows) and not known.rows:
            raise InvalidArgumentError(
                f"{who}: it looks at more than one row at a time (a norm, a trust "
                "ratio, factored moments), so on the parts of a sharded variable or on "
                "some rows it would compute something else; keep this variable in one "
                "piece and send a dense gradient, or use an optimizer that works "
                "element by element (sgd, adam, adagrad, rmsprop, lion, ...)"
            )
        mixed = False
        if rows:
            mixed = not check_rows(operands[0], operands[1].shape, cell.shape, who)
        elif operands[0].shape != cell.shape:
            raise InvalidArgumentError(
                f"{who}: expected a gradient of shape {cell.shape}, got "
                f"{operands[0].shape}"
            )
        gradient = operands[-1]
        if not _is_differentiable(cell.dtype, gradient.dtype):
            raise InvalidArgumentError(
                f"{who}: expected a floating-point gradient for {cell.dtype.name}, got "
                f"{gradient.dtype.name}"
            )
        return known, mixed


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=16).digest()


def fitting(gradient: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The gradient as jax would take it: 64 bits only for a variable of 64 bits."""
    if is_wide(gradient.dtype) and not is_wide(dtype):
        return gradient.astype(np.complex64 if dtype.kind == "c" else np.float32)
    return gradient


def _is_differentiable(value: np.dtype, gradient: np.dtype) -> bool:
    if value.kind == "c":
        return gradient.kind == "c"
    return is_floating(value) and is_floating(gradient)
