"""Initializers: make initial values where the variable is stored, whole or in parts.
The cost of a part depends on its own size only.

An initializer is called with ``(shape, dtype)`` of the whole variable, and for a part
also with ``partition_shape`` and ``partition_offset``. It is sent to a parameter server
by the name of its class, and needs only numpy there.

Theory of operation. Rows are drawn in blocks whose size depends only on the size of a
row. Each block has its own generator, made from the seed and the number of the block.
So one seed gives the same whole array on every machine and for every partitioning, and
a part draws only the blocks that it overlaps. Without a seed each call gives other
numbers. Fans are counted as in TF and Keras, on the whole shape: the last axis is the
output, the one before it the input, and the axes before these are the receptive field.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BLOCK: Final = 1 << 16
"""Approximate number of elements of a block: making a generator takes some 20 µs,
drawing this many numbers 300 µs."""


class Initializer(abc.ABC):
    """Base of initializers: objects that make an array, or any part of it."""

    __slots__ = ()

    def __call__(
        self,
        shape: Sequence[int],
        dtype: Any = "float32",
        *,
        partition_shape: Sequence[int] | None = None,
        partition_offset: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Returns the whole array of ``shape``; or the part of it that has
        ``partition_shape`` and starts at ``partition_offset``.

        Raises:
            ValueError: The part is not inside of the shape, or the dtype cannot
                represent the values of the initializer.
        """
        whole = tuple(int(n) for n in shape)
        window = _window(whole, partition_shape, partition_offset)
        return self._make(whole, np.dtype(dtype), window)

    def require_fitting(self, dtype: np.dtype) -> None:
        """Refuses a dtype that cannot represent the initializer's values, if that is
        known before they are made.

        Raises:
            ValueError: The dtype cannot represent the values.
        """
        del dtype  # any will do

    def rows(self, generator: Any, out: np.ndarray) -> None:
        """Fills ``out`` with rows ``[n, ...]`` of a hash table, one after the other.

        Args:
            generator: An `zstrat.ids.IdGenerator` of the rows' ids.

        Raises:
            ValueError: The initializer cannot make single rows, as its values depend on
                the numbers of the rows or on how many there are; or the dtype cannot
                represent the values.
        """
        del generator, out
        raise ValueError(
            f"{self!r} does not make the row of an id from the id: expected "
            "zs.initializers.uniform, normal or constant"
        )

    @abc.abstractmethod
    def _make(
        self, shape: tuple[int, ...], dtype: np.dtype, window: tuple[slice, ...]
    ) -> np.ndarray:
        """Returns the slice ``window`` of the array of ``shape``, as a new array that
        the caller may keep and change."""


def exactly(value: Any, dtype: np.dtype, what: str) -> np.ndarray:
    """Converts numbers to another dtype without changing their values: 2.0 becomes an
    integer, 2.5 is refused. Only floats may be rounded to other floats.

    Raises:
        ValueError: A value would change.
    """
    if isinstance(value, int | float | list | tuple) and dtype.kind in "biu":
        return _exact_integers(value, dtype, what)
    given = np.asarray(value)
    ranks = [_RANKS.get(each.kind, 0) for each in (given.dtype, dtype)]
    is_same = given.dtype == dtype or ranks in ([2, 2], [3, 3])
    # Rounding a float is what asking for a narrower dtype means.
    if is_same or ranks[0] < ranks[1] or not given.size:
        return np.asarray(given, dtype)
    with np.errstate(all="ignore"):
        real = given.real if ranks[0] == 3 else given
        converted: np.ndarray = real.astype(dtype)
        other = converted.astype(given.dtype) != given
        # -1 and 255 are the same bits, and back again.
        other |= (converted < 0) != (real < 0) if ranks == [1, 1] else False
    if other.any():
        raise _other_number(given[other].flat[0], dtype, what)
    return converted


