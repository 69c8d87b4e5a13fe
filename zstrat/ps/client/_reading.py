"""One pull: its messages, the values in the answers, and the cache of values.

Decides without I/O. Values of whole variables are cached (`Known`), so that a value
which did not change is not sent again; rows are sent each time, because the next step
asks for other rows.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from zstrat.codecs import BFLOAT16
from zstrat.wire import Pull, PullRows, Read

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from zstrat.wire import Exchanged, Pulled, PulledRound, SetPart


class Value(NamedTuple):
    """A value and its version on the parameter server."""

    version: int
    array: np.ndarray


class Known:
    """A cache of the latest values by variable. The least recently used values are
    dropped above a bound in bytes."""

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
        """Caches a value, unless a later version of the variable is known already."""
        values, nbytes = self._values, value.array.nbytes
        old = values.get(name)
        # Answers to two pulls may come in the other order.
        if old is not None and old.version > value.version:
            return
        # It would push out all others.
        if nbytes > self._capacity:
            self.drop(name)
            return
        self.nbytes += nbytes if old is None else nbytes - old.array.nbytes
        values[name] = value
        if old is not None:  # a new one is at the end already
            values.move_to_end(name)
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


Clocks = dict[int, int]
"""By server, `Pulled.clock`: the number of pushes that it had applied at its answer; in
the order of the answers."""

SMALL: Final = 64 * 1024
"""Bytes below which an array is copied out of the message in which it came, if the
message is larger, so that a cached array does not keep the whole message in memory."""

READS: Final = 1024
"""The most variables read by one message: a server answers it in a few ms, during which
it does nothing else."""

ROWS: Final = 1024
"""The most variables of which one message reads rows, besides those that it reads
whole."""


SETS: Final = 32
"""The most sets of small variables that one message reads: concatenating their values
takes 10 ms."""


class Ref(NamedTuple):
    """A variable: the number of its parameter server, and its key there. ``codec``
    encodes a float32 value on a network."""

    ps: int
    key: int
    codec: int = 0


class RowsRef(NamedTuple):
    """Rows of a variable: ``indices`` are ``[n]`` integers along its first axis."""

    ps: int
    key: int
    indices: np.ndarray


class SetRef(NamedTuple):
    """Small variables of one server and dtype that are read as one array: their
    ``places`` in the refs of the pull, their ``keys`` (int64 ``[n]``), and the part of
    the array that each of them has."""

    ps: int
    places: tuple[int, ...]
    keys: np.ndarray
    parts: tuple[SetPart, ...]

    @property
    def name(self) -> Hashable:
        """The key of the set's value in the cache."""
        return self.ps, self.keys.tobytes()


class ServerPull(NamedTuple):
    """One message of a pull to one server. ``take`` receives the answer, and raises
    ValueError or StopIteration if the answer is malformed. ``arrays`` are the indices
    for each of ``rows``, then the keys of each of ``sets``."""

    ps: int
    reads: list[Read]
    rows: list[int]
    arrays: tuple[np.ndarray, ...]
    sets: list[int]
    take: Callable[[Pulled | PulledRound | Exchanged], None]

    def message(self, session: int) -> Pull | PullRows:
        """Returns the pull as a message by itself, not as a part of an exchange."""
        if self.arrays:
            rows, arrays = self.rows, self.arrays
            return PullRows(session, self.reads, rows, arrays, self.sets)
        return Pull(session, self.reads)


