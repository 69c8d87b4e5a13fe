"""Resident arrays: what a window keeps on its worker from one closure to the next.

To a trace they are variables that it reads and assigns; they have keys of their own and
are at no parameter server. The worker gives the values and keeps the new ones (see
`zstrat.worker`). A worker that has none yet gives zeros.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

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
        return self._outer.read(self._handle(variable, what, shape, dtype))

    def round(self) -> jax.Array:
        """Returns the number of the round whose values the window has read, int32."""
        return self._outer.read(self._at("", ROUND, (), "int32"))

    def speed(self) -> jax.Array:
        """Returns the steps per second of this worker, float32; 0 if not known."""
        return self._outer.read(self._at("", SPEED, (), "float32"))

    def keep_own(self, what: str, array: jax.Array) -> None:
        """Keeps an array that belongs to no variable."""
        to = self._at("", what, array.shape, array.dtype)
        self._outer.update(VariableUpdate(to, UpdateOp.ASSIGN, (array,), None))

    def keep(self, variable: VariableHandle, what: str, array: jax.Array) -> None:
        """Keeps an array for the next closure."""
        to = self._handle(variable, what, array.shape, array.dtype)
        self._outer.update(VariableUpdate(to, UpdateOp.ASSIGN, (array,), None))

    def _handle(
        self, variable: VariableHandle, what: str, shape: Sequence[int], dtype: Any
    ) -> VariableHandle:
        return self._at(f"/{variable.name} {variable.spec.key}", what, shape, dtype)

    def _at(
        self, place: str, what: str, shape: Sequence[int], dtype: Any
    ) -> VariableHandle:
        # A digest: each trace has to find the same key, on whatever worker.
        words = f"{self._optimizer} {place} {what}".encode()
        digest = hashlib.blake2b(words, digest_size=7).digest()
        key = -(1 << 60) - int.from_bytes(digest, "big")
        name = f"{self._name}{place}{what}"
        return handle(
            VariableSpec(key, name, tuple(shape), str(dtype), RESIDENT), _NOWHERE
        )
