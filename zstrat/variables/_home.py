"""Where the value of a variable lives when no step is being traced.

A home answers reads and takes updates, each in a blocking and an awaitable form. The
parameter servers are a home (the session's), this process is one (`LocalHome`), and a
handle that was unpickled on another task has none (`Detached`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import numpy as np

from zstrat.wire import UpdateOp

from ._apply import apply

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ._optimizer import Optimizer
    from ._variable import Variable

Operands = tuple[np.ndarray, ...]


class Home(Protocol):
    """Keeps values. The caller has checked shapes and dtypes of the operands."""

    def read(self, variable: Variable) -> np.ndarray:
        """The value, as an array that nobody writes to any more."""
        ...

    async def read_async(self, variable: Variable) -> np.ndarray: ...

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: Operands,
        optimizer: Optimizer | None,
    ) -> None:
        """Applies one update; returns when it is visible to every reader."""
        ...

    async def update_async(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: Operands,
        optimizer: Optimizer | None,
    ) -> None: ...


@runtime_checkable
class ReadsMany(Protocol):
    """A home that gives many values for the price of one."""

    def read_many(self, variables: Sequence[Variable]) -> list[np.ndarray]:
        """The values, in order; see `Home.read`."""
        ...


def read_all(variables: Iterable[Variable]) -> list[np.ndarray]:
    """The values of variables, in order; see `Home.read`.

    Cost: one request to each home that can answer for many.
    """
    wanted = list(variables)
    by_home: dict[int, list[int]] = {}
    for place, variable in enumerate(wanted):
        by_home.setdefault(id(variable.home), []).append(place)
    found: dict[int, np.ndarray] = {}
    for places in by_home.values():
        here = [wanted[place] for place in places]
        home = here[0].home
        if isinstance(home, ReadsMany):
            found.update(zip(places, home.read_many(here), strict=True))
        else:
            found.update((place, home.read(wanted[place])) for place in places)
    return [found[place] for place in range(len(wanted))]


class LocalHome:
    """One variable in this process, with the slots of the optimizers that moved it.

    A value that was handed out is never written to: every update makes a new array.
    """

    def __init__(self, value: np.ndarray) -> None:
        self._value = _frozen(np.array(value, order="C"))
        self._slots: dict[int, Any] = {}
        # Reads and updates come from any thread; an update is read, compute, replace.
        self._lock = threading.Lock()

    def read(self, variable: Variable) -> np.ndarray:
        del variable  # one home, one variable
        return self._value

    async def read_async(self, variable: Variable) -> np.ndarray:
        return self.read(variable)

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: Operands,
        optimizer: Optimizer | None,
    ) -> None:
        with self._lock:
            if optimizer is None:
                value = apply(op, self._value, operands)
            else:
                value = self._optimized(op, operands, optimizer)
            self._value = _frozen(np.asarray(value, variable.spec.numpy_dtype))

    async def update_async(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: Operands,
        optimizer: Optimizer | None,
    ) -> None:
        self.update(variable, op, operands, optimizer)

    def _optimized(
        self, op: UpdateOp, operands: Operands, optimizer: Optimizer
    ) -> np.ndarray:
        transformation = optimizer.transformation
        gradient = operands[0]
        if op is UpdateOp.OPTIMIZE_ROWS:
            zeros = np.zeros_like(self._value)
            gradient = apply(UpdateOp.SCATTER_ADD, zeros, operands)
        if optimizer.id not in self._slots:
            self._slots[optimizer.id] = transformation.init(self._value)
        step, slots = _jitted(optimizer)(
            gradient, self._slots[optimizer.id], self._value
        )
        self._slots[optimizer.id] = slots
        return np.asarray(step)


class Detached:
    """The home of a handle on another task: a name without a value."""

    def read(self, variable: Variable) -> np.ndarray:
        raise RuntimeError(_detached(variable, "read"))

    async def read_async(self, variable: Variable) -> np.ndarray:
        raise RuntimeError(_detached(variable, "read"))

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: Operands,
        optimizer: Optimizer | None,
    ) -> None:
        raise RuntimeError(_detached(variable, f"{op.name.lower()} of"))

    async def update_async(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: Operands,
        optimizer: Optimizer | None,
    ) -> None:
        raise RuntimeError(_detached(variable, f"{op.name.lower()} of"))


def _jitted(optimizer: Optimizer) -> Any:
    """``(gradient, slots, value) -> (new value, new slots)``, compiled once."""
    if optimizer.compiled is None:
        transformation = optimizer.transformation

        def step(gradient: Any, slots: Any, value: Any) -> tuple[Any, Any]:
            delta, slots = transformation.update(gradient, slots, value)
            return (value + delta).astype(value.dtype), slots

        optimizer.compiled = jax.jit(step)
    return optimizer.compiled


def _frozen(value: np.ndarray) -> np.ndarray:
    if value.flags.writeable:
        value.flags.writeable = False
    return value


def _detached(variable: Variable, what: str) -> str:
    where = variable.spec.device
    return (
        f"{what} {variable.spec} outside a step function: this handle came from "
        f"another task and its value lives at {where}; read and update it inside the "
        "body of a zs.function, or on the coordinator"
    )
