"""A replica function as a step of its own: what it may return."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.variables import AbstractVariable

from ._turns import NeedsTurns


class _Itself:
    """A variable that a function returns, as a part of the structure of its result."""

    def __init__(self, variable: AbstractVariable) -> None:
        self.which = _Which(variable)


class _Which:
    """Says which variable it is: structures are compared, and what is compared in place
    of a variable are its values."""

    def __init__(self, variable: AbstractVariable) -> None:
        self.variable = variable
        self._key = type(variable), tuple([x.spec for x in variable.components])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Which) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)


jax.tree_util.register_pytree_node(
    _Itself, lambda node: ((), node.which), lambda which, _: which.variable
)


def returned(leaf: Any) -> Any:
    """A leaf of what a function returns that is a step of its own.

    Raises:
        NeedsTurns: It is nothing that a program returns.
    """
    if isinstance(leaf, AbstractVariable):
        return _Itself(leaf)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise NeedsTurns("it returns a random key")
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, *_PLAIN)):
        return leaf
    raise NeedsTurns(f"it returns a {type(leaf).__name__}")


_PLAIN: Final = (bool, int, float, complex, str, bytes)
