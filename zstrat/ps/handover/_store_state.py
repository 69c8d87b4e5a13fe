"""A store in a file, told as it is told to a backup.

The messages that make it on an empty store (`StoreCopy`) are arrays of the file, a
header and its frames each; what is pinned follows in parts, as values of the file. Who
reads it makes them as a backup does (`repeat`), so what the store answers next depends
on nothing that is not told there, but for what no backup needs: counts.

Decides without I/O. `StoreWriting` belongs to the owner of the stores, while nothing is
under way there; nobody else has seen the store that `restore` fills.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from zstrat.config import Limits
from zstrat.ps.replication._copying import StoreCopy
from zstrat.ps.replication._repeating import repeat
from zstrat.ps.snapshots._snapshot import SnapshotTensor
from zstrat.ps.store._pins import Pin
from zstrat.wire import CopiedPart, CopyParts, Message, TensorEntry, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.ps.store._store import Store

Facts = dict[str, Any]
"""Of JSON's kinds."""


class StoredArrays(Protocol):
    """The arrays of a state file, by number."""

    def read(self, number: int) -> bytes: ...
    def parts(self, number: int) -> Iterator[memoryview]: ...


@final
class StoreWriting:
    """Stores on their way to a file."""

    def __init__(self) -> None:
        self.tensors: list[SnapshotTensor] = []
        """The arrays, in order. Released by whoever has them."""

    def add(self, store: Store) -> Facts:
        """Adds a store as it is now, without a copy; returns the facts by which
        `restore` finds its arrays."""
        copy, at = StoreCopy(store), len(self.tensors)
        # Values first: they lie where the disk takes them from memory as they are.
        self.tensors += copy.tensors
        told = [_frames(message) for message in copy.messages]
        self.tensors += [tensor for frames in told for tensor in frames]
        return {
            "at": at,
            "values": [list(tensor.entry[:3]) for tensor in copy.tensors],
            "messages": [len(frames) for frames in told],
            "counts": asdict(store.counts),
        }


def restore(store: Store, facts: Facts, arrays: StoredArrays) -> None:
    """Fills an empty store.

    Raises:
        KeyError, TypeError, ValueError, ProtocolError: The arrays do not belong to the
            facts.
        Exception: Whatever loading an optimizer raises.
    """
    values, at = facts["values"], facts["at"]
    numbers = count(at + len(values))
    for frames in facts["messages"]:
        header, *bodies = [arrays.read(next(numbers)) for _ in range(frames)]
        _make(store, decode(header, bodies, Limits())[1])
    for number, (key, optimizer, leaf) in enumerate(values, at):
        start = 0
        for part in arrays.parts(number):
            data = np.frombuffer(part, np.uint8)
            _make(store, CopyParts([CopiedPart(key, optimizer, leaf, start)], (data,)))
            start += len(part)
    for name, number in facts["counts"].items():
        setattr(store.counts, name, int(number))


def _make(store: Store, change: Message) -> None:
    computation = repeat(store, change)
    if computation is not None:
        computation.compute()
        computation.commit()


def _frames(message: Message) -> list[SnapshotTensor]:
    header, frames = encode(message)
    return [_bytes(each) for each in (np.frombuffer(header, np.uint8), *frames)]


def _bytes(data: np.ndarray) -> SnapshotTensor:
    """Bytes that nobody writes to any more."""
    entry = TensorEntry(0, 0, "", data.dtype.name, list(data.shape), True)
    return SnapshotTensor(entry, Pin(data, frozen=True))
