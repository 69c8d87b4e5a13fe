"""The home of one copy of a variable of which several replicas have one each.

Law of the file: what is done to one copy is done to it alone. A step that is captured
does not come here: it computes with the row, as a part of all copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._device import DeviceHome

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from zstrat.wire import UpdateOp

    from ._home import HomeRows, HomeUpdate
    from ._optimizer import Optimizer
    from ._variable import Variable


class CopyHome:
    """The home of one copy: a row of the home of the whole variable."""

    def __init__(self, container: Variable, number: int) -> None:
        self.container = container
        self.number = number

    def device_name(self) -> str:
        """TF's name of the device that keeps this copy."""
        return self._home.device_name(self.number)

    def read(self, variable: Variable) -> np.ndarray:
        del variable  # one home, one copy
        return self._home.copy(self.container, self.number)

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
            raise self.not_optimized(variable)
        self._home.update_copy(self.container, self.number, op, [operands])

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

    def not_optimized(self, variable: Variable) -> NotImplementedError:
        """An optimizer is given this copy."""
        return NotImplementedError(
            f"{variable.spec} is one copy of {self.container.spec}, and optimizers "
            "move all copies together: give apply_gradients the variable itself"
        )

    @property
    def _home(self) -> DeviceHome:
        home = self.container.home
        assert isinstance(home, DeviceHome)
        return home