def _exact_integers(value: Any, dtype: np.dtype, what: str) -> np.ndarray:
    """Converts numbers of Python, and lists of them, as `exactly` does. It passes the
    dtype to numpy, which otherwise converts some large integers (``[2**63, -1]``) to
    floats and loses digits."""
    try:
        with np.errstate(all="ignore"):
            converted = np.asarray(value, dtype)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"{what} does not fit its dtype {dtype}: {error}") from None
    # As numpy reads it without a dtype: floats among integers make it floats.
    given = np.asarray(value)
    if _RANKS.get(given.dtype.kind, 0) <= _RANKS[dtype.kind]:
        return converted
    other = converted.astype(given.dtype) != given
    if other.any():
        raise _other_number(given[other].flat[0], dtype, what)
    return converted


def _other_number(number: Any, dtype: np.dtype, what: str) -> ValueError:
    return ValueError(
        f"{what} contains {number}, which dtype {dtype} does not have: give another "
        "dtype, or round the value"
    )


_RANKS: Final = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}
"""Rank of each kind of dtype: a dtype can represent numbers of all lower ranks.
bfloat16 and similar types are of numpy's kind V."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Constant(Initializer):
    """Makes arrays filled with ``value``, which is broadcast to the shape."""

    value: Any

    def require_fitting(self, dtype: np.dtype) -> None:
        exactly(self.value, dtype, "the constant")

    def rows(self, generator: Any, out: np.ndarray) -> None:
        del generator
        out[...] = exactly(self.value, out.dtype, "the constant")

    def _make(
        self, shape: tuple[int, ...], dtype: np.dtype, window: tuple[slice, ...]
    ) -> np.ndarray:
        value = exactly(self.value, dtype, "the constant")
        if not value.ndim and not value:
            # Pages that the system zeroes when they are first touched.
            return np.zeros([cut.stop - cut.start for cut in window], dtype)
        return np.array(np.broadcast_to(value, shape)[window], order="C")


class Drawn(Initializer):
    """Base of initializers that make arrays of independent random numbers."""

    __slots__ = ()

    seed: int | None
    counts_rows: ClassVar[bool] = False
    """Whether the distribution depends on the number of rows."""

    def require_fitting(self, dtype: np.dtype) -> None:
        if dtype.kind not in "fV":
            raise ValueError(
                f"{type(self).__name__} draws floating-point numbers, and was asked "
                f"for dtype {dtype}"
            )

    def rows(self, generator: Any, out: np.ndarray) -> None:
        self.require_fitting(out.dtype)
        if self.counts_rows:
            # Raises: its numbers depend on how many rows there are, and a table grows.
            Initializer.rows(self, generator, out)
        wide = np.dtype(np.float64 if out.dtype.itemsize >= 8 else np.float32)
        is_exact = out.dtype == wide or out.dtype.kind in "iu"
        drawn = out if is_exact else np.empty(out.shape, wide)
        self._fill(generator, drawn, out.shape)
        if drawn is not out:
            out[...] = drawn

    @abc.abstractmethod
    def _fill(
        self, generator: np.random.Generator, out: np.ndarray, shape: tuple[int, ...]
    ) -> None:
        """Fills ``out`` (float32 or float64) with random numbers, in C order; ``shape``
        is that of the whole array."""

    def _make(
        self, shape: tuple[int, ...], dtype: np.dtype, window: tuple[slice, ...]
    ) -> np.ndarray:
        self.require_fitting(dtype)
        # Drawn as the only row of an array.
        if not shape:
            return self._make((1,), dtype, (slice(0, 1),)).reshape(())
        out = np.empty([cut.stop - cut.start for cut in window], dtype)
        if not out.size:
            return out
        # numpy draws nothing narrower than float32: bfloat16, say, is rounded from
        # that.
        drawn = np.dtype(np.float64 if dtype.itemsize >= 8 else np.float32)
        drawn = dtype if dtype.kind in "iu" else drawn
        # Unless the window cuts columns off, or the dtype needs rounding.
        in_place = dtype == drawn and out.shape[1:] == shape[1:]
        # One for all blocks of this call, also if none was given.
        seed = np.random.SeedSequence().entropy if self.seed is None else self.seed
        start, stop = window[0].start, window[0].stop
        height = max(1, _BLOCK // math.prod(shape[1:]))
        for block in range(start // height, -(-stop // height)):
            first = block * height
            # Rows are drawn in order: what comes after the last one wanted is left out.
            last = min(stop, first + height)
            source = np.random.SeedSequence(seed, spawn_key=(block,))
            generator = np.random.Generator(np.random.PCG64(source))
            if in_place and first >= start:
                self._fill(generator, out[first - start : last - start], shape)
                continue
            rows = np.empty((last - first, *shape[1:]), drawn)
            self._fill(generator, rows, shape)
            wanted = rows[max(0, start - first) :][(slice(None), *window[1:])]
            out[max(0, first - start) : last - start] = wanted
        return out


@final
@dataclass(frozen=True, slots=True)
class Normal(Drawn):
    """Draws from a normal distribution."""

    stddev: float = 0.05
    seed: int | None = None
    mean: float = 0.0

    def _fill(
        self, generator: np.random.Generator, out: np.ndarray, shape: tuple[int, ...]
    ) -> None:
        del shape
        _normal(generator, out, self.stddev)
        if self.mean:
            out += out.dtype.type(self.mean)


@final
@dataclass(frozen=True, slots=True)
class Uniform(Drawn):
    """Draws uniformly between ``minval`` and ``maxval``."""

    minval: float = -0.05
    maxval: float = 0.05
    seed: int | None = None

    def require_fitting(self, dtype: np.dtype) -> None:
        if dtype.kind not in "iu":
            Drawn.require_fitting(self, dtype)
            return
        limits, first, end = np.iinfo(dtype), *self._integers()
        is_exact = (first, end) == (self.minval, self.maxval)
        if not (is_exact and limits.min <= first < end <= int(limits.max) + 1):
            raise ValueError(
                f"uniform({self.minval}, {self.maxval}) of dtype {dtype}: expected "
                f"integers, a smaller and a larger one, from {limits.min} to "
                f"{int(limits.max) + 1}"
            )

    def _integers(self) -> tuple[int, int]:
        return int(self.minval), int(self.maxval)

    def _fill(
        self, generator: np.random.Generator, out: np.ndarray, shape: tuple[int, ...]
    ) -> None:
        del shape
        if out.dtype.kind in "iu":
            out[...] = generator.integers(*self._integers(), out.shape, out.dtype)
        else:
            _uniform(generator, out, self.minval, self.maxval)


@final
@dataclass(frozen=True, slots=True)
class GlorotUniform(Drawn):
    """Draws uniformly within ± ``sqrt(6 / (fan_in + fan_out))``."""

    seed: int | None = None
    counts_rows: ClassVar[bool] = True

    def _fill(
        self, generator: np.random.Generator, out: np.ndarray, shape: tuple[int, ...]
    ) -> None:
        bound = math.sqrt(6.0 / max(1.0, sum(_fans(shape))))
        _uniform(generator, out, -bound, bound)


@final
@dataclass(frozen=True, slots=True)
class HeNormal(Drawn):
    """Draws from a normal distribution with standard deviation ``sqrt(2 / fan_in)``."""

    seed: int | None = None
    counts_rows: ClassVar[bool] = True

    def _fill(
        self, generator: np.random.Generator, out: np.ndarray, shape: tuple[int, ...]
    ) -> None:
        _normal(generator, out, math.sqrt(2.0 / max(1.0, _fans(shape)[0])))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Sliced(Initializer):
    """Wraps a user's function as an initializer. If the function can only make the
    whole array, each part is sliced from the whole.

    Args:
        takes_shape: Whether the function takes ``(shape, dtype)`` as its first
            arguments.
        names_parts: Whether it has parameters ``partition_shape`` and
            ``partition_offset``. If it takes them only by ``**kwargs``, a TypeError or
            ValueError means that it does not support them, and it is called again
            without them (TF's rule).
    """

    function: Callable[..., Any]
    takes_shape: bool
    names_parts: bool

    def _make(
        self, shape: tuple[int, ...], dtype: np.dtype, window: tuple[slice, ...]
    ) -> np.ndarray:
        wanted = tuple(cut.stop - cut.start for cut in window)
        offset = tuple(cut.start for cut in window)
        first = (shape, dtype) if self.takes_shape else ()
        try:
            result = self.function(
                *first, partition_shape=wanted, partition_offset=offset
            )
        except (TypeError, ValueError):
            if self.names_parts:
                raise
            result = self.function(*first)
        value = np.asarray(result)
        # A function that does not know of parts has made the whole.
        if value.shape == shape != wanted:
            value = value[window]
        if value.shape != wanted:
            raise ValueError(
                f"the initializer {self.function!r} was asked for {wanted} of an array "
                f"of shape {shape} and returned one of shape {value.shape}"
            )
        what = f"what the initializer {self.function!r} returned"
        return np.array(exactly(value, dtype, what), order="C")


zeros: Final[Initializer] = Constant(0)
"""Makes arrays of zeros."""
ones: Final[Initializer] = Constant(1)
"""Makes arrays of ones."""


def constant(value: Any) -> Initializer:
    """Makes an initializer whose arrays are filled with ``value``, broadcast to the
    shape."""
    return Constant(value)


def normal(
    stddev: float = 0.05, seed: int | None = None, *, mean: float = 0.0
) -> Initializer:
    """Makes an initializer that draws from a normal distribution."""
    return Normal(stddev, seed, mean)


def uniform(
    minval: float = -0.05, maxval: float = 0.05, seed: int | None = None
) -> Initializer:
    """Makes an initializer that draws uniformly from ``[minval, maxval)``; rounding to
    the dtype may give ``maxval``. With an integer dtype and integer bounds, all
    integers in the range are equally likely."""
    return Uniform(minval, maxval, seed)


def glorot_uniform(seed: int | None = None) -> Initializer:
    """Makes an initializer that draws uniformly within ± ``sqrt(6 / (fan_in +
    fan_out))``, which preserves the variance forwards and backwards."""
    return GlorotUniform(seed)


def he_normal(seed: int | None = None) -> Initializer:
    """Makes an initializer that draws from a normal distribution with standard
    deviation ``sqrt(2 / fan_in)``, which preserves the variance through a relu."""
    return HeNormal(seed)


def _window(
    shape: tuple[int, ...],
    partition_shape: Sequence[int] | None,
    partition_offset: Sequence[int] | None,
) -> tuple[slice, ...]:
    if partition_shape is None and partition_offset is None:
        return tuple(slice(0, n) for n in shape)
    sizes, starts = tuple(partition_shape or ()), tuple(partition_offset or ())
    inside = len(sizes) == len(starts) == len(shape) and all(
        min(start, size) >= 0 and start + size <= n
        for start, size, n in zip(starts, sizes, shape, strict=True)
    )
    if not inside:
        raise ValueError(
            f"partition_shape {sizes} from partition_offset {starts} on is not inside "
            f"of the shape {shape}"
        )
    pairs = zip(starts, sizes, strict=True)
    return tuple(slice(int(start), int(start + size)) for start, size in pairs)


def _normal(generator: np.random.Generator, out: np.ndarray, stddev: float) -> None:
    generator.standard_normal(dtype=out.dtype.type, out=out)
    out *= out.dtype.type(stddev)


def _uniform(
    generator: np.random.Generator, out: np.ndarray, low: float, high: float
) -> None:
    generator.random(dtype=out.dtype.type, out=out)
    out *= out.dtype.type(high - low)
    out += out.dtype.type(low)


def _fans(shape: Sequence[int]) -> tuple[float, float]:
    match tuple(shape):
        case ():
            return 1.0, 1.0
        case (n,):
            return float(n), float(n)
        case (*field, inputs, outputs):
            size = math.prod(field)
            return float(size * inputs), float(size * outputs)
    raise AssertionError(shape)
