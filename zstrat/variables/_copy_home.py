"""One copy of a variable that several devices have: the home of what is done to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._device import DeviceHome
from ._local import HomeHere

if TYPE_CHECKING:
    import numpy as np

    from zstrat.wire import UpdateOp

    from ._home import Operands, VariableHandle
    from .gradients._slots import OptimizerHandle


def copy_home(variable: VariableHandle) -> CopyHome | None:
    """Which copy of which variable this is; None: it is none."""
    home = variable.home
    return home if isinstance(home, CopyHome) else None


class CopyHome(HomeHere):
    """The home of one copy: a row of the home of the whole variable."""

    def __init__(self, container: VariableHandle, number: int) -> None:
        self.container = container
        self.number = number

    def device_name(self) -> str:
        """TF's name of the device that keeps this copy."""
        return self._home.device_name(self.number)

    def read(self, variable: VariableHandle) -> np.ndarray:
        del variable  # one home, one copy
        return self._home.copy(self.container, self.number)

    def update(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: Operands,
        optimizer: OptimizerHandle | None,
    ) -> None:
        if optimizer is not None:
            raise self.not_optimized(variable)
        self._home.update_copy(self.container, self.number, op, [operands])

    def not_optimized(self, variable: VariableHandle) -> NotImplementedError:
        """The error of an optimizer that is given this copy."""
        return NotImplementedError(
            f"{variable.spec} is one copy of {self.container.spec}, and optimizers "
            "move all copies together: give apply_gradients the variable itself"
        )

    @property
    def _home(self) -> DeviceHome:
        home = self.container.home
        assert isinstance(home, DeviceHome)
        return home
