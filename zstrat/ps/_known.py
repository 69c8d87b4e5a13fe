"""What a reader remembers of the variables that it has read already."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy as np


class Value(NamedTuple):
    """A value and its version on the parameter server."""

    version: int
    array: np.ndarray


class Known:
    """Latest values by variable, the least recently used ones dropped above a bound."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, name: Hashable) -> Value | None:
        value = self._values.get(name)
        if value is not None:
            self._values.move_to_end(name)
        return value

    def put(self, name: Hashable, value: Value) -> None:
        """Remembers a value, unless a later version of it is known already."""
        old = self._values.get(name)
        if old is not None and old.version > value.version:
            return
        if value.array.nbytes > self._capacity:
            self.drop(name)
            return
        self.nbytes += value.array.nbytes - (0 if old is None else old.array.nbytes)
        self._values[name] = value
        self._values.move_to_end(name)
        while self.nbytes > self._capacity:
            _, oldest = self._values.popitem(last=False)
            self.nbytes -= oldest.array.nbytes

    def drop(self, name: Hashable) -> None:
        old = self._values.pop(name, None)
        if old is not None:
            self.nbytes -= old.array.nbytes

    def clear(self) -> None:
        self._values.clear()
        self.nbytes = 0
