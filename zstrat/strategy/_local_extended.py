"""The other face of a strategy whose devices are those of one process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, final

from ._devices import task_names
from ._strategy import Extended

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import jax

    from zstrat.variables import AbstractVariable

    from ._mirrored import MirroredVariables


@final
class LocalExtended(Extended):
    """Where replicas run and variables live.

    Args:
        workers: The device of each replica.
        parameters: Those that variables are on.
        variables: Who creates them.
    """

    def __init__(
        self,
        workers: Sequence[jax.Device],
        parameters: Sequence[jax.Device],
        variables: MirroredVariables,
    ) -> None:
        self._workers = task_names(workers)
        self._parameters = task_names(parameters)
        self._variables = variables

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return self._workers

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self._parameters

    def variable_created_in_scope(self, v: AbstractVariable) -> bool:
        return all(self._variables.owns(part) for part in v.components)

    def colocate_vars_with(
        self, colocate_with_variable: AbstractVariable
    ) -> AbstractContextManager[None]:
        return contextlib.nullcontext()
