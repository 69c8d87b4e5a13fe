"""Encodes and decodes the header of a safetensors file, without I/O.

A file is eight bytes with the length of the header (little endian), the header in JSON,
and the elements of all tensors, one after the other without holes. The format has no
name for a few dtypes of zstrat: such a tensor is stored as another dtype with the same
bytes (complex128 as pairs of float64, all others as uint8), and ``__metadata__`` names
its real dtype.

A header is not trusted: if its tensors do not add up exactly to the size of the file,
it is refused, so that a reader never allocates more than the file has.
"""

from __future__ import annotations

import json
import math
import struct
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zstrat.errors import DataLossError
from zstrat.wire import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np

PREFIX: Final = struct.Struct("<Q")
MAX_HEADER: Final = 100_000_000
"""The longest header that the safetensors library reads; a million tensors fit."""
ALIGNMENT: Final = 4096
"""The first tensor begins at a multiple of so many bytes: programs that map the file
prefer 64, and direct writes to the disk need whole blocks."""

_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bool": "BOOL",
        "float16": "F16",
        "float32": "F32",
        "float64": "F64",
        "int8": "I8",
        "int16": "I16",
        "int32": "I32",
        "int64": "I64",
        "uint8": "U8",
        "uint16": "U16",
        "uint32": "U32",
        "uint64": "U64",
        "bfloat16": "BF16",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e8m0fnu": "F8_E8M0",
    }
)
"""The name that the format has for each dtype."""
_KNOWN: Final = MappingProxyType({theirs: ours for ours, theirs in _NAMES.items()})
_MARK: Final = "zstrat.dtype."


class TensorInfo(NamedTuple):
    """The name, dtype and shape of one tensor in a file. Dtypes have numpy's names
    ("float32", "bfloat16", ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy_dtype(self) -> np.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numpy_dtype.itemsize * math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one step along the first axis; of a scalar, all its bytes."""
        return self.numpy_dtype.itemsize * math.prod(self.shape[1:])

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class TensorPlace(NamedTuple):
    """A tensor and the offset in its file at which it begins."""

    info: TensorInfo
    offset: int


