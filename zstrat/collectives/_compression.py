"""Compresses values for the wire: fewer bits, or fewer values.

``bf16`` and ``f16`` round. ``int8`` keeps 8 bits per value and one scale per chunk;
``topk`` keeps the largest values of a chunk and their indices. These two lose much in
one call, but nothing over many calls: the *residual*, the part of the values that was
left out, is added to the values of the next call of the same name (error feedback), so
that sums over time are right up to the present residual.

Seide et al., "1-bit stochastic gradient descent", 2014; Alistarh et al., "QSGD", 2017;
Stich et al., "Sparsified SGD with memory", 2018; Karimireddy et al., "Error feedback
fixes SignSGD", 2019.

Law: a codec is deterministic, and decoding depends only on the bytes, so that all ranks
get the same values.

A program that gives every call another name (a tag per step) never uses its residuals.
So their memory is bounded, the least recently used residual is dropped, and the law is:
**the bound grows only by residuals that were dropped and came back.** A model that is
larger than the bound loses residuals of its first call once; names that are never used
again fill the bound and no more.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.config import MiB
from zstrat.errors import ProtocolError
from zstrat.wire import DTYPES

from ._reduction import ReduceOp, narrow, widened

if TYPE_CHECKING:
    Key = tuple[str, int]
    """Name of a call, and the position of a block within the call."""
    from ._reduction import Reduction
    from .schedules._chunks import Codec

ROOM: Final = 256 * MiB
"""Initial bound of all residuals in bytes: the gradients of 64 million values."""

NAMES: Final = 2**17
"""Most dropped residuals that are remembered: 10 MB, for 16 GiB of residuals in
chunks."""


class Residuals:
    """The residuals (values that were left out so far) of one compression in one
    generation, by call and position. Used on one thread."""

    __slots__ = ("_gone", "_kept", "_room", "nbytes")

    def __init__(self, room: int = ROOM) -> None:
        self._kept: OrderedDict[Key, np.ndarray] = OrderedDict()
        self._gone: OrderedDict[int, None] = OrderedDict()
        """Hashes of the keys of dropped residuals. A collision only makes the bound
        larger."""
        self._room = room
        self.nbytes = 0

    def get(self, key: Key) -> np.ndarray | None:
        """Returns the residual that the last call of this name left, or None if it is
        not kept."""
        return self._kept.get(key)

    def put(self, key: Key, values: np.ndarray) -> None:
        """Replaces the residual of a key by ``values``; drops the least recently used
        residuals above the bound."""
        before = self._kept.pop(key, None)
        if before is not None:
            self.nbytes -= before.nbytes
        elif self._gone and hash(key) in self._gone:
            # It came back: the bound was too small for the program.
            del self._gone[hash(key)]
            self._room += values.nbytes
        self._kept[key] = values
        self.nbytes += values.nbytes
        while self.nbytes > self._room:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        key, values = self._kept.popitem(last=False)
        self.nbytes -= values.nbytes
        self._gone[hash(key)] = None
        if len(self._gone) > NAMES:
            self._gone.popitem(last=False)


_F32: Final = np.dtype(np.float32)
_HALVES: Final = {"bf16": DTYPES["bfloat16"], "f16": np.dtype(np.float16)}
_KINDS: Final = "'bf16', 'f16', 'int8', 'topk' or 'topk:FRACTION' (0.01 if not given)"


@dataclass(frozen=True, slots=True)
class Compression:
    """A kind of compression; ``fraction`` is the part of a chunk's values that top-k
    keeps."""

    kind: str
    fraction: float = 0.01

    @classmethod
    def of(cls, name: str) -> Compression:
        """Parses the name of a compression.

        Raises:
            ValueError: There is no such compression; the error names the existing ones.
        """
        kind, colon, text = name.partition(":")
        if kind == "topk" and colon:
            try:
                fraction = float(text)
            except ValueError:
                fraction = 0.0
            if 0 < fraction <= 1:
                return cls(kind, fraction)
        elif name in (*_HALVES, "int8", "topk"):
            return cls(name)
        raise ValueError(
            f"compression={name!r}: expected {_KINDS}, with a fraction in (0, 1]"
        )


@dataclass(slots=True)
class Compressor:
    """Creates the codecs of one generation, which share its residuals.

    Each call gets a codec. Calls of the same ``name`` (tag and position in the tree)
    with the same sizes share a residual. Memory, for ``int8`` and ``topk``: a float32
    for each value that a rank sends; names that are used once take 256 MiB in total.
    """

    compression: Compression
    _residuals: Residuals = field(default_factory=Residuals)

    def codec(self, name: str, reduction: Reduction) -> Codec:
        """Returns the codec of one call.

        Raises:
            TypeError: The reduction is not a sum or mean of floating-point numbers.
        """
        sums = reduction.op in (ReduceOp.SUM, ReduceOp.MEAN)
        if not (sums and reduction.accumulator.kind == "f"):
            raise TypeError(
                f"{reduction.op.value} of {reduction.dtype} cannot be compressed: "
                "expected SUM or MEAN of real floating numbers"
            )
        match self.compression.kind:
            case "int8":
                return _Feedback(_Int8(), reduction.accumulator, name, self._residuals)
            case "topk":
                top = _TopK(self.compression.fraction)
                return _Feedback(top, reduction.accumulator, name, self._residuals)
            case kind:
                return _Half(_HALVES[kind], reduction.accumulator)


@dataclass(frozen=True, slots=True)
class _Half:
    dtype: np.dtype
    accumulator: np.dtype

    def encode(self, place: int, values: np.ndarray) -> np.ndarray:
        data = np.empty(len(values), self.dtype)
        narrow(values.astype(_F32, copy=False), data)
        return data.view(np.uint8)

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        _expect(data, 2 * count)
        # New memory, as `Codec` requires: sums have 32 bits or more.
        return widened(data.view(self.dtype), self.accumulator)


@dataclass(frozen=True, slots=True)
class _Int8:
    """Encodes values as a scale, then a byte per value, with an error of at most half
    the scale."""

    def encode(self, values: np.ndarray) -> np.ndarray:
        data = np.zeros(4 + len(values), np.uint8)
        largest = max(values.max(), -values.min()) if len(values) else np.float32(0)
        scale = data[:4].view(_F32)
        # A chunk with inf or NaN becomes NaN as a whole, so that it is noticed.
        scale[0] = largest / np.float32(127) if np.isfinite(largest) else np.nan
        if scale[0] > 0:
            whole = np.rint(values / scale[0])
            data[4:].view(np.int8)[...] = np.clip(whole, -127, 127)  # a tiny scale
        return data

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        _expect(data, 4 + count)
        scale = data[:4].view(_F32)
        return np.multiply(data[4:].view(np.int8), scale, dtype=_F32)


@dataclass(frozen=True, slots=True)
class _TopK:
    """Encodes values as the indices of the largest ones, then these; the others are
    decoded as zero."""

    fraction: float

    def encode(self, values: np.ndarray) -> np.ndarray:
        kept = self._kept(len(values))
        if not kept:
            return np.empty(0, np.uint8)
        # NaN counts as large, so that all ranks get it.
        chosen = np.argpartition(np.abs(values), len(values) - kept)[-kept:]
        chosen.sort()
        data = np.empty(8 * kept, np.uint8)
        data[: 4 * kept].view(np.uint32)[...] = chosen
        data[4 * kept :].view(_F32)[...] = values[chosen]
        return data

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        kept = self._kept(count)
        _expect(data, 8 * kept)
        chosen = data[: 4 * kept].view(np.uint32)
        if kept and int(chosen.max()) >= count:
            raise ProtocolError(
                f"top-k: got the index {chosen.max()}, expected less than {count}"
            )
        values = np.zeros(count, _F32)
        values[chosen] = data[4 * kept :].view(_F32)
        return values

    def _kept(self, count: int) -> int:
        return math.ceil(count * self.fraction)


@dataclass(frozen=True, slots=True)
class _Feedback:
    """Encodes values together with the residual of the last call, and keeps the
    residual of this one."""

    codec: _Int8 | _TopK
    accumulator: np.dtype
    name: str
    residuals: Residuals

    def encode(self, place: int, values: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # inf and NaN propagate, as in `Reduction`
            wanted = values.astype(_F32)
            before = self.residuals.get((self.name, place))
            # Of another length it belongs to other arrays of the same name.
            if before is not None and len(before) == len(wanted):
                wanted += before
            data = self.codec.encode(wanted)
            # By what the others will decode, not by what was meant: the difference is
            # what is lost.
            wanted -= self.codec.decode(data, len(wanted))
        # NaN and inf would stay in the residual forever.
        np.nan_to_num(wanted, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        self.residuals.put((self.name, place), wanted)
        return data

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        return self.codec.decode(data, count).astype(self.accumulator, copy=False)


def _expect(data: np.ndarray, length: int) -> None:
    if data.nbytes != length:
        raise ProtocolError(
            f"a compressed hop has {data.nbytes} bytes, expected {length}: "
            "the ranks call with different sizes, chunks or compression"
        )
