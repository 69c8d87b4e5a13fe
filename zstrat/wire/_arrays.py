"""Encodes arrays as raw frames, one by one or in sets of small arrays.

The table of dtypes is closed, and arrays are viewed where possible, not copied. On the
wire an array is the name of its dtype, its dims, and its elements in C order and little
endian. Nothing else is ever accepted, so a frame cannot name an object dtype, claim
more elements than its bytes hold, or make this process allocate.

Two facts explain the code: the buffer protocol does not know ml_dtypes, so elements
leave as a view of bytes; and numpy makes the base of a view the owner of the memory,
not the array that was viewed, so the view has to hold that array itself.

Small variables of one dtype travel one after the other in one array, a *set*. A frame
of its own, an entry of its own and an array of its own cost ten times what the elements
of a small variable do. So a worker sends the gradients of a set as one array, and reads
its values as one. A server accepts any variables as a set. But both ends divide
variables into sets by the same rule (`in_sets`), so that the arrays that a server
stores (`zstrat.ps.store._flat`) mostly are the arrays that travel, and no elements are
copied together or apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import ml_dtypes
import numpy as np

from zstrat.errors import ProtocolError

from ._schema import Mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


Buffer = bytes | memoryview | np.ndarray

MAX_DIMS: Final = 32
"""Most dims of an array, as many as every numpy in use can hold; real tensors have
below ten."""

_ADDRESSABLE: Final = 2**63 - 1
_BYTE: Final = np.dtype(np.uint8)

_TYPES: Final = (
    *(np.bool_, np.int8, np.int16, np.int32, np.int64),
    *(np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3),
    *(ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e4m3fn),
    *(ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2),
    *(ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu),
)

DTYPES: Final[Mapping[str, np.dtype]] = MappingProxyType(
    {np.dtype(each).name: np.dtype(each).newbyteorder("<") for each in _TYPES}
)
"""Every dtype that may travel, by its name on the wire."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Dtype and shape of an array that a header announces, before its elements
    arrive."""

    dtype: np.dtype
    shape: tuple[int, ...]
    nbytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        nbytes = self.dtype.itemsize * math.prod(self.shape)
        # Computed once: specs are remembered (`_seen`) and asked for it at every
        # message.
        object.__setattr__(self, "nbytes", nbytes)


@final
class RawView(np.ndarray):
    """The bytes of an array ``source``, which lives as long as the view. So an owner
    that watches the array it gave away notices when the last of its bytes has left."""

    source: np.ndarray | None = None


def dtype_named(name: str) -> np.dtype:
    """Returns the dtype that has ``name`` on the wire ("float32", "bfloat16",
    "float8_e5m2", ...).

    Raises:
        ProtocolError: No dtype of that name may travel.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ProtocolError(f"dtype {name!r:.60}: expected one of {', '.join(DTYPES)}")
    return dtype


def name_of(dtype: np.dtype) -> str | None:
    """Returns the name that a dtype has on the wire, whatever its byte order, or None
    if it may not travel. Faster than numpy's own name, which takes microseconds."""
    # Native order is found at once; only other orders need a second dtype.
    return _NAMES.get(dtype) or _NAMES.get(dtype.newbyteorder("<"))


def announce(array: np.ndarray) -> tuple[str, tuple[int, ...]]:
    """Returns the name of the array's dtype and its dims, in the form that a header has
    them.

    Raises:
        TypeError: ``array`` is not an array, or is one of objects, texts, dates or
            records.
    """
    if type(array) is not np.ndarray:
        _check_class(array)
    name = name_of(array.dtype)
    if name is None:
        raise TypeError(
            f"an array of dtype {array.dtype} and shape {array.shape} cannot be sent: "
            f"expected one of {', '.join(DTYPES)}"
        )
    if array.ndim > MAX_DIMS:
        raise TypeError(f"an array of {array.ndim} dims: expected at most {MAX_DIMS}")
    return name, array.shape


def _check_class(array: object) -> None:
    # A masked array would lose its mask, silently.
    good = isinstance(array, np.ndarray | np.generic)
    if not good or isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"expected a plain numpy array, got {type(array).__name__}")


def raw(array: np.ndarray) -> np.ndarray:
    """Returns the elements of an array as bytes, uint8 [nbytes]: C order, little
    endian.

    The bytes are a view that keeps ``array`` alive if it has that layout already, else
    a copy.
    """
    if not array.flags.c_contiguous or array.dtype not in _NAMES:
        array = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    view = array.reshape(-1).view(_BYTE, RawView)
    # numpy would refer to the owner of the memory alone, see above.
    view.source = array
    return view


