"""Converts and checks arguments of users: initial values, operands, gradients, indices.

The rules of dtypes:

- Python numbers and lists become float32 or int32 unless a dtype is given; numpy and
  jax arrays keep their dtype.
- An update takes Python values and numpy arrays of another dtype of the same kind
  (float64 into float32), as TF does; a jax array must have the variable's dtype,
  because a step must not silently convert values that it computed.
- A gradient has the variable's dtype, as jax sees both (float64 is float32 where jax
  computes with 32 bits): optax computes moments in the dtype of the gradient, and a
  converted gradient gives other moments. Python values have no dtype of their own.
- An integer that does not fit the variable's dtype is refused, never wrapped.
- 64-bit variables are stored on parameter servers, and read and updated outside of
  steps. Inside a step jax would truncate them unless ``jax_enable_x64`` is on, so steps
  refuse them.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.errors import InvalidArgumentError
from zstrat.initializers import exactly
from zstrat.wire import DTYPES, UpdateOp

from ._operators import ArrayOperators, value_of
from ._rows import integers
from ._table import ABSENT

if TYPE_CHECKING:
    from ._storage import VariableSpec
    from ._table import Table


_UNDEFINED: Final = {
    "b": (UpdateOp.SUB, UpdateOp.SCATTER_SUB, UpdateOp.SCATTER_DIV),
    "c": (UpdateOp.SCATTER_MIN, UpdateOp.SCATTER_MAX),
}
"""Operations that a kind of dtype does not support. (numpy and XLA order complex
numbers in different ways.)"""


def initial_array(value: Any, shape: Any, dtype: Any, name: str) -> np.ndarray:
    """Converts the initial value of a variable to a new array in C order.

    Raises:
        ValueError: The value has another shape than ``shape``, or an integer does not
            fit the dtype.
        TypeError: The value is not an array of numbers or booleans.
    """
    # Before the test for arrays, because a variable acts as one.
    if isinstance(value, ArrayOperators):
        value = value.value()
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"the initial value of variable {name!r} is being traced: create variables "
            "before the step function, not in its body"
        )
    if isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        raise TypeError(
            f"variable {name!r} cannot hold a random key: give it "
            "jax.random.key_data(key), and wrap what is read of it again with "
            "jax.random.wrap_key_data"
        )
    wanted = None if dtype is None else as_dtype(dtype, name)
    what = f"the initial value of variable {name!r}"
    require_unmasked(value, what)
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array)
    given = np.asarray(value) if is_array else _from_python(value, wanted, what)
    if wanted is None:
        own = given.dtype if is_array else _plain_dtype(given.dtype)
        wanted = as_dtype(own, name)
    _check_integers(given, wanted, what)
    converted = exactly(given, wanted, what)
    # A copy of what the user gave, who may write to it later; what was converted is
    # new.
    array = (
        np.array(converted, order="C")
        if converted is given
        else np.asarray(converted, order="C")
    )
    if shape is not None and array.shape != tuple(shape):
        raise ValueError(
            f"the initial value of variable {name!r} has shape {array.shape}; "
            f"expected {tuple(shape)}"
        )
    return array


def as_dtype(dtype: Any, name: str) -> np.dtype:
    """Converts a string, a numpy dtype or a jax scalar type to the dtype of a variable.

    Raises:
        TypeError: The dtype is unknown, or not a dtype of numbers or booleans.
    """
    # jax knows the names of narrow floats (bfloat16), and its own scalar types.
    try:
        known: np.dtype | None = np.dtype(jnp.dtype(dtype))
    except TypeError:
        known = None
    if known is None or known.name not in DTYPES:
        raise TypeError(
            f"variable {name!r} cannot have dtype {dtype if known is None else known}: "
            f"expected one of {', '.join(DTYPES)}"
        ) from None
    return DTYPES[known.name]  # the little-endian one


def traced_operand(
    spec: VariableSpec, value: Any, what: str, *, examples: bool = False
) -> jax.Array:
    """Converts the operand of a dense update, inside a step.

    With ``examples`` the operand has an additional first axis, one entry for each
    example.

    Raises:
        ValueError: The operand's shape is not the variable's, or its dtype does not
            fit.
    """
    require_untruncated(spec)
    array = _traced(spec, value, what)
    _check_shape(spec, array.shape[examples:], spec.shape, what)
    return array


def plain_operand(
    spec: VariableSpec, value: Any, what: str, *, examples: bool = False
) -> np.ndarray:
    """Converts the operand of a dense update, outside of steps.

    With ``examples`` the operand has an additional first axis, one entry for each
    example.

    Raises:
        ValueError: The operand's shape is not the variable's, or its dtype does not
            fit.
    """
    array = _plain(spec, value, what)
    _check_shape(spec, array.shape[examples:], spec.shape, what)
    return array


def require_defined(spec: VariableSpec, op: UpdateOp) -> None:
    """Refuses an operation that the dtype of the variable does not support.

    Raises:
        InvalidArgumentError: The dtype does not support the operation.
    """
    if op in _UNDEFINED.get(spec.numpy_dtype.kind, ()):
        raise InvalidArgumentError(
            f"variable {spec.name!r}: {op.name} is not defined for its dtype "
            f"{spec.dtype}"
        )


def require_divisors(spec: VariableSpec, op: UpdateOp, rows: np.ndarray) -> None:
    """Refuses a division of integers by zero, outside of steps.

    Raises:
        InvalidArgumentError: A divisor in ``rows`` is zero.
    """
    if op is UpdateOp.SCATTER_DIV and rows.dtype.kind in "iu" and not rows.all():
        raise InvalidArgumentError(
            f"variable {spec.name!r}: SCATTER_DIV expects integer divisors other than "
            "0, got a 0"
        )


def require_own_dtype(spec: VariableSpec, gradient: Any, what: str) -> None:
    """Refuses a gradient of another dtype than the variable.

    Raises:
        ValueError: The gradient is an array, and its dtype is not the variable's.
    """
    if not isinstance(gradient, np.ndarray | np.generic | jax.Array):
        return
    # A Python number that jax has wrapped: it has no dtype of its own.
    if is_weak(gradient):
        return
    # As jax sees them: with 32 bits float64 is float32.
    given, own = map(jax.dtypes.canonicalize_dtype, (gradient.dtype, spec.numpy_dtype))
    if given != own:
        raise ValueError(_wrong_dtype(spec, gradient.dtype, what))


def traced_rows(
    spec: VariableSpec, indices: Any, values: Any, what: str
) -> tuple[jax.Array, jax.Array]:
    """Converts indices [n] and rows [n, ...] of a scatter update, inside a step.

    Raises:
        ValueError: Ranks, shapes or dtypes do not fit.
        IndexError: An index whose value is known while tracing is out of bounds.
    """
    require_untruncated(spec)
    given = array_given(indices)
    index = jnp.asarray(given)
    rows = _traced(spec, values, what)
    _check_rows(spec, index, rows, what)
    if not isinstance(given, jax.core.Tracer):
        # Before jax casts them to 32 bits.
        check_indices(spec, np.asarray(given), what)
    return index, rows


def plain_rows(
    spec: VariableSpec, indices: Any, values: Any, what: str
) -> tuple[np.ndarray, np.ndarray]:
    """Converts indices [n] and rows [n, ...] of a scatter update, outside of steps.

    Raises:
        ValueError: Ranks, shapes or dtypes do not fit.
        IndexError: An index is out of bounds.
    """
    index, rows = np.asarray(value_of(indices)), _plain(spec, values, what)
    _check_rows(spec, index, rows, what)
    check_indices(spec, index, what)
    return index, rows


def traced_ids(table: Table, ids: Any) -> jax.Array:
    """Converts ids of rows of a table, inside a step.

    Raises:
        ValueError: The ids are not integers.
        IndexError: An id whose value is known while tracing is outside of the table.
    """
    ids = array_given(ids)
    if not isinstance(ids, jax.core.Tracer):
        ids = integers(ids, f"ids of {table}")
        # Before jax casts them to 32 bits.
        table.require_inside(ids)
        require_whole_ids(table, ids)
    index = jnp.asarray(ids)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(f"ids of {table} must be integers, got {index.dtype}")
    return index


def require_whole_ids(table: Table, ids: Any) -> None:
    """Refuses ids of a hash table that are known while a step is traced, if jax would
    downcast them to 32 bits.

    Raises:
        ValueError: An id does not fit into 32 bits.
    """
    if not table.is_hashed or not isinstance(ids, np.ndarray):
        return
    dtype = jax.dtypes.canonicalize_dtype(ids.dtype)
    if dtype == ids.dtype or not ids.size:
        # Only ids that jax would change are refused, not the dtype.
        return
    wrong = ids[ids != ids.astype(dtype)]
    if wrong.size:
        raise ValueError(
            f"ids of {table} are a constant of what jax traces, which would downcast "
            f"{wrong.flat[0]} to 32 bits: pass them as an argument of a zs.function, "
            "or switch on jax_enable_x64 (JAX_ENABLE_X64=1, on the workers, too)"
        )


def check_indices(spec: VariableSpec, indices: np.ndarray, what: str) -> None:
    """Refuses indices outside of ``[0, shape[0])``, except `ABSENT`. A hash table has
    no such bounds.

    Raises:
        IndexError: An index is outside; the error names the first one.
    """
    if spec.buckets is not None:
        return
    outside = ((indices < 0) & (indices != ABSENT)) | (indices >= spec.shape[0])
    if outside.any():
        raise IndexError(
            f"{what} {spec}: index {indices[outside].flat[0]} is out of bounds for "
            f"axis 0 with size {spec.shape[0]}"
        )


def require_untruncated(spec: VariableSpec) -> None:
    """Refuses a 64-bit variable in a step while jax computes with 32 bits.

    Raises:
        TypeError: The variable has 64 bits, and jax would truncate its value.
    """
    seen = jax.dtypes.canonicalize_dtype(spec.numpy_dtype)
    if seen != spec.numpy_dtype:
        raise TypeError(
            f"{spec} is used in a step, where jax would truncate it to {seen}: "
            f"create it with dtype={seen.name!r}, or switch on jax_enable_x64 in this "
            "program and on the workers (JAX_ENABLE_X64=1)"
        )


def array_given(value: Any) -> Any:
    """Converts a variable to its value, and a list with traced values to one array;
    returns anything else unchanged. (A list among the arguments of a step contains
    traced values.)"""
    value = value_of(value)
    if isinstance(value, list | tuple) and any(
        isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)
    ):
        return jnp.asarray(value)
    return value


def _traced(spec: VariableSpec, value: Any, what: str) -> jax.Array:
    value = array_given(value)
    if isinstance(value, jax.Array):
        weak = is_weak(value)
        if value.dtype != spec.numpy_dtype and not (
            weak and same_kind(value.dtype, spec.numpy_dtype)
        ):
            raise ValueError(_wrong_dtype(spec, value.dtype, what))
        return value.astype(spec.numpy_dtype)
    return jnp.asarray(_plain(spec, value, what))


def _plain(spec: VariableSpec, value: Any, what: str) -> np.ndarray:
    value = value_of(value)
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{what} {spec}: jax traces the value outside of a zs.function: decorate "
            "the step with zs.function instead of jax.jit"
        )
    require_unmasked(value, f"cannot {what} {spec}: the value")
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"cannot {what} {spec}: {error}") from None
    # A step must not silently convert what it has computed; numpy arrays are the user's
    # input, which TF converts, too.
    strict = isinstance(value, jax.Array) and not is_weak(value)
    wanted = spec.numpy_dtype
    if array.dtype != wanted:
        if strict or not same_kind(array.dtype, wanted):
            if array.dtype.kind in "OSU":
                raise ValueError(
                    f"cannot {what} {spec}: expected an array of numbers, got "
                    f"{type(value).__name__} {reprlib.repr(value)}"
                )
            raise ValueError(_wrong_dtype(spec, array.dtype, what))
        _check_integers(array, wanted, f"cannot {what} {spec}: the value")
    return np.asarray(array, wanted, order="C")


def require_unmasked(value: Any, what: str) -> None:
    """Refuses a numpy masked array, as jax does."""
    # Plain arrays first: numpy imports `np.ma` at its first use.
    is_plain = type(value) is np.ndarray or not isinstance(value, np.ndarray)
    if not is_plain and isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"{what} is a masked array, and would lose its mask: fill it first, "
            "as with .filled(0)"
        )


def _from_python(value: Any, wanted: np.dtype | None, what: str) -> np.ndarray:
    if wanted is not None and wanted.kind in "biu":
        return exactly(value, wanted, what)
    try:
        return np.asarray(value, wanted)
    except TypeError:
        # Complex into real, say: `exactly` refuses that later, and names the value.
        array = np.asarray(value)
        if array.dtype.kind != "c":
            raise
        return array
    except OverflowError as error:
        raise ValueError(f"{what} does not fit its dtype {wanted}: {error}") from None


def _check_integers(array: np.ndarray, wanted: np.dtype, what: str) -> None:
    """Refuses integers that the dtype ``wanted`` cannot represent."""
    kinds = array.dtype.kind + wanted.kind
    if array.dtype == wanted or not set(kinds) <= set("iu"):
        return
    limits = np.iinfo(wanted)
    outside = (array < limits.min) | (array > limits.max)
    if outside.any():
        raise ValueError(
            f"{what} contains {array[outside].flat[0]}, which does not fit the dtype "
            f"{wanted} ({limits.min} to {limits.max}): create the variable with a "
            "wider dtype"
        )


def same_kind(given: Any, wanted: np.dtype) -> bool:
    """Returns whether values of dtype ``given`` may be converted to ``wanted``: from
    bool to integer to float to complex, of any width, but never back."""
    ladder = (np.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    rank = [
        next(i for i, kind in enumerate(ladder) if jnp.issubdtype(dtype, kind))
        if dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)
        else len(ladder)
        for dtype in (given, wanted)
    ]
    return rank[0] <= rank[1]


def _plain_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype that TF gives to Python values: float32, int32 or complex64."""
    of_kind = {"f": np.float32, "i": np.int32, "c": np.complex64}
    return np.dtype(of_kind.get(dtype.kind, dtype))


