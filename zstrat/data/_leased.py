"""`LeasedSource`: the examples of a source, in one order for all workers.

A *lease* is a range of positions in the order of an epoch. The order is computed from
the seed, the epoch and the position alone, so every worker reads the same examples for
a lease, also when it is read again after a failure. Which worker gets which lease is
decided elsewhere.

With a seed, a source of one block of examples is permuted as a whole. If there are
several blocks (files, row groups), the blocks are permuted, and the rows within each of
them: so a lease reads one or two blocks, and neighbouring examples come from one file.

The order is computed, not stored: as an array it would take 8 bytes an example, in each
process. The permutation is a generalized Feistel cipher on the numbers below n, with
cycle walking for the few numbers of its domain that are not below n (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5). It is random in
the statistical, not in the cryptographic sense: the function of each round is the
finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from operator import index
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, final

import numpy as np

from ._batches import appended
from ._indexed import IndexedRows, indexed
from ._parallel import Callers, Results, result_of
from ._passes import INFINITE, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ._leaves import Element

ROUNDS: Final = 6
"""Rounds of the Feistel cipher. Four rounds pass for random already, but only for large
halves (Luby and Rackoff 1988)."""
MOST: Final = 2**62
"""Largest size n of a permutation: the domain of the cipher exceeds n by less than 2
sqrt(n), and fits 63 bits."""


@final
class Permutation:
    """A pseudorandom permutation of the numbers below ``size``, the same for the same
    ``key``.

    Args:
        size: 1 to 2^62.
        key: Non-negative integers, such as a seed and an epoch.
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        if not 1 <= size <= MOST:
            raise ValueError(f"expected 1 to 2**62 examples, got {size}")
        self.size: Final = size
        # As square as can be: the halves mix best, and few numbers are outside.
        self._a = math.isqrt(size - 1) + 1
        self._b = -(-size // self._a)
        # SeedSequence, as seeds and epochs are small numbers that differ in few bits.
        self._keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the numbers at these positions, which are int64 below ``size``."""
        found: np.ndarray = self._cipher(np.asarray(positions, np.uint64))
        # Cycle walking: a number outside is enciphered again until it is inside. As the
        # cipher is a permutation that ends, and no two positions meet.
        while (outside := found >= self.size).any():
            found[outside] = self._cipher(found[outside])
        return found.astype(np.int64)

    def _cipher(self, numbers: Any) -> Any:
        """Applies the cipher once to numbers of [0, a * b), uint64."""
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


CHUNK: Final = 8192
"""Number of positions to permute in one call: for a few, the calls of numpy cost more
than the work."""
CHUNKS: Final = 4
"""Number of parts of permuted orders to keep."""
AHEAD: Final = 2
"""Number of leases to read in advance: one is read while the other one waits."""


class Lease(NamedTuple):
    """The positions ``start`` to ``start + size`` in the order of an epoch."""

    epoch: int
    start: int
    size: int

    def __str__(self) -> str:
        stop = self.start + self.size
        return f"examples {self.start} to {stop} of epoch {self.epoch}"


@final
@dataclass(frozen=True)
class LeasedSource:
    """The description of a leased dataset, which is sent to the workers.

    Args:
        source: What `indexed` takes, or a function that returns it; the function is
            called in the process that reads the examples.
        batch: Number of examples in a lease; the last lease of an epoch may have fewer.
        seed: Seed of the orders of all epochs; None: the order of the source.
        epochs: Number of epochs; None: without end.
        drop_remainder: Leave out the examples of an epoch that do not fill a batch.

    Raises:
        ValueError: A number is too small.
        TypeError: A number is not an integer.
    """

    source: Any
    batch: int
    seed: int | None = None
    epochs: int | None = 1
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        for what, field, least in (
            ("batch", "batch", 1),
            ("shuffle_seed", "seed", 0),
            ("epochs", "epochs", 1),
        ):
            given = getattr(self, field)
            if given is None and what != "batch":
                continue
            try:
                number = index(given)
            except TypeError:
                raise TypeError(
                    f"{what} must be a whole number, got {given!r:.80}"
                ) from None
            if number < least:
                raise ValueError(f"{what} must be at least {least}, got {number}")
            # Checkpoints hold it as JSON, which has no numbers of numpy.
            object.__setattr__(self, field, number)

    def batches(self, start: int = 0) -> Iterator[Element]:
        """Yields the batches of all epochs in order, without the first ``start``
        batches."""
        reader = self.open()
        try:
            epoch, number = divmod(start, self._steps_of(reader.size))
            while self.epochs is None or epoch < self.epochs:
                for at in range(number, self._steps_of(reader.size)):
                    first = at * self.batch
                    size = min(self.batch, reader.size - first)
                    yield reader.read(Lease(epoch, first, size))
                epoch, number = epoch + 1, 0
        finally:
            reader.close()

    def steps(self) -> int:
        """Returns the number of batches of all epochs; `INFINITE`; or `UNKNOWN`, if the
        source is a function, or files whose records have to be counted."""
        if self.epochs is None:
            return INFINITE
        # A function is called where the examples are read, which need not be here.
        rows = None if callable(self.source) else indexed(self.source)
        if rows is None or rows.is_sequential:
            return UNKNOWN
        return self.epochs * self._steps_of(sum(rows.blocks))

    def _steps_of(self, size: int) -> int:
        return size // self.batch if self.drop_remainder else -(-size // self.batch)

    def check(self) -> None:
        """Checks the source without reading it. Does not check a function.

        Raises:
            TypeError, ValueError: See `indexed`.
        """
        if not callable(self.source):
            indexed(self.source)

    def open(self) -> LeasedReader:
        """Opens the source for reading.

        Raises:
            TypeError, ValueError: See `indexed`; or the source is empty.
            Exception: The error of the function that returns the source.
        """
        source = self.source() if callable(self.source) else self.source
        return LeasedReader(indexed(source), self.seed)


@final
class LeasedReader:
    """Reads the examples of leases. One thread uses a reader at a time."""

    def __init__(self, rows: IndexedRows, seed: int | None) -> None:
        self._rows, self._seed = rows, seed
        self._blocks: Final = np.array(rows.blocks)
        self.size: Final = int(self._blocks.sum())
        if not self.size:
            raise ValueError("a dataset without examples cannot be leased")
        self._chunks: Final[OrderedDict[tuple[int, ...], np.ndarray]] = OrderedDict()
        self._order: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def is_quick(self) -> bool:
        """Whether reading is so quick that a thread that reads ahead would cost more
        than it saves."""
        return self._rows.is_quick

    def read(self, lease: Lease) -> Element:
        """Returns the examples of a lease as one batch."""
        order, ends = self._order_of(lease.epoch)
        at, stop = lease.start, lease.start + lease.size
        parts = []
        while at < stop:  # a lease may reach over the ends of blocks
            place = int(np.searchsorted(ends, at, "right"))
            block = int(order[place])
            first = int(ends[place]) - int(self._blocks[block])
            end = min(stop, int(ends[place]))
            rows = self._permuted(lease.epoch, block, at - first, end - first)
            parts.append(self._rows.read(block, rows))
            at = end
        return parts[0] if len(parts) == 1 else appended(parts)

    def close(self) -> None:
        self._rows.close()

    def _order_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the order of the blocks in an epoch, and the position at which each
        of them ends."""
        if self._order is None or self._order[0] != epoch:
            order = np.arange(len(self._blocks))
            if self._seed is not None and len(order) > 1:
                order = Permutation(len(order), (self._seed, epoch)).at(order)
            self._order = epoch, order, np.cumsum(self._blocks[order])
        return self._order[1:]

    def _permuted(self, epoch: int, block: int, start: int, stop: int) -> np.ndarray:
        """Returns the rows of a block that are at these positions of its order in an
        epoch."""
        # Of a file that is read from its start only the blocks are permuted.
        if self._seed is None or self._rows.is_sequential:
            return np.arange(start, stop)
        first, last = start // CHUNK, (stop - 1) // CHUNK
        chunks = [self._chunk(epoch, block, n) for n in range(first, last + 1)]
        joined = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
        return joined[start - first * CHUNK : stop - first * CHUNK]

    def _chunk(self, epoch: int, block: int, number: int) -> np.ndarray:
        key = epoch, block, number
        # Taken out and put back: the last one of the dict is the last that was used.
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            assert self._seed is not None
            size = int(self._blocks[block])
            # Of several blocks, each has its order, and another key orders the blocks.
            several = (block + 1,) if len(self._blocks) > 1 else ()
            order = Permutation(size, (self._seed, epoch, *several))
            at = np.arange(number * CHUNK, min(size, (number + 1) * CHUNK))
            chunk = order.at(at)
        self._chunks[key] = chunk
        if len(self._chunks) > CHUNKS:
            self._chunks.popitem(last=False)
        return chunk


@final
class LeasedElements:
    """Yields the batches of the leases that a worker has, for one step at a time.

    Expected leases are read in advance, at most `AHEAD` of them, on one thread; a
    source in memory is read when a batch is drawn.
    """

    def __init__(self, reader: LeasedReader) -> None:
        self._reader: Final = reader
        self._given: Final[deque[Lease]] = deque()
        self._expected: Final[deque[Lease]] = deque()
        self._reading: Final[dict[Lease, Results]] = {}
        self._caller: Callers | None = None

    def expect(self, leases: Iterable[Lease]) -> None:
        """Records the leases of steps that will run, in order, and starts to read them
        in advance."""
        if not self._reader.is_quick:
            self._expected.extend(leases)
            self._read_ahead()

    def expect_none(self) -> None:
        """Forgets the expected leases, because their steps were cancelled."""
        # A read that is under way ends on its thread; nobody looks at its result.
        self._expected.clear()
        self._reading.clear()

    def begin(self, leases: Iterable[Lease]) -> None:
        """Yields the batches of these leases next, and no others."""
        # A step before may have failed without drawing all of its own.
        self._given.clear()
        self._given.extend(leases)

    @property
    def left(self) -> int:
        """Number of leases of the present step that were not drawn."""
        return len(self._given)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Element:
        if not self._given:
            raise RuntimeError(
                "the step draws more batches than it did when it was traced, or an "
                "eager step draws a second one: batches are leased when a step is "
                "handed out, and an eager step gets one. Draw as often in each call"
            )
        lease = self._given.popleft()
        if self._reader.is_quick:
            return self._reader.read(lease)
        reading, expected = self._reading, self._expected
        # Steps run in order: those before it have failed without drawing, and what was
        # read for them is dropped.
        if lease in reading:
            while (first := next(iter(reading))) != lease:
                del reading[first]
        elif lease in expected:
            reading.clear()
            while expected.popleft() != lease:
                pass
        results = reading.pop(lease, None)
        if results is None:  # read ahead too late, or before all that are expected
            results = self._begun(lease)
        self._read_ahead()
        return result_of(results)

    def close(self) -> None:
        """Ends the thread that reads in advance, and closes the source."""
        if self._caller is not None:
            self._caller.close()
        self._reader.close()

    def _read_ahead(self) -> None:
        while self._expected and len(self._reading) < AHEAD:
            lease = self._expected.popleft()
            self._reading[lease] = self._begun(lease)

    def _begun(self, lease: Lease) -> Results:
        """Starts to read a lease on the thread, which alone uses the reader."""
        # One thread, made when it is needed: the reader is not safe for two.
        if self._caller is None:
            self._caller = Callers(1)
        results: Results = SimpleQueue()
        self._caller.call(results, self._reader.read, lease)
        return results
