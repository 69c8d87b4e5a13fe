"""Random orders of any number of examples that are computed, not stored.

A shuffled order of n numbers as an array takes 8n bytes, in each process, in each
epoch. Here it is a function of the position: a generalized Feistel cipher on [0, n),
with cycle walking for the few numbers of its domain above n (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5). Position and
epoch are all that is needed to find an example, so a range of positions can be read by
any process, in any order, again and again.

It is statistical, not cryptographic: the function of each round is the finalizer of
splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import math
from typing import Any, Final, final

import numpy as np

ROUNDS: Final = 6
"""Four pass for random already (Luby and Rackoff 1988), for large halves alone."""
MOST: Final = 2**62
"""The domain is larger than n by less than 2 sqrt(n), and fits 63 bits."""


@final
class Permutation:
    """A random order of the numbers below ``size``, the same for the same ``key``.

    Args:
        size: 1 to 2^62.
        key: Non-negative integers, such as a seed and an epoch.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        if not 1 <= size <= MOST:
            raise ValueError(f"expected 1 to 2**62 examples, got {size}")
        self.size: Final = size
        self._a = math.isqrt(size - 1) + 1
        self._b = -(-size // self._a)
        self._keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the numbers at these positions, which are int64 below ``size``."""
        found: np.ndarray = self._cipher(np.asarray(positions, np.uint64))
        while (outside := found >= self.size).any():
            found[outside] = self._cipher(found[outside])
        return found.astype(np.int64)

    def _cipher(self, numbers: Any) -> Any:
        """One application of the cipher on [0, a * b), uint64."""
        sizes = np.uint64(self._a), np.uint64(self._b)
        left, right = numbers % sizes[0], numbers // sizes[0]
        for number, key in enumerate(self._keys):
            mixed = _mixed(right + key) % sizes[number % 2]
            left, right = right, (left + mixed) % sizes[number % 2]
        # The number of rounds is even: each half is in its place again.
        return right * sizes[0] + left


def _mixed(numbers: Any) -> Any:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