def _check_shape(
    spec: VariableSpec, given: tuple[int, ...], wanted: tuple[int, ...], what: str
) -> None:
    if given == wanted:
        return
    if spec.buckets is not None:  # its first size is not one of the user's
        raise ValueError(
            f"cannot {what} {spec}: the rows have shape {given}; expected {wanted}"
        )
    raise ValueError(
        f"cannot {what} {spec}: shape mismatch. The variable has shape {spec.shape}, "
        f"and the value has shape {given}; expected {wanted}"
    )


def _check_rows(spec: VariableSpec, index: Any, rows: Any, what: str) -> None:
    if not spec.shape:
        raise ValueError(f"cannot {what} {spec}: a scalar has no rows")
    if index.ndim != 1 or not jnp.issubdtype(index.dtype, jnp.integer):
        raise ValueError(
            f"cannot {what} {spec}: indices must be a vector of integers, "
            f"got {index.dtype}{list(index.shape)}"
        )
    _check_shape(spec, rows.shape, (index.shape[0], *spec.shape[1:]), what)


def _wrong_dtype(spec: VariableSpec, given: Any, what: str) -> str:
    return (
        f"cannot {what} {spec}: dtype mismatch. The variable has dtype {spec.dtype}, "
        f"and the value has dtype {given}; convert it with .astype({spec.dtype!r})"
    )


def is_weak(value: object) -> bool:
    """Returns whether this is a weakly typed jax array, as jax makes from Python
    numbers. The check is cheap, as each call of a step makes it for all arguments."""
    # Random keys have a dtype that is not numpy's, and no ``weak_type``.
    if not isinstance(value, jax.Array) or not isinstance(value.dtype, np.dtype):
        return False
    # `jax.typeof` makes a new sharding for an array over several devices.
    return value.weak_type
