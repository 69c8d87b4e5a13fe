"""Checks whether a program combines rows, or depends on the number of rows.

Only if the program does neither, a parameter server may apply an optimizer to a part of
a variable, or to some rows. The program that updates a leaf has to meet two conditions:

- traced with another number of rows, the program is the same but for that number, so
  nothing in it was decided or computed from the size;
- no equation in it combines rows: each equation is known to act along the first axis
  element by element. An unknown equation counts as one that combines rows.

Law of the file: an equation without a rule is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from zstrat.jaxprs import inner_call

from ._jaxprs import constant

if TYPE_CHECKING:
    from collections.abc import Sequence


ELEMENTWISE: Final = frozenset(
    {
        "abs", "acos", "acosh", "add", "and", "add_any", "asin", "asinh", "atan",
        "atan2", "atanh", "cbrt", "ceil", "clamp", "complex", "conj",
        "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div",
        "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
        "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p",
        "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not",
        "optimization_barrier", "or", "population_count", "pow", "real",
        "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh",
        "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
    }
)  # fmt: skip
_REDUCTIONS: Final = frozenset(
    {
        "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and",
        "reduce_or", "reduce_xor", "argmax", "argmin",
    }
)  # fmt: skip
_CUMULATIVE: Final = frozenset(
    {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
)


ROWS: Final = 17
"""The number of rows with which leaves are traced to compare their programs: hardly any
other axis has this length."""


class RowsTogether(Exception):
    """Raised for an equation that combines rows; names the equation."""


def same_but_for(one: Any, two: Any, rows: int, other: int) -> bool:
    """Returns whether two programs are equal except that one has ``rows`` where the
    other has ``other``."""
    return _same(one.jaxpr, two.jaxpr, rows, other) and all(
        np.array_equal(constant(a), constant(b))
        for a, b in zip(one.consts, two.consts, strict=True)
    )


def _same(one: Any, two: Any, rows: int, other: int) -> bool:
    """Returns whether two jaxprs are equal except that one has ``rows`` where the other
    has ``other``."""
    if _sizes(one) != _sizes(two):
        return False
    names: dict[Any, Any] = {}

    def match(a: Any, b: Any) -> bool:
        if isinstance(a, Literal) or isinstance(b, Literal):
            both = isinstance(a, Literal) and isinstance(b, Literal)
            # By value: each trace has literals of its own.
            return both and bool(np.array_equal(a.val, b.val, equal_nan=_floats(a)))
        return names.get(a) is b

    names.update(zip(one.invars, two.invars, strict=True))
    names.update(zip(one.constvars, two.constvars, strict=True))
    for first, second in zip(one.eqns, two.eqns, strict=True):
        if first.primitive is not second.primitive:
            return False
        if len(first.invars) != len(second.invars):
            return False
        if not all(map(match, first.invars, second.invars)):
            return False
        if not _alike(first.params, second.params, rows, other):
            return False
        names.update(zip(first.outvars, second.outvars, strict=True))
    return all(map(match, one.outvars, two.outvars))


def _sizes(jaxpr: Any) -> tuple[int, ...]:
    return len(jaxpr.eqns), len(jaxpr.invars), len(jaxpr.constvars), len(jaxpr.outvars)


def _floats(literal: Any) -> bool:
    # The kind of bfloat16 is that of no number to numpy.
    dtype = np.asarray(literal.val).dtype
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


def _alike(one: Any, two: Any, rows: int, other: int) -> bool:
    """Returns whether parameters of two equations are equal, if ``rows`` in the first
    counts as equal to ``other`` in the second."""
    if isinstance(one, ClosedJaxpr) and isinstance(two, ClosedJaxpr):
        return same_but_for(one, two, rows, other)
    # Before integers, because True is one.
    if isinstance(one, bool | np.bool_) or isinstance(two, bool | np.bool_):
        return bool(one == two)
    if isinstance(one, int) and isinstance(two, int):
        # The number of rows itself, as in a shape.
        return one == two or (one == rows and two == other)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(
            _alike(one[key], two[key], rows, other) for key in one
        )
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(
            _alike(a, b, rows, other) for a, b in zip(one, two, strict=True)
        )
    if isinstance(one, Jaxpr) and isinstance(two, Jaxpr):
        return _same(one, two, rows, other)
    if isinstance(one, np.ndarray) or isinstance(two, np.ndarray):
        return bool(np.array_equal(one, two))
    if callable(one) and callable(two):  # of a custom derivative, which is not used
        return True
    return type(one) is type(two) and bool(one == two)


FREE: Final = -1
"""Stands in place of the axis of rows for a variable that has the same value for all
rows."""


def axes_of_rows(jaxpr: Any, given: Sequence[int], rows: int) -> list[int]:
    """Returns, for each output of a program, the number of its axis that is the rows;
    `FREE` if it has none. ``given`` has these numbers for the inputs. Raises
    `RowsTogether` if an equation combines rows."""
    axes: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        axes.update(zip(eqn.outvars, _through(eqn, axes, rows), strict=True))
    return [_axis(axes, var) for var in jaxpr.outvars]


def _axis(axes: dict[Any, int], var: Any) -> int:
    return FREE if isinstance(var, Literal) else axes.get(var, FREE)


def _through(eqn: Any, axes: dict[Any, int], rows: int) -> list[int]:
    name = eqn.primitive.name
    given = [_axis(axes, var) for var in eqn.invars]
    row_axes = {axis for axis in given if axis != FREE}
    call = inner_call(eqn)
    if call is not None:
        return axes_of_rows(call[0], given, rows)
    # Before the test for rows, because a branch may use rows that its index does not
    # depend on.
    if name == "cond":
        return _through_cond(eqn, given, rows)
    # An iota, say, would tell rows apart by their number.
    if not row_axes:
        _require_uniform(eqn, rows)
        return [FREE] * len(eqn.outvars)
    if len(row_axes) > 1:
        raise RowsTogether(f"{name} mixes rows with another axis")
    (axis,) = row_axes
    if name in ELEMENTWISE:
        return [axis] * len(eqn.outvars)
    if name in _REDUCTIONS:
        return [_reduced(eqn, axis)]
    # Along another axis it stays within a row.
    if name in _CUMULATIVE and eqn.params["axis"] != axis:
        return [axis]
    return [_moved(eqn, axis, given)]


def _require_uniform(eqn: Any, rows: int) -> None:
    """Checks a value that depends on no row. The value may have as many elements as
    there are rows, if they are all equal."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    shape = getattr(out, "shape", ())
    if name in ELEMENTWISE or name == "broadcast_in_dim":
        return
    sizes = [d for var in eqn.invars for d in getattr(var.aval, "shape", ())]
    if rows in sizes or rows in shape:
        raise RowsTogether(f"{name} makes something for each row by its number")


