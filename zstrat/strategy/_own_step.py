"""A replica function as a step of its own: how it is called, and what it may return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from zstrat.variables import AbstractVariable

from ._arguments import NUMBERS, Plain, unwrapped
from ._turns import NeedsTurns

if TYPE_CHECKING:
    from ._kept_steps import KeptStep


def called(kept: KeptStep, tree: Any) -> Any:
    """What the step returns.

    A Python number among its arguments is one for the function, too, and each value is
    traced. Where values differ from call to call (a learning rate) and the function
    returns no Python number, it is tried once whether numbers may be inputs.
    """
    args, kwargs = tree
    if kept.numbers is False:
        return kept.step(*args, **kwargs)
    if kept.numbers is None:
        before = kept.step.trace_count
        result = kept.step(*args, **kwargs)
        if 1 < kept.step.trace_count > before and _has(Plain, tree):
            kept.numbers = not _has(NUMBERS, result)
        return result
    plain_args, plain_kwargs = unwrapped(tree)
    if kept.are_tried:
        return kept.step(*plain_args, **plain_kwargs)
    before = kept.step.trace_count
    try:
        result = kept.step(*plain_args, **plain_kwargs)
    except (NeedsTurns, Exception):
        # The function wants to know a number, as a shape, say. If it is something else
        # the call below raises it again.
        if kept.step.trace_count > before:
            raise  # while it ran
        kept.numbers = False
        return kept.step(*args, **kwargs)
    kept.are_tried = True
    return result


def _has(kinds: Any, tree: Any) -> bool:
    return any(isinstance(leaf, kinds) for leaf in jax.tree.leaves(tree))


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
