"""One copy of a variable that several devices have: the storage of what is done to
it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._device import DeviceStorage
from ._local import ProcessStorage

if TYPE_CHECKING:
    import numpy as np

    from zstrat.wire import UpdateOp

    from ._storage import Operands, VariableHandle
    from .gradients._slots import OptimizerHandle


def copy_storage(variable: VariableHandle) -> CopyStorage | None:
    """Which copy of which variable this is; None: it is none."""
    storage = variable.storage
    return storage if isinstance(storage, CopyStorage) else None


class CopyStorage(ProcessStorage):
    """The storage of one copy: a row of the storage of the whole variable."""

    def __init__(self, container: VariableHandle, number: int) -> None:
        self.container = container
        self.number = number

    def device_name(self) -> str:
        """TF's name of the device that keeps this copy."""
        return self._storage.device_name(self.number)

    def read(self, variable: VariableHandle) -> np.ndarray:
        del variable  # one storage, one copy
        return self._storage.copy(self.container, self.number)

    def update(
        self,
        variable: VariableHandle,
        op: UpdateOp,
        operands: Operands,
        optimizer: OptimizerHandle | None,
    ) -> None:
        if optimizer is not None:
            raise self.not_optimized(variable)
        self._storage.update_copy(self.container, self.number, op, [operands])

    def not_optimized(self, variable: VariableHandle) -> NotImplementedError:
        """The error of an optimizer that is given this copy."""
        return NotImplementedError(
            f"{variable.spec} is one copy of {self.container.spec}, and optimizers "
            "move all copies together: give apply_gradients the variable itself"
        )

    @property
    def _storage(self) -> DeviceStorage:
        storage = self.container.storage
        assert isinstance(storage, DeviceStorage)
        return storage
