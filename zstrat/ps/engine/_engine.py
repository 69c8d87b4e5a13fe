"""Applies any optax transformation to variables, on the server that holds them.

A transformation is registered once per session (shipped code, loaded by the caller's
`load_code`). When its tree arrives, its program is divided into an update for each leaf
(`_bindings`), which XLA compiles per shape and dtype. Value and slots are donated, so
that an update writes in place; while a reader has a lease on the value, the update goes
to other memory (`zstrat.ps.store._cell` has the proof). A variable has its own program,
unless its push is of a few variables of some size, which share one (`JointPrograms`):
XLA runs the parts of a larger program on several threads, and waking those costs more
than starting four small programs (110 us against 40 for four arrays of 512 floats).
Small variables that are updated element by element are concatenated to one array
(`FlatUpdates`).

Gradients of some rows are gathered, updated and scattered (`_row_updates`).

jax and optax are imported when the first optimizer is loaded and not before: a ps that
is never asked to optimise never imports them. Only `_xla` imports them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zstrat.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from zstrat.wire import UpdateOp

from ._arithmetic import check_ids, check_rows, is_floating
from ._bindings import Bindings, digest_of
from ._slots import is_wide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ._bindings import Bound
    from ._slots import HeldVariable, Slots
    from ._xla import UpdatePrograms


@dataclass(frozen=True, slots=True, eq=False)
class Registered:
    """A registered optimizer, its compiled programs, and the bindings of its variables.

    One thread at a time, the owner of the variables, uses ``programs``.
    """

    optimizer: int
    name: str
    code: bytes
    digest: bytes
    bindings: Bindings
    programs: UpdatePrograms

    def make_slots(self, held: HeldVariable) -> Slots | None:
        """Makes new slots for a variable; None if no tree of the optimizer has the
        variable yet.

        Raises:
            InvalidArgumentError: The transformation cannot be applied to this shape.
        """
        bound = self.bindings.get(held.entry.key)
        if bound is None:
            return None
        return self.programs.make_slots(bound.alike, held.cell)


class Checked(NamedTuple):
    """A validated update by an optimizer. ``operands`` are those of its whole tree;
    ``mixed``: its rows are not known to be sorted and distinct."""

    optimizer: Registered
    bound: Bound
    operands: Sequence[np.ndarray]
    mixed: bool


class OptimizerEngine:
    """The optimizers of one session. `load` may run on any thread; all else is for the
    owner of the store."""

    def __init__(self, load_code: Callable[[bytes], object]) -> None:
        """``load_code`` unpickles shipped bytes to an optax GradientTransformation."""
        self.load_code = load_code
        self._registered: dict[int, Registered] = {}
        self.is_former = False
        """Whether the optimizers are those of the program before, which has ended."""

    def __contains__(self, optimizer: int) -> bool:
        return optimizer in self._registered

    @property
    def programs(self) -> int:
        """Number of programs that have been compiled."""
        return sum(each.programs.count for each in list(self._registered.values()))

    def __len__(self) -> int:
        return len(self._registered)

    def __iter__(self) -> Iterator[Registered]:
        return iter(self._registered.values())

    def load(self, optimizer: int, name: str, code: bytes) -> Registered:
        """Loads a transformation from shipped code; the first one makes this process
        import jax and optax.

        Raises:
            InvalidArgumentError: The code does not give a transformation.
            Exception: Whatever loading the code raises.
        """
        # 0 in an update stands for none.
        if optimizer <= 0:
            raise InvalidArgumentError(
                f"optimizer {name!r}: id {optimizer} is not above 0"
            )
        try:
            loaded = self.load_code(code)  # which brings jax, if it is not there yet
            from zstrat.optimizers import checked

            transformation = checked(loaded)
        except TypeError as error:
            raise InvalidArgumentError(f"optimizer {name!r}: {error}") from error
        # Here, as a server without optimizers never loads jax.
        from ._xla import UpdatePrograms

        bindings, programs = (
            Bindings(name, transformation),
            UpdatePrograms(optimizer, name),
        )
        digest = digest_of(code)
        return Registered(optimizer, name, code, digest, bindings, programs)

    def get(self, optimizer: int) -> Registered:
        """Returns the optimizer of this id.

        Raises:
            NotFoundError: The optimizer does not exist.
        """
        known = self._registered.get(optimizer)
        if known is None:
            raise NotFoundError(f"no optimizer with id {optimizer} is there")
        return known

    def register(self, new: Registered) -> None:
        """Adds a loaded optimizer under its id. Registering the same optimizer again
        does nothing.

        Raises:
            AlreadyExistsError: Another optimizer has the id.
        """
        old = self._registered.get(new.optimizer)
        if old is not None and old.digest != new.digest:
            raise AlreadyExistsError(
                f"optimizer {new.optimizer} is {old.name!r} already, and {new.name!r} "
                "is not the same"
            )
        # Else it came again: what is there has programs and bindings already.
        if old is None:
            self._registered[new.optimizer] = new

    def is_registered(self, optimizer: int, code: bytes) -> bool:
        """Returns whether the optimizer of this id was loaded from exactly this
        code."""
        known = self._registered.get(optimizer)
        return known is not None and known.digest == digest_of(code)

    def forget(self, optimizer: int) -> None:
        """Removes an optimizer, if it exists; its id is free again."""
        self._registered.pop(optimizer, None)

    def unbind(self, keys: Iterable[int]) -> None:
        """Drops the bindings of deleted variables, by their keys."""
        for each in self._registered.values():
            each.bindings.forget(keys)
            # Programs remember the steps of the last push, which hold memory of the
            # variables.
            each.programs.forget_steps()

    def clear(self) -> None:
        """Forgets all optimizers and their programs."""
        self._registered, self.is_former = {}, False

    def check(
        self,
        optimizer: int,
        op: UpdateOp,
        held: HeldVariable,
        arrays: Sequence[np.ndarray],
        operands: Sequence[np.ndarray] | None,
    ) -> Checked:
        """Returns a validated update, if the optimizer updates the variable and takes
        such a gradient.

        Args:
            operands: The operands that the push contains for the optimizer.

        Raises:
            NotFoundError: The optimizer does not exist, or no tree of it contains the
                variable.
            InvalidArgumentError: Gradient or operands do not fit, or the optimizer may
                not be applied to parts of a variable and the variable is one.
        """
        known, bound, mixed = self.require_fit(optimizer, op, held, arrays)
        who = f"variable {held.entry.name!r}, optimizer {known.name!r}"
        _require_operands(bound, operands, who)
        return Checked(known, bound, operands or (), mixed)

    def adopt_slots(self, held: HeldVariable) -> None:
        """Turns loaded slots of a table into slots of their optimizers, for optimizers
        whose tree is known.

        Raises:
            InvalidArgumentError: The loaded slots are not those that an optimizer
                keeps.
        """
        for known, bound in self._optimizers_of(held):
            known.programs.adopt(held.slots, bound.alike, held.cell)

    def extend_slots(self, held: HeldVariable) -> None:
        """Makes slots for new rows of a table. Call `adopt_slots` before the table has
        the rows.

        Raises:
            ResourceExhaustedError: There is no memory for them.
        """
        for known, bound in self._optimizers_of(held):
            slots = held.slots[known.optimizer]
            known.programs.rows.extend(slots, bound.alike, held.cell)

    def can_extend_slots(self, held: HeldVariable) -> bool:
        """Returns whether `extend_slots` could run without compiling."""
        return all(
            known.programs.rows.can_extend(bound.alike, held.cell)
            for known, bound in self._optimizers_of(held)
        )

    def _optimizers_of(self, held: HeldVariable) -> list[tuple[Registered, Bound]]:
        """Returns the optimizers that have slots for a variable, each with its binding
        of the variable."""
        known = [self._registered.get(number) for number in held.slots]
        key = held.entry.key
        return [
            (each, bound)
            for each in known
            if each is not None and (bound := each.bindings.get(key)) is not None
        ]

    def require_fit(
        self,
        optimizer: int,
        op: UpdateOp,
        held: HeldVariable,
        arrays: Sequence[np.ndarray],
    ) -> tuple[Registered, Bound, bool]:
        """Checks a gradient as `check` does, but not its operands.

        Returns:
            The optimizer, the binding, and whether the rows are not known to be sorted
            and distinct.
        """
        name = held.entry.name
        known = self._registered.get(optimizer)
        if known is None:
            raise NotFoundError(
                f"variable {name!r}: no optimizer with id {optimizer} is there"
            )
        who = f"variable {name!r}, optimizer {known.name!r}"
        bound = known.bindings.get(held.entry.key)
        if bound is None:
            raise NotFoundError(
                f"{who}: the variable is in no tree that was bound to the optimizer "
                "here; the sender of gradients has to send the tree first"
            )
        rows = op is UpdateOp.OPTIMIZE_ROWS
        if len(arrays) != 1 + rows:
            want = "indices and gradient rows" if rows else "1 gradient"
            raise InvalidArgumentError(f"{who}: expected {want}, got {len(arrays)}")
        if held.entry.sharded or rows or bound.leaf.is_part:
            _require_rowwise(bound, who)
        mixed = False
        cell, gradient = held.cell, arrays[-1]
        if held.table is not None:
            if not rows:
                raise InvalidArgumentError(
                    f"{who}: it is a table of any id, which has no whole gradient: "
                    "send ids and gradient rows"
                )
            # In the order of hashes each id is there once: the sender has summed equal
            # ones.
            check_ids(arrays[0], gradient.shape, cell.shape, who, in_order=True)
        elif rows:
            mixed = not check_rows(arrays[0], gradient.shape, cell.shape, who)
        elif gradient.shape != cell.shape:
            raise InvalidArgumentError(
                f"{who}: expected a gradient of shape {cell.shape}, got "
                f"{gradient.shape}"
            )
        _require_dtype(bound, cell.dtype, gradient.dtype, who)
        return known, bound, mixed


def _require_rowwise(bound: Bound, who: str) -> None:
    if reason := bound.leaf.rule.row_dependence:
        raise InvalidArgumentError(
            f"{who}: it looks at more than one row at a time (a norm, a trust ratio, "
            "factored moments), so on the parts of a sharded variable or on some rows "
            f"it would compute something else: {reason}; keep this variable in one "
            "piece and send a dense gradient, or use an optimizer that works element "
            "by element (sgd, adam, adagrad, rmsprop, lion, ...)"
        )


def _require_dtype(bound: Bound, value: np.dtype, got: np.dtype, who: str) -> None:
    if not _is_differentiable(value, got):
        raise InvalidArgumentError(
            f"{who}: expected a floating-point gradient for {value.name}, got "
            f"{got.name}"
        )
    want = np.dtype(bound.leaf.rule.gradient)
    # Of 64 bits `fitting` makes 32; any other dtype is not what the tree was traced
    # with.
    if got != want and (not is_wide(got) or _downcast(got) != want):
        raise InvalidArgumentError(
            f"{who}: expected a gradient of {want.name}, as in the tree that was bound "
            f"to the optimizer, got {got.name}"
        )


def _require_operands(
    bound: Bound, operands: Sequence[np.ndarray] | None, who: str
) -> None:
    """Refuses operands whose shapes or dtypes are not those that the tree has."""
    uses, kinds = bound.leaf.rule.uses, bound.leaf.operands
    if not uses:
        return
    if operands is None or len(operands) != len(kinds):
        came = "none came" if operands is None else f"{len(operands)} came"
        raise InvalidArgumentError(
            f"{who}: it takes {len(kinds)} values that are made of all gradients (a "
            f"global norm), and {came} before it in the push"
        )
    for number in uses:
        got, (shape, dtype) = operands[number], kinds[number]
        if got.shape != shape or got.dtype != dtype:
            raise InvalidArgumentError(
                f"{who}: expected operand {number} to be {dtype.name}{list(shape)}, "
                f"got {got.dtype.name}{list(got.shape)}"
            )


def fitting(gradient: np.ndarray, bound: Bound) -> np.ndarray:
    """Converts a gradient to the dtype that its rule takes: for a variable of 32 bits,
    jax converts 64 bits to 32."""
    want = np.dtype(bound.leaf.rule.gradient)
    return gradient if gradient.dtype == want else gradient.astype(want)


def _downcast(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.complex64 if dtype.kind == "c" else np.float32)


def _is_differentiable(value: np.dtype, gradient: np.dtype) -> bool:
    if value.kind == "c":
        return gradient.kind == "c"
    return is_floating(value) and is_floating(gradient)
