"""Variables of which each process has a copy, equal to all others.

They are created by all processes alike; the first value is that of rank 0. From then on
every process makes the same updates, of operands that are equal everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zstrat.program._cross import Kind
from zstrat.variables import (
    DeviceHome,
    LocalHome,
    Residence,
    Variable,
    VariableSynchronization,
    initialize,
    next_id,
    owned,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.program._cross import Channel
    from zstrat.variables import AbstractVariable, Optimizer, Request


class MirroredVariables:
    """Creates variables on the devices of this process, and knows which it created.

    Args:
        devices: Each has the whole value.
        channel: The processes that have a copy; None for this one alone.
    """

    def __init__(
        self, devices: Sequence[jax.Device], channel: Channel | None = None
    ) -> None:
        self._channel = channel
        mesh = None if channel is None else channel.mesh
        self.residence = Residence(
            _placing(devices, mesh), mesh, lambda: channel and channel.mark
        )

    def owns(self, variable: Variable) -> bool:
        """Whether the variable was created here."""
        home = variable.home
        return isinstance(home, DeviceHome) and home.residence is self.residence

    def create_variables(self, requests: Sequence[Request]) -> list[AbstractVariable]:
        """New variables, in one broadcast for all of them.

        Raises:
            ValueError: A request has no initial value, or a synchronization that
                mirrored variables do not have.
            PeerLostError, CollectiveTimeoutError: Another process did not take part.
        """
        for request in requests:
            if request.synchronization is VariableSynchronization.NONE:
                raise ValueError(
                    f"variable {request.name!r}: `NONE` variable synchronization mode "
                    "is not supported with mirrored variables: leave it out (AUTO)"
                )
        values = [initialize(request) for request in requests]
        if self._channel is not None:
            values = self._channel.carry_out(Kind.FIRST, values)
        return [
            owned(request, value, self._home(np.asarray(value)))
            for request, value in zip(requests, values, strict=True)
        ]

    def register_optimizer(self, optimizer: Optimizer) -> int:
        """The number of an optimizer; it runs in the step that uses it."""
        del optimizer
        return next_id()

    def _home(self, value: np.ndarray) -> DeviceHome | LocalHome:
        seen: Any = jax.dtypes.canonicalize_dtype(value.dtype)
        if seen != value.dtype:
            # jax would cut it to 32 bits; steps refuse it, with words.
            return LocalHome(value)
        return DeviceHome(value, self.residence)


def _placing(
    devices: Sequence[jax.Device], mesh: Mesh | None
) -> Callable[[Any], jax.Array]:
    if mesh is None and len(devices) == 1:
        where: Any = devices[0]
    else:
        made: Any = PartitionSpec  # untyped
        mesh = mesh or Mesh(np.array(devices), ("replica",))
        where = NamedSharding(mesh, made())

    def place(array: Any) -> jax.Array:
        if mesh is not None:
            # Each process gives its own devices a copy; nothing is compared.
            value = np.array(array, order="C")
            return jax.make_array_from_callback(value.shape, where, value.__getitem__)
        # A copy: jax may use the very memory of an array of numpy.
        placed: jax.Array = jax.device_put(np.array(array, order="C"), where)
        return placed

    return place