def array_from(spec: ArraySpec, buffer: Buffer) -> np.ndarray:
    """Returns an array of the spec's dtype and shape: a read-only view of the bytes of
    ``buffer``.

    Raises:
        ProtocolError: The buffer has another size than the spec announced.
    """
    got = len(buffer) if type(buffer) is bytes else buffer.nbytes  # type: ignore[union-attr]
    if got != spec.nbytes:
        raise ProtocolError(
            f"array {spec.dtype.name}{list(spec.shape)}: "
            f"expected {spec.nbytes} bytes, got a frame of {got}"
        )
    array = np.ndarray(spec.shape, spec.dtype, buffer)
    # Even if the buffer may be written: its memory may be that of other arrays, or of
    # the peer.
    array.setflags(write=False)
    return array


def check_specs(announced: Any) -> list[ArraySpec]:
    """Returns the array specs that a header announces as ``[[dtype, dims], ...]``;
    raises `Mismatch` if they are invalid."""
    if type(announced) is not list:
        raise Mismatch("a list", announced)
    try:
        dims = list(map(_dims, announced))
        # Ints alone: True and 2.0 are found in a dict as 1 and 2 are.
        if set(map(type, dims)) == _LISTS and set(map(type, chain(*dims))) <= _INTS:
            return [_seen[name, *each] for name, each in announced]
    except (TypeError, ValueError, LookupError):
        pass  # one that is new, or wrong
    specs = []
    for place, each in enumerate(announced):
        try:
            specs.append(_spec(each))
        except Mismatch as wrong:
            raise wrong.inside(f"[{place}]") from None
    return specs


_REMEMBERED: Final = 4096
"""Most array specs that are remembered, because a model announces the same arrays at
each step. When there are more, all are forgotten: a hostile peer can name new shapes
forever."""

_seen: Final[dict[tuple[Any, ...], ArraySpec]] = {}
_dims: Final = itemgetter(1)
_LISTS: Final = {list}
_INTS: Final = {int}


def _spec(announced: Any) -> ArraySpec:
    if type(announced) is not list or len(announced) != 2:
        raise Mismatch("[dtype, dims]", announced)
    name, dims = announced
    dtype = DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise Mismatch(f"one of {', '.join(DTYPES)}", name)
    if type(dims) is not list or not set(map(type, dims)) <= {int}:
        raise Mismatch("a list of ints as dims", dims)
    if len(dims) > MAX_DIMS:
        raise Mismatch(f"at most {MAX_DIMS} dims", len(dims))
    if dims and min(dims) < 0:
        raise Mismatch("dims of 0 or more", min(dims))
    # numpy multiplies the dims without the zeros among them, and so must this.
    size = math.prod(filter(None, dims)) * dtype.itemsize
    if size > _ADDRESSABLE:
        raise Mismatch("an array that fits into memory", size)
    spec = ArraySpec(dtype, tuple(dims))
    if len(_seen) >= _REMEMBERED:
        # All at once: to know which one is oldest would cost every lookup.
        _seen.clear()
    _seen[name, *dims] = spec
    return spec


SMALL_BYTES: Final = 64 * 1024
"""Most bytes of a variable in a set. To copy a larger one costs as much as a message of
its own."""

SET_BYTES: Final = 2**20
"""Most bytes of a set: a reader of one of its variables keeps the memory of all, and
the system provides new pages for larger arrays each time, which costs more than the
update."""

SET_KEYS: Final = 1024
"""Most variables of a set."""


def in_sets(nbytes: Iterable[int], fewest: int) -> list[list[int]]:
    """Divides values of one dtype, which have the sizes ``nbytes``, into sets: small
    values that are stored and sent as one array.

    Workers and servers divide by this same rule, so that a server's stored arrays can
    travel as they are.

    Returns:
        For each set the indices of its values, in order. Values that are too large, or
        would be in a set of less than ``fewest``, are in none.
    """
    sets: list[list[int]] = []
    room = 0
    for place, size in enumerate(nbytes):
        if size > SMALL_BYTES:
            continue
        if not sets or size > room or len(sets[-1]) == SET_KEYS:
            sets.append([])
            room = SET_BYTES
        sets[-1].append(place)
        room -= size
    return [each for each in sets if len(each) >= fewest]


class SetPart(NamedTuple):
    """The position of a variable in the array of its set: elements from ``start`` to
    before ``stop``."""

    start: int
    stop: int
    shape: tuple[int, ...]

    def of(self, array: np.ndarray) -> np.ndarray:
        """Returns the variable's elements in the array ``[elements]`` of the set, with
        the variable's shape: a view."""
        return array[self.start : self.stop].reshape(self.shape)


def parts_of(shapes: Iterable[tuple[int, ...]]) -> tuple[SetPart, ...]:
    """Returns the position of each variable of a set, in order of the variables'
    ``shapes``."""
    parts: list[SetPart] = []
    stop = 0
    for shape in shapes:
        start, stop = stop, stop + math.prod(shape)
        parts.append(SetPart(start, stop, shape))
    return tuple(parts)


def is_keys(array: np.ndarray) -> bool:
    """Returns whether an array of a message has the dtype and shape of the keys of a
    set."""
    return array.dtype == np.int64 and array.ndim == 1 and 0 < array.size <= SET_KEYS
