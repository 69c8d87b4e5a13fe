"""A replica function as a step of its own: what it may return."""

from __future__ import annotations

from typing import Any, Final

import jax
import numpy as np

from zstrat.variables import AbstractVariable

from ._turns import NeedsTurns


class _Itself:
    """A variable that a function returns, as a part of the structure of its result."""

    def __init__(self, variable: AbstractVariable) -> None:
        self.variable = variable


jax.tree_util.register_pytree_node(
    _Itself, lambda node: ((), node.variable), lambda variable, _: variable
)


def returned(leaf: Any) -> Any:
    """A leaf of what a function returns that is a step of its own.

    Raises:
        NeedsTurns: It is nothing that a program returns.
    """
    if isinstance(leaf, AbstractVariable):
        return _Itself(leaf)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, *_PLAIN)):
        return leaf
    raise NeedsTurns(f"it returns a {type(leaf).__name__}")


_PLAIN: Final = (bool, int, float, complex, str, bytes)
