"""Checks whether rows of zeros change what an optimizer computes from several
gradients.

A step has gradients of some rows of a table. Gradients of the same row are summed
first, so there are fewer rows than were looked up; but shapes are fixed in a step, so
the remaining rows are filled with zeros. Rows of zeros do not change a sum of squares,
but they would change a mean of rows.

Law of the file: an equation without a rule is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.extend.core import Literal

from zstrat.jaxprs import inner_call

from ._rows import ROWS, same_but_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._tree import TreeRule

_KEEP: Final = frozenset(
    {
        "abs", "sign", "neg", "sqrt", "cbrt", "square", "integer_pow", "real", "imag",
        "conj", "convert_element_type", "copy", "copy_p", "floor", "ceil", "round",
        "sin", "tan", "tanh", "sinh", "asin", "atan", "asinh", "atanh", "expm1",
        "log1p", "erf", "stop_gradient", "optimization_barrier", "reshape", "squeeze",
        "expand_dims", "transpose", "rev", "slice", "reduce_precision",
    }
)  # fmt: skip
"""Primitives that return zeros where their operand is zero."""
_BOTH: Final = frozenset({"add", "sub", "max", "min", "and", "or", "xor", "add_any"})
"""Primitives that return zeros where both operands are zero."""
_EITHER: Final = frozenset({"mul", "and"})
"""Primitives that return zeros where either operand is zero."""
_SUMS: Final = frozenset({"reduce_sum", "reduce_or", "reduce_xor"})

_FREE: Final = "no rows"
_NULL: Final = "zero everywhere"
_ZERO: Final = "zeros"
_TRUE: Final = "true"
_SIZE: Final = "size"
"""Marks a value that is positive or zero, and zero in padded rows."""
_ANY: Final = "unknown"


def dependence_on_padding(tree: TreeRule, leaf: int) -> str:
    """Returns why rows of zeros after the rows of gradients would change the update of
    a leaf; "" if they would not. Cached for each leaf."""
    return tree.remembered(("padding", leaf), lambda: _dependence(tree, leaf))


def _dependence(tree: TreeRule, leaf: int) -> str:
    closed = _program(tree, leaf, ROWS)
    # In two sizes that hardly any other axis has.
    other = _program(tree, leaf, ROWS + 2)
    if not same_but_for(closed, other, ROWS, ROWS + 2):
        return "it computes with the number of rows that have gradients"
    kinds: dict[Any, str] = {
        var: _ZERO if n == leaf else _FREE for n, var in enumerate(closed.jaxpr.invars)
    }
    found = _through(closed.jaxpr, kinds)
    if all(kind in (_FREE, _NULL) for kind in found):
        return ""
    return "what it computes of all gradients would count rows that have none"


def _program(tree: TreeRule, leaf: int, count: int) -> Any:
    sizes = tuple([count if n == leaf else None for n in range(len(tree.kinds))])
    cut = tree.cut(sizes)
    gradients = tree.gradients_at(sizes)

    def computed(*given: Any) -> list[Any]:
        return cut.computed(given[: len(gradients)], given[len(gradients) :])

    with tree.precision():
        return jax.make_jaxpr(computed)(*gradients, *tree.extras.kinds)


def _through(jaxpr: Any, kinds: dict[Any, str]) -> list[str]:
    for eqn in jaxpr.eqns:
        given = [_kind(kinds, var) for var in eqn.invars]
        call = inner_call(eqn)
        if call is not None:
            inside = dict(zip(call[0].invars, given, strict=True))
            kinds.update(zip(eqn.outvars, _through(call[0], inside), strict=True))
        else:
            made = _made(eqn, given)
            kinds.update(dict.fromkeys(eqn.outvars, made))
    return [_kind(kinds, var) for var in jaxpr.outvars]


def _kind(kinds: dict[Any, str], var: Any) -> str:
    if isinstance(var, Literal):
        # A literal is the same for all rows.
        return _FREE if np.any(np.asarray(var.val)) else _NULL
    return kinds.get(var, _FREE)


def _made(eqn: Any, given: Sequence[str]) -> str:
    name = eqn.primitive.name
    about = {kind for kind in given if kind not in (_FREE, _NULL)}
    # Nothing here depends on the padded gradient.
    if not about:
        is_null = set(given) == {_NULL} and name in _KEEP | {"broadcast_in_dim"}
        return _NULL if is_null else _FREE
    zeros = about <= {_ZERO, _SIZE}
    if name in {"abs", "square"} and zeros:
        return _SIZE
    if name == "integer_pow" and zeros:
        power = eqn.params["y"]
        return (_SIZE if power % 2 == 0 else _ZERO) if power > 0 else _ANY
    if name == "is_finite" and zeros:
        return _TRUE
    # x != x asks for nan, which zeros are not.
    if name == "ne" and zeros and eqn.invars[0] is eqn.invars[1]:
        return _ZERO  # as isnan asks
    if name == "not":
        return {_ZERO: _TRUE, _TRUE: _ZERO}.get(next(iter(about)), _ANY)
    if name == "and" and about == {_TRUE} and _FREE not in given:
        return _TRUE
    # Reductions are judged by axis 0, and the padding comes last in it.
    if not _keeps_rows(eqn):
        return _ANY
    if name in _KEEP and zeros:
        return _SIZE if about == {_SIZE} and name in _GROWING else _ZERO
    if name in _EITHER and about & {_ZERO, _SIZE}:
        return _ZERO
    if name in _BOTH and zeros and _FREE not in given:
        return _SIZE if about == {_SIZE} and name in {"add", "max"} else _ZERO
    # By a value without rows: zeros by zeros of the padding would be nan.
    if name == "div" and given[0] in {_ZERO, _SIZE} and given[1] == _FREE:
        return _ZERO
    return _reduced(eqn, about)


def _keeps_rows(eqn: Any) -> bool:
    """Returns whether an equation keeps the rows: if they are the first axis of an
    operand, they are the first axis of the result, in the same order."""
    name = eqn.primitive.name
    if name == "rev":
        return 0 not in eqn.params["dimensions"]
    if name == "transpose":
        return bool(eqn.params["permutation"][0] == 0)
    if name in {"reshape", "squeeze", "expand_dims"}:
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        return bool(after[:1] == before[:1])
    return True


_GROWING: Final = frozenset(
    {"sqrt", "copy", "copy_p", "convert_element_type", "reshape"}
)


def _reduced(eqn: Any, about: set[str]) -> str:
    """Returns what is known about the padded rows in the result of a reduction, which
    is over the rows or within each row."""
    name = eqn.primitive.name
    if not name.startswith("reduce_") or name == "reduce_precision":
        return _ANY
    over_rows = 0 in eqn.params["axes"]
    zeros = about <= {_ZERO, _SIZE}
    if name in _SUMS and zeros:
        return _FREE if over_rows else next(iter(about))
    if name == "reduce_max" and about == {_SIZE}:
        return _FREE if over_rows else _SIZE
    if name == "reduce_and" and about == {_TRUE}:
        return _FREE if over_rows else _TRUE
    return _ANY
