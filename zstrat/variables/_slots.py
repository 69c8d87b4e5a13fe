"""What an optimizer keeps beside a variable, by name: the path in its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._optimizer import Optimizer


class SlotInfo(NamedTuple):
    """One array of an optimizer's state beside a variable of a given shape.

    ``rows``: its first axis is the variable's own.
    """

    leaf: str
    dtype: str
    shape: tuple[int, ...]
    rows: bool


@dataclass(frozen=True, slots=True)
class Beside:
    """What one optimizer keeps: its leaves in a row, as steps take and put them back,
    and their structure."""

    leaves: list[Any]
    treedef: Any

    def tree(self) -> Any:
        return self.treedef.unflatten(self.leaves)

    @property
    def is_lost(self) -> bool:
        return any(leaf.is_deleted() for leaf in self.leaves)

    @property
    def is_void(self) -> bool:
        """Whether it is lost, or the step that makes it has failed. Waits for it."""
        try:
            jax.block_until_ready(self.leaves)  # type: ignore[no-untyped-call]
        except Exception:  # of that step: it says here that there is nothing
            return True
        return self.is_lost


def slot_infos(
    optimizer: Optimizer, shape: tuple[int, ...], dtype: Any
) -> list[SlotInfo]:
    """What the optimizer keeps beside a variable of this shape. Nothing is computed.

    Raises:
        RuntimeError: The handle came from another task, without its transformation.
    """
    state = _abstract(optimizer, shape, dtype)
    taller = state
    if shape:
        taller = _abstract(optimizer, (shape[0] + 1, *shape[1:]), dtype)
    return [
        SlotInfo(name, leaf.dtype.name, leaf.shape, more.shape != leaf.shape)
        for (name, leaf), more in zip(state.items(), taller.values(), strict=True)
    ]


def initial_slots(
    optimizer: Optimizer, shape: tuple[int, ...], dtype: Any
) -> dict[str, np.ndarray]:
    """What the optimizer keeps before its first gradient; arrays to write into."""
    state = optimizer.transformation.init(jax.numpy.zeros(shape, dtype))
    return {name: np.array(leaf) for name, leaf in _named(state).items()}


def named_slots(state: Any) -> dict[str, Any]:
    """The leaves of an optimizer's state, as arrays of numpy, by their paths."""
    return {name: np.asarray(leaf) for name, leaf in _named(state).items()}


def slots_from(
    optimizer: Optimizer, value: np.ndarray | jax.Array, named: Mapping[str, np.ndarray]
) -> Any:
    """Inverse of `named_slots`: the state of ``optimizer`` beside ``value``.

    Raises:
        ValueError: Names, shapes or dtypes are others than it keeps.
    """
    state = optimizer.transformation.init(value)
    wanted = {n: (leaf.shape, leaf.dtype) for n, leaf in _named(state).items()}
    given = {name: (leaf.shape, leaf.dtype) for name, leaf in named.items()}
    if wanted != given:
        raise ValueError(
            f"optimizer {optimizer.name!r} keeps {wanted}, and is given {given}"
        )
    return jax.tree.unflatten(
        jax.tree.structure(state), [jax.numpy.asarray(named[name]) for name in wanted]
    )


def _abstract(optimizer: Optimizer, shape: tuple[int, ...], dtype: Any) -> Any:
    like = jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
    return _named(jax.eval_shape(optimizer.transformation.init, like))


def _named(state: Any) -> dict[str, Any]:
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(state)[0]}