@final
class Reading:
    """Collects the values of one pull from the answers of all servers, in any order."""

    __slots__ = (
        "_clocks",
        "_counts",
        "_known",
        "_refs",
        "_rows",
        "_sets",
        "_shares_memory",
        "_values",
    )

    def __init__(
        self,
        refs: Sequence[Ref],
        rows: Sequence[RowsRef],
        known: Known,
        clocks: Clocks | None = None,
        shares_memory: Callable[[int], bool] = lambda ps: False,
        counts: Counter[str] | None = None,
        sets: Sequence[SetRef] = (),
    ) -> None:
        self._refs, self._rows, self._known = refs, rows, known
        self._sets = sets
        self._shares_memory, self._counts = shares_memory, counts
        self._clocks = {} if clocks is None else clocks
        self._values: list[np.ndarray | None] = [None] * (len(refs) + len(rows))

    def messages(self) -> Iterator[ServerPull]:
        """Yields the requests of the pull: one per server, more for thousands of
        variables."""
        refs, rows, sets = self._refs, self._rows, self._sets
        by_ps: dict[int, tuple[list[int], list[int], list[SetRef]]] = {}
        for each in sets:
            by_ps.setdefault(each.ps, ([], [], []))[2].append(each)
        taken = {place for each in sets for place in each.places} if sets else ()
        for place, ref in enumerate(refs):
            if place in taken:
                continue
            # No `setdefault`, which would make three lists for each variable of each
            # pull.
            if ref[0] not in by_ps:
                by_ps[ref[0]] = ([], [], [])
            by_ps[ref[0]][0].append(place)
        for place, some in enumerate(rows):
            by_ps.setdefault(some[0], ([], [], []))[1].append(place)
        for ps, (whole, parts, together) in by_ps.items():
            count = max(
                -(-len(whole) // READS),
                -(-len(parts) // ROWS),
                -(-len(together) // SETS),
            )
            for at in range(count):
                yield self._asked(
                    ps,
                    whole[at * READS : (at + 1) * READS],
                    parts[at * ROWS : (at + 1) * ROWS],
                    together[at * SETS : (at + 1) * SETS],
                )

    def result(self) -> list[np.ndarray]:
        """Returns the values of the variables in order, then the rows; call it when all
        answers have arrived."""
        return [value for value in self._values if value is not None]

    def _asked(
        self, ps: int, whole: list[int], parts: list[int], sets: list[SetRef]
    ) -> ServerPull:
        refs, rows, known = self._refs, self._rows, self._known
        values = [known.get(refs[place]) for place in whole]
        # Through shared memory fewer bytes save nothing, so values are read as they
        # are.
        reads = [
            Read(
                refs[place][1],
                -1 if value is None else value.version,
                0 if refs[place][2] and self._shares_memory(ps) else refs[place][2],
            )
            for place, value in zip(whole, values, strict=True)
        ]
        keys = [rows[place].key for place in parts]
        indices = tuple([rows[place].indices for place in parts])
        given = (*indices, *(each.keys for each in sets))
        together = [(each, known.get(each.name)) for each in sets]
        versions = [-1 if value is None else value.version for _, value in together]
        take = partial(self._take, ps, whole, values, parts, together)
        return ServerPull(ps, reads, keys, given, versions, take)

    def _take(
        self,
        ps: int,
        whole: list[int],
        known: list[Value | None],
        parts: list[int],
        sets: list[tuple[SetRef, Value | None]],
        answer: Pulled | PulledRound | Exchanged,
    ) -> None:
        changed = len(answer.arrays) - len(parts)
        if changed < 0:
            raise ValueError(f"{len(answer.arrays)} arrays for {len(parts)} of rows")
        self._clocks.setdefault(ps, answer.clock)
        arrays = iter(answer.arrays)
        # All arrays are views of one body, so this is decided for all of them.
        copy_below = _copy_below(answer.arrays, changed)
        values, refs, put = self._values, self._refs, self._known.put
        versions = answer.versions
        if len(versions) != len(whole) + len(sets):
            raise ValueError(f"{len(versions)} versions")
        for place, old, version in zip(whole, known, versions, strict=False):
            # What was known when the request was sent: by now it may have been dropped,
            # or replaced by a later one.
            if old is not None and old.version == version:
                values[place] = old.array
                continue
            array = next(arrays)
            changed -= 1
            ref = refs[place]
            if ref[2] and array.dtype == BFLOAT16:
                if self._counts is not None:
                    self._counts["encoded_from"] += 2 * array.nbytes
                    self._counts["encoded_to"] += array.nbytes
                array = array.astype(np.float32)
                array.setflags(write=False)
            # A view would keep the memory of the whole body (`_copy_below`).
            if array.nbytes < copy_below:
                array = array.copy()
                array.setflags(write=False)
            values[place] = array
            put(ref, Value(version, array))
        for (one, old), version in zip(sets, versions[len(whole) :], strict=True):
            value = old
            if value is None or value.version != version:
                array = next(arrays)
                changed -= 1
                if array.shape != (one.parts[-1].stop,):
                    raise ValueError(f"a set of shape {array.shape}")
                if array.nbytes < copy_below:
                    array = array.copy()
                    array.setflags(write=False)
                value = Value(version, array)
                # The set is remembered as one array, of which the values are views.
                put(one.name, value)
            array = value.array
            # As `SetPart.of`, without a call for each of a hundred variables.
            for place, (start, stop, shape) in zip(one.places, one.parts, strict=True):
                values[place] = array[start:stop].reshape(shape)
        if changed:
            raise ValueError(f"{changed} values of variables that did not change")
        for place, found in zip(parts, arrays, strict=True):
            asked = len(self._rows[place].indices)
            if found.shape[:1] != (asked,):
                raise ValueError(f"an array of shape {found.shape} for {asked} rows")
            values[len(self._refs) + place] = found


def _copy_below(arrays: Sequence[np.ndarray], changed: int) -> float:
    """Returns the size in bytes below which an array is copied before it is cached.

    All arrays of an answer are views of one body. A small array that is cached for long
    must not keep the memory of the whole body, and values must not keep the memory of
    more bytes of rows than they have themselves.
    """
    if not changed:
        return 0
    whole = sum([array.nbytes for array in arrays[:changed]])
    rows = sum([array.nbytes for array in arrays[changed:]])
    if rows > max(whole, SMALL):
        return float("inf")
    return SMALL if whole + rows > SMALL else 0
