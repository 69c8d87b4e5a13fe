"""Memory of arrays that begins where XLA and the kernel want it to.

numpy alone: this is used where jax is not loaded.
"""

from __future__ import annotations

from typing import Final

import numpy as np

_BYTE: Final = np.dtype(np.uint8)

ALIGNMENT: Final = 64
"""XLA shares host memory so aligned, in place of copying it; also a cache line."""


def aligned(shape: tuple[int, ...], dtype: np.dtype, to: int = ALIGNMENT) -> np.ndarray:
    """Returns an uninitialised C-order array whose memory starts at a multiple of
    ``to``."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + to, np.uint8)
    start = -memory.ctypes.data % to
    return memory[start : start + size].view(dtype).reshape(shape)


HUGE_PAGE: Final = 2 * 2**20
"""What Linux maps as one where memory is asked for in so large pieces. Rows at random
are read a third faster in such pages, for each row of a table is on a page of its own.
"""


def lasting(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`aligned`, for what stays and is read here and there: memory of two huge pages or
    more begins with one, and there is room to the end of the last, or else that would
    be small pages. It may take 2 MiB more.

    numpy asks for huge pages in allocations of 4 MiB and more.
    """
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size < 2 * HUGE_PAGE:
        return aligned(shape, dtype)
    whole = aligned((-(-size // HUGE_PAGE) * HUGE_PAGE,), _BYTE, to=HUGE_PAGE)
    return whole[:size].view(dtype).reshape(shape)
