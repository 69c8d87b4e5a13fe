"""One copy of a variable that several devices have, as a variable of its own.

TF's components of a distributed variable: ``v``, ``v/replica_1``, ... What is done to
one is done to this copy alone; the copies are kept apart from then on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from zstrat.program._copies import copies_of as copies_now
from zstrat.program._copies import is_on_read
from zstrat.variables import DeviceHome, Variable, apply, handle, next_key, recorder

from ._per_replica import Mirrored, PerReplica

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.variables import HomeRows, HomeUpdate, Optimizer
    from zstrat.wire import UpdateOp


class CopyHome:
    """The home of one copy: a row of the home of the whole variable."""

    def __init__(self, container: Variable, number: int) -> None:
        self.container = container
        self.number = number

    def read(self, variable: Variable) -> np.ndarray:
        del variable  # one home, one copy
        copy: np.ndarray = self._home.copies()[self.number]
        return copy

    async def read_async(self, variable: Variable) -> np.ndarray:
        return self.read(variable)

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: tuple[np.ndarray, ...],
        optimizer: Optimizer | None,
    ) -> None:
        if optimizer is not None:
            raise NotImplementedError(
                f"{variable.spec} is one copy of {self.container.spec}, and optimizers "
                "move all copies together: give apply_gradients the variable itself"
            )
        home = self._home
        with home.residence.lock:
            copies = np.array(home.copies())
            copies[self.number] = apply(op, copies[self.number], operands)
            home.put_copies(copies)

    async def update_async(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: tuple[np.ndarray, ...],
        optimizer: Optimizer | None,
    ) -> None:
        self.update(variable, op, operands, optimizer)

    def read_rows(self, parts: Sequence[HomeRows]) -> list[np.ndarray]:
        return [self.read(variable)[indices] for variable, indices in parts]

    async def read_rows_async(self, parts: Sequence[HomeRows]) -> list[np.ndarray]:
        return self.read_rows(parts)

    def update_many(self, updates: Sequence[HomeUpdate]) -> None:
        for update in updates:
            self.update(*update)

    async def update_many_async(self, updates: Sequence[HomeUpdate]) -> None:
        self.update_many(updates)

    @property
    def _home(self) -> DeviceHome:
        home = self.container.home
        assert isinstance(home, DeviceHome)
        return home


def copies_of(variable: Variable) -> tuple[Variable, ...]:
    """The copies of a variable of this process, in replica order; the variable itself
    if there is one, as where one device keeps it for all of them."""
    home = variable.home
    if not isinstance(home, DeviceHome) or home.residence.copies == 1:
        return (variable,)
    if home.residence.travels and not is_on_read(variable):
        return (variable,)  # all replicas share it
    spec = variable.spec
    names = [spec.name]
    names += [f"{spec.name}/replica_{n}" for n in range(1, home.residence.copies)]
    return tuple(
        handle(replace(spec, key=next_key(), name=name), CopyHome(variable, number))
        for number, name in enumerate(names)
    )


def as_values(node: Any) -> Any:
    """A variable of several devices as the values that they have; all else as it is."""
    if not isinstance(node, Variable):
        return node
    home = node.home
    if not isinstance(home, DeviceHome) or home.residence.copies == 1:
        return node
    if not home.is_apart:
        return Mirrored((node.value(),) * home.residence.copies)
    recording = recorder.get()
    if recording is None:
        return PerReplica(tuple(home.copies()))
    return PerReplica(tuple(copies_now(recording, node)))


def container_of(variable: Variable) -> Variable:
    """The variable that this one is a copy of, or itself."""
    home = variable.home
    return home.container if isinstance(home, CopyHome) else variable
