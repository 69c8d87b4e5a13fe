"""The other face of a strategy whose devices are those of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from zstrat.variables import Variable

from ._devices import task_names
from ._extended import StrategyExtended
from .mirrored._copy_home import container_of
from .reduce._reductions import ReductionToOneDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax

    from zstrat.variables import AbstractVariable

    from ._strategy import Strategy
    from .mirrored._mirrored_store import MirroredVariables
    from .reduce._cross_device import CrossDeviceOps


@final
class LocalExtended(StrategyExtended):
    """Where replicas run and variables live.

    Args:
        workers: The device of each replica.
        parameters: Those that variables are on.
        variables: Who creates them.
        ops: What brings values together outside of steps.
    """

    def __init__(
        self,
        strategy: Strategy,
        workers: Sequence[jax.Device],
        parameters: Sequence[jax.Device],
        variables: MirroredVariables,
        ops: CrossDeviceOps | None = None,
    ) -> None:
        super().__init__(strategy)
        self._workers = task_names(workers)
        self._parameters = task_names(parameters)
        self._variables = variables
        self._ops = ops or ReductionToOneDevice()

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return self._workers

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self._parameters

    def variable_created_in_scope(self, v: AbstractVariable) -> bool:
        return all(self._variables.owns(part) for part in v.components)

    def value_container(self, value: Any) -> Any:
        """The variable that ``value`` is a copy of, or ``value``."""
        return container_of(value) if isinstance(value, Variable) else value

    def _cross_device_ops(self) -> CrossDeviceOps:
        return self._ops
