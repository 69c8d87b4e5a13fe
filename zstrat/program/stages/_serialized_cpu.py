"""Programs over several parts of one CPU are run one at a time.

XLA gives each device of a CPU program a thread of one pool, and a device that waits for
the others in a collective keeps its thread. Where two programs are under way, each may
hold threads that the other needs, and neither ends: XLA then ends the process. Nothing
is lost by waiting: both would compute on the same cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Sharding

# jax's stubs leave it untyped.
_wait: Final[Any] = jax.block_until_ready

Outputs = TypeVar("Outputs")


def settled(outputs: Outputs, arrays: Sequence[Any]) -> Outputs:
    """What a program returned; ready, if it is one over several parts of the CPU.

    Args:
        outputs: All that it returned, a pytree.
        arrays: Some of it: the first of them says where the program runs.
    """
    if arrays and _is_real(arrays[0]) and is_waited_for(arrays[0].sharding):
        _wait(arrays[0])  # the program ends with all that it returns
    return outputs


def is_waited_for(sharding: Sharding) -> bool:
    """Whether a program over these devices is."""
    devices: set[Any] = sharding.device_set  # untyped
    return len(devices) > 1 and next(iter(devices)).platform == "cpu"


def _is_real(array: Any) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
