"""The arithmetic of a reduction: how contributions become a result, and in which
dtypes.

f32, f64, complex and integers are reduced in their own dtype. The sum of numbers of
fewer bits (f16, bf16, float8) is kept in f32 and rounded once, when it is complete. MIN
and MAX never round. A mean is the sum divided by the number of ranks; integers have no
mean, because it would have to be truncated.

NaN: SUM and MEAN are NaN where a contribution is; so are MIN and MAX, as in numpy.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from zstrat.wire import DTYPES


class ReduceOp(enum.Enum):
    """The operation that combines the values of ranks or replicas into one."""

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """Returns ``op``, or the member of that name, in upper or lower case.

        Raises:
            ValueError: No member has that name; the error lists the members.
        """
        if isinstance(op, ReduceOp):
            return op
        try:
            return cls(str(op).upper())
        except ValueError:
            names = ", ".join(repr(member.value) for member in cls)
            raise ValueError(f"reduce_op {op!r}: expected one of {names}") from None

    @staticmethod
    def from_variable_aggregation(aggregation: enum.Enum) -> ReduceOp:
        """Returns the member of the same name as a `zstrat.VariableAggregation`.

        Raises:
            ValueError: NONE and ONLY_FIRST_REPLICA are not reductions.
        """
        if aggregation.name in ("SUM", "MEAN"):
            return ReduceOp[aggregation.name]
        raise ValueError(
            f"Could not convert from `VariableAggregation` {aggregation.name} to a "
            "`ReduceOp`: SUM and MEAN are reductions"
        )


_F32: Final = np.dtype(np.float32)
_BF16: Final = DTYPES["bfloat16"]

_UFUNCS: Final[dict[ReduceOp, np.ufunc]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """One operation on one dtype among ``size`` ranks.

    ``dtype`` is the dtype of contributions and result, ``accumulator`` that of partial
    sums. A contribution may be passed in place of a partial sum: it is converted to the
    accumulator's dtype.
    """

    op: ReduceOp
    dtype: np.dtype
    accumulator: np.dtype
    size: int

    def reduce(self, some: np.ndarray, more: np.ndarray, out: np.ndarray) -> None:
        """Reduces two arrays into ``out`` (of the dtype ``accumulator``), which may be
        one of them."""
        # By identity, which is quick and nearly always enough; `widened` compares
        # again.
        if some.dtype is not self.accumulator:
            some = self.widened(some)
        if more.dtype is not self.accumulator:
            more = self.widened(more)
        with _quiet():
            _UFUNCS[self.op](some, more, out=out)

    def finish(self, total: np.ndarray, out: np.ndarray) -> None:
        """Converts the partial sum of all ranks to the result, in ``out`` (of the dtype
        ``dtype``), which may be ``total``."""
        # By one would be exact, and cost a pass.
        if self.op is ReduceOp.MEAN and self.size > 1:
            if total.dtype != self.accumulator:
                total = self.widened(total)
            if self.accumulator == self.dtype:
                with _quiet():
                    np.divide(total, self._ranks, out=out)
                return
            # In the accumulator, so that a mean is rounded once, as a sum is.
            total = total / self._ranks
        if out is not total:
            if out.dtype == total.dtype:
                out[...] = total
            else:
                narrow(total, out)

    def widened(self, values: np.ndarray) -> np.ndarray:
        """Converts contributions to the accumulator's dtype, exactly. Returns new
        memory unless they have that dtype."""
        return widened(values, self.accumulator)

    @property
    def rounds(self) -> bool:
        """Whether partial sums have a wider dtype than contributions and result, so
        that the result is rounded."""
        return self.accumulator != self.dtype

    @property
    def _ranks(self) -> np.ndarray:
        return np.array(self.size, self.accumulator)


def widened(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts values to a dtype that can represent all of them. Returns new memory
    unless they have that dtype."""
    if values.dtype == dtype:
        return values
    if values.dtype == _BF16:
        # The upper half of an f32: a shift, ten times as fast as the conversion.
        bits = values.view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32).astype(dtype, copy=False)
    return values.astype(dtype)


def narrow(values: np.ndarray, out: np.ndarray) -> None:
    """Copies values into ``out``. If ``out`` has fewer bits, rounds f32 values to the
    nearest number, ties to even."""
    if out.dtype != _BF16 or values.dtype != _F32:
        with _quiet():
            out[...] = values
        return
    bits = values.view(np.uint32)
    # Round half to even: the last kept bit is added to half of a unit, less one.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    target = out.view(np.uint16)
    target[...] = rounded
    wrong = np.isnan(values)  # the carry may have made a number or inf of it
    if wrong.any():
        target[wrong] = (bits[wrong] >> 16) | 0x40


def _quiet() -> np.errstate:
    # What is too large becomes inf, inf - inf NaN: the caller sees it in the result; a
    # warning from the loop's thread would reach nobody.
    return np.errstate(all="ignore")


@lru_cache(maxsize=256)
def reduction_of(op: ReduceOp | str, dtype: np.dtype, size: int) -> Reduction:
    """Returns the reduction by which ``size`` ranks reduce arrays of ``dtype`` with
    ``op``.

    Raises:
        ValueError: There is no such operation.
        TypeError: The operation does not support this dtype; the error names the
            supported ones and a remedy.
    """
    op, dtype = ReduceOp.of(op), np.dtype(dtype)
    if not dtype.isnative:  # else it stays the one that arrays have, to be known again
        dtype = dtype.newbyteorder("=")
    is_small = dtype.name == "bfloat16" or dtype.name.startswith("float8")
    kind = "f" if is_small else dtype.kind
    if kind not in _ALLOWED[op]:
        raise TypeError(
            f"{op.value} of {dtype} across ranks: expected {_WORDS[op]}. "
            "Convert the array (.astype) before, and the result after"
        )
    sums = op in (ReduceOp.SUM, ReduceOp.MEAN)
    accumulator = _F32 if sums and kind == "f" and dtype.itemsize < 4 else dtype
    return Reduction(op, dtype, accumulator, size)


_ALLOWED: Final = {
    ReduceOp.SUM: "fciu",
    ReduceOp.MEAN: "fc",
    ReduceOp.MIN: "fiub",
    ReduceOp.MAX: "fiub",
}
_WORDS: Final = {
    ReduceOp.SUM: "floating, complex or integer numbers",
    ReduceOp.MEAN: "floating or complex numbers (not integers)",
    ReduceOp.MIN: "floating numbers, integers or bool",
    ReduceOp.MAX: "floating numbers, integers or bool",
}
