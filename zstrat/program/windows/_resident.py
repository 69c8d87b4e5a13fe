"""Resident arrays: what a window keeps on its worker from one closure to the next.

To a trace they are variables that it reads and assigns; they have keys of their own and
are at no parameter server. The worker gives the values and keeps the new ones (see
`zstrat.worker`), also those of a checkpoint. A worker that has none yet gives zeros.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zstrat.variables import (
    RESIDENT,
    UnboundStorage,
    VariableSpec,
    VariableUpdate,
    handle,
)
from zstrat.wire import UpdateOp

from ._fragments import ROUND, SPEED

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax

    from zstrat.program.trace._capture import Capture
    from zstrat.variables import VariableHandle


class ResidentName(NamedTuple):
    """What a resident array is: ``what``, beside the variable of a key (0: none), of
    the outer optimizer of an id."""

    what: str
    variable: int
    optimizer: int


@functools.lru_cache(1 << 14)
def resident_name(name: str) -> ResidentName:
    """Returns what the array is whose `VariableSpec` has this name."""
    what, variable, optimizer, _ = name.split(" ", 3)
    return ResidentName(what, int(variable), int(optimizer))


class _KeptByWorkers(UnboundStorage):
    """The storage in a window that is called here instead of scheduled."""

    def refusal(self, variable: VariableHandle, what: str) -> RuntimeError:
        return RuntimeError(
            f"{variable.spec} is kept by each worker, but this window was called "
            "outside of one: schedule it, coordinator.schedule(window, args=...)"
        )


_NOWHERE: Final = _KeptByWorkers()


class ResidentArrays:
    """The resident arrays of one optimizer in one trace.

    Args:
        optimizer: Id of the outer optimizer.
        name: Of the optimizer, for messages.
    """

    def __init__(self, optimizer: int, name: str, outer: Capture) -> None:
        self._optimizer, self._name, self._outer = optimizer, name, outer

    def read(
        self, variable: VariableHandle, what: str, shape: Sequence[int], dtype: Any
    ) -> jax.Array:
        """Returns the array that is kept beside a variable under the name ``what``."""
        return self._outer.read(self._at(variable, what, shape, dtype))

    def round(self) -> jax.Array:
        """Returns the number of the round whose values the window has read, int32."""
        return self._outer.read(self._at(None, ROUND, (), "int32"))

    def speed(self) -> jax.Array:
        """Returns the steps per second of this worker, float32; 0 if not known."""
        return self._outer.read(self._at(None, SPEED, (), "float32"))

    def keep(
        self, variable: VariableHandle | None, what: str, array: jax.Array
    ) -> None:
        """Keeps an array for the next closure; None: it belongs to no variable."""
        to = self._at(variable, what, array.shape, array.dtype)
        self._outer.update(VariableUpdate(to, UpdateOp.ASSIGN, (array,), None))

    def _at(
        self,
        variable: VariableHandle | None,
        what: str,
        shape: Sequence[int],
        dtype: Any,
    ) -> VariableHandle:
        what = what.replace(" ", "_")
        place = 0 if variable is None else variable.spec.key
        # A digest: each trace has to find the same key, on whatever worker.
        words = f"{what} {place} {self._optimizer}"
        digest = hashlib.blake2b(words.encode(), digest_size=7).digest()
        key = -(1 << 60) - int.from_bytes(digest, "big")
        name = f"{words} {self._name}"
        if variable is not None:
            name = f"{name}/{variable.name}"
        return handle(
            VariableSpec(key, name, tuple(shape), str(dtype), RESIDENT), _NOWHERE
        )
