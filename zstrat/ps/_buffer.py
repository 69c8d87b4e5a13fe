"""Host memory of one value, and the one look at it that tells whether anybody looks.

A lease is a view of a *window*, an array over a read-only memoryview of the buffer.
numpy makes a view of a view point at the array that owns the memory, which would hide
views from a weak reference; but it stops at an array whose own base is no ndarray
(``PyArray_SetBaseObject``). So every view derived from a lease, by anybody, keeps the
window alive, and one weak reference tells whether anyone looks.
"""

from __future__ import annotations

import weakref

import numpy as np

from ._rows import as_rows


class Buffer:
    """A host buffer and the lease on it, if one is alive."""

    __slots__ = ("_bytes", "_rows", "_window", "array")

    def __init__(self, array: np.ndarray) -> None:
        """``array``: of our own, writable and in C order."""
        self.array = array
        # As bytes, because bfloat16 and the fp8 types have no buffer protocol.
        self._bytes = array.reshape(-1).view(np.uint8).data.toreadonly()
        self._window: weakref.ref[np.ndarray] | None = None
        self._rows: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """The rows as opaque elements (`as_rows`): a view that is made once."""
        if self._rows is None:
            self._rows = as_rows(self.array)
        return self._rows

    @property
    def is_leased(self) -> bool:
        return self._window is not None and self._window() is not None

    def lease(self) -> np.ndarray:
        array = self.array
        if not array.size:
            return np.empty(array.shape, array.dtype)  # frombuffer wants a byte
        window = self._window() if self._window is not None else None
        if window is None:
            # Not np.ndarray(buffer=...), which looks through the memoryview for a base.
            window = np.frombuffer(self._bytes, array.dtype)
            self._window = weakref.ref(window)
        return window.reshape(array.shape)