def _reduced(eqn: Any, axis: int) -> int:
    gone: Sequence[int] = eqn.params["axes"]
    if axis in gone:
        raise RowsTogether(f"{eqn.primitive.name} combines rows (a norm, a mean)")
    # As many axes before it are gone.
    return axis - sum(each < axis for each in gone)


def _moved(eqn: Any, axis: int, given: Sequence[int]) -> int:
    name: str = eqn.primitive.name
    params: dict[str, Any] = eqn.params
    match name:
        case "transpose":
            return int(list(params["permutation"]).index(axis))
        case "broadcast_in_dim":
            return int(params["broadcast_dimensions"][axis])
        case "squeeze":
            if axis not in params["dimensions"]:
                return axis - sum(int(d < axis) for d in params["dimensions"])
        case "expand_dims":
            return axis + sum(int(d <= axis) for d in params["dimensions"])
        case "reshape":
            before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            # The rows stay rows if the first axis stays.
            if (
                params.get("dimensions") is None
                and axis == 0
                and after[:1] == before[:1]
            ):
                return 0
        case "concatenate":
            if params["dimension"] != axis:
                return axis
        case "slice":
            strides = params["strides"] or [1] * len(params["start_indices"])
            start, limit = params["start_indices"][axis], params["limit_indices"][axis]
            size = eqn.invars[0].aval.shape[axis]
            if start == 0 and limit == size and strides[axis] == 1:
                return axis
        case "rev":
            if axis not in params["dimensions"]:
                return axis
        case "sort":
            if params["dimension"] != axis:
                return axis
        case "pad":
            if tuple(params["padding_config"][axis]) == (0, 0, 0):
                return axis
        case "dot_general":
            return _dotted(eqn, axis, given)
    raise RowsTogether(f"{name} combines rows")


def _dotted(eqn: Any, axis: int, given: Sequence[int]) -> int:
    numbers: Any = eqn.params["dimension_numbers"]
    (left, right), (left_batch, right_batch) = numbers
    ranks: list[int] = [var.aval.ndim for var in eqn.invars]
    # The rows are those of the left factor; the right one is the same for all.
    if given[1] == FREE and axis not in left:
        if axis in left_batch:
            return int(list(left_batch).index(axis))
        free = [d for d in range(ranks[0]) if d not in (*left, *left_batch)]
        return len(left_batch) + free.index(axis)
    if given[0] == FREE and axis not in right and axis not in right_batch:
        free = [d for d in range(ranks[1]) if d not in (*right, *right_batch)]
        first = ranks[0] - len(left)
        return first + free.index(axis)
    raise RowsTogether("dot_general combines rows (a product of matrices)")


def _through_cond(eqn: Any, given: Sequence[int], rows: int) -> list[int]:
    # Rows that take different branches cannot be computed together.
    if given[0] != FREE:
        raise RowsTogether("it branches on rows")
    by_branch = [axes_of_rows(b.jaxpr, given[1:], rows) for b in eqn.params["branches"]]
    result = []
    for axes in zip(*by_branch, strict=True):
        row_axes = {axis for axis in axes if axis != FREE}
        if len(row_axes) > 1:
            raise RowsTogether("cond mixes rows with another axis")
        result.append(next(iter(row_axes), FREE))
    return result