def encode_header(tensors: Iterable[TensorInfo]) -> tuple[bytes, int]:
    """Returns the bytes of a file before its first element (length and header), and the
    size that the whole file will have.

    Raises:
        ValueError: A name is empty or occurs twice, a dtype is unknown, or the header
            is too long.
    """
    entries: dict[str, Any] = {}
    notes: dict[str, str] = {}
    # Offsets in the order of the tensors: the writer appends their bytes as they come.
    at = 0
    for info in tensors:
        if not info.name or info.name == "__metadata__" or info.name in entries:
            raise ValueError(f"two tensors, or none, can be called {info.name!r}")
        if info.dtype not in DTYPES or (info.shape and min(info.shape) < 0):
            raise ValueError(
                f"tensor {info.name!r} cannot be {info}: expected a dtype of "
                f"{', '.join(DTYPES)}, and no axis below 0"
            )
        stored, shape = _stored(info)
        if info.dtype not in _NAMES:
            notes[_MARK + info.name] = info.dtype
        offsets = [at, at + info.nbytes]
        entries[info.name] = {
            "dtype": stored,
            "shape": list(shape),
            "data_offsets": offsets,
        }
        at += info.nbytes
    whole = {"__metadata__": notes, **entries} if notes else entries
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()
    # The format allows spaces at the end of a header, for just this.
    text += b" " * (-(PREFIX.size + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ValueError(
            f"{len(entries)} tensors have a header of {len(text)} bytes: at most "
            f"{MAX_HEADER} fit into one file"
        )
    return PREFIX.pack(len(text)) + text, PREFIX.size + len(text) + at


def header_length(prefix: bytes, size: int, file: str) -> int:
    """Returns the length of the header, read from the first bytes of a file of ``size``
    bytes.

    Raises:
        DataLossError: The file cannot have such a header.
    """
    # Checked before anything is read by it: the number may be any.
    if len(prefix) < PREFIX.size:
        raise DataLossError(
            file, "", f"cut short: {size} bytes are not a safetensors file"
        )
    length: int = PREFIX.unpack(prefix[: PREFIX.size])[0]
    if length > MAX_HEADER:
        raise DataLossError(
            file, "", f"its header claims {length} bytes, above the {MAX_HEADER} of all"
        )
    if length > size - PREFIX.size:
        raise DataLossError(
            file, "", f"cut short: a header of {length} bytes in a file of {size}"
        )
    return length


def decode_header(text: bytes, size: int, file: str) -> dict[str, TensorPlace]:
    """Decodes a header that `encode_header` wrote, of a file of ``size`` bytes. Returns
    the tensors by name.

    Raises:
        DataLossError: The header is damaged, or does not match the size of the file;
            the error names the file, and the tensor where it is known.
    """
    entries = _json(text, file)
    metadata = entries.pop("__metadata__", {})
    is_dict = type(metadata) is dict
    if not (is_dict and all(type(text) is str for text in metadata.values())):
        raise DataLossError(file, "", "damaged header: __metadata__ must be texts")
    start = PREFIX.size + len(text)
    found = [_entry(name, each, metadata, file) for name, each in entries.items()]
    end = _tiled(found, file)
    if start + end != size:
        what = "cut short" if start + end > size else "too long"
        raise DataLossError(
            file, _at(found, size - start), f"{what}: {size} bytes, not {start + end}"
        )
    return {info.name: TensorPlace(info, start + at) for info, at in found}


def _stored(info: TensorInfo) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype, in the format's name, and the shape under which a tensor is
    stored."""
    name = _NAMES.get(info.dtype)
    if name is not None:
        return name, info.shape
    if info.dtype == "complex128":
        return "F64", (*info.shape, 2)
    return "U8", info.shape  # all others have one byte: float8 types of ml_dtypes


def _json(text: bytes, file: str) -> dict[str, Any]:
    # JSON allows a name twice, and readers differ in which value they take.
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError("a name is there twice")
        return dict(pairs)

    try:
        entries = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise DataLossError(file, "", f"damaged header: {error}") from None
    if type(entries) is not dict:
        raise DataLossError(file, "", "damaged header: not an object of tensors")
    return entries


def _entry(
    name: str, entry: Any, metadata: Mapping[str, str], file: str
) -> tuple[TensorInfo, int]:
    """Returns the tensor that an entry of the header describes, and its offset after
    the header. Raises DataLossError if the entry is damaged."""
    match entry:
        case {"dtype": str(stored), "shape": [*dims], "data_offsets": [start, end]} if (
            # By exact type: True is an int to `isinstance`.
            all(type(n) is int and 0 <= n < 2**63 for n in (*dims, start, end))
        ):
            pass
        case _:
            raise DataLossError(file, name, f"damaged header: {entry!r:.80}")
    # Other programs read what stands there; our own dtype is in the notes beside it.
    info = TensorInfo(name, _KNOWN.get(stored, ""), tuple(dims))
    if (real := metadata.get(_MARK + name)) is not None:
        shape = info.shape[:-1] if real == "complex128" else info.shape
        info = TensorInfo(name, real, shape)
        # The note and the entry must agree, or a flipped bit would change a dtype.
        if real not in DTYPES or _stored(info) != (stored, tuple(dims)):
            raise DataLossError(file, name, f"damaged header: {real!r:.40} as {stored}")
    if not info.dtype:
        raise DataLossError(file, name, f"dtype {stored!r:.40} is not known here")
    if end - start != info.nbytes:
        raise DataLossError(
            file, name, f"{info} has {info.nbytes} bytes; the header says {end - start}"
        )
    return info, start


def _tiled(found: list[tuple[TensorInfo, int]], file: str) -> int:
    """Returns the end of the last tensor. Raises DataLossError if tensors overlap, or
    leave holes between them."""
    at = 0
    # Empty tensors share their offset with the one that follows.
    for info, offset in sorted(found, key=lambda each: (each[1], each[0].nbytes)):
        if offset != at:
            raise DataLossError(
                file, info.name, f"damaged header: begins at byte {offset}, not {at}"
            )
        at += info.nbytes
    return at


def _at(found: list[tuple[TensorInfo, int]], size: int) -> str:
    """Returns the name of the first tensor that does not fit into ``size`` bytes; "" if
    all do."""
    cut = [(at, info.name) for info, at in found if at + info.nbytes > size]
    return min(cut)[1] if cut else ""
