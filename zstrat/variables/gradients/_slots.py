"""What an optimizer keeps beside a variable: arrays by name, the path in its state.

Which ones there are is known when the optimizer sees its tree (`SlotRule`). What was
restored before that is kept as it was stored, and compared when the tree is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zstrat.optimizers import LeafRule


class OptimizerHandle(Protocol):
    """What storages, recorders and slots need of an optimizer: what it is called, in
    errors and where variables live, and the transformation."""

    @property
    def id(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def transformation(self) -> Any: ...


class SlotInfo(NamedTuple):
    """One array of an optimizer's state beside a variable, by name. ``rows``: its first
    axis is the variable's own."""

    leaf: str
    dtype: str
    shape: tuple[int, ...]
    rows: bool


@dataclass(frozen=True, eq=False)
class SlotRule:
    """What an optimizer keeps beside one variable, or beside a component of one.

    Args:
        size: The rows of the component, None for all that the leaf has.
        values: Gives the values of all leaves of the tree, in order.
    """

    optimizer: OptimizerHandle
    leaf: LeafRule
    size: int | None
    values: Callable[[], list[Any]]

    @property
    def id(self) -> int:
        """The number of the optimizer."""
        return self.optimizer.id

    @property
    def names(self) -> tuple[str, ...]:
        """The paths in the state of the tree, without the leaf's own."""
        return self.leaf.names

    @cached_property
    def kinds(self) -> list[Any]:
        """Shapes and dtypes, in the order of the names."""
        return self.leaf.steady_kinds(self.size)

    def initial(self, value: Any) -> list[Any]:
        """The slots before the first gradient."""
        with self.leaf.tree.precision():
            if self.leaf.begins_together:
                made = self._together()
            else:
                made = list(jax.jit(self.leaf.init)(value))
            pairs = zip(made, self.kinds, strict=True)
            return [jnp.asarray(slot, kind.dtype) for slot, kind in pairs]

    def beside(self, leaves: list[Any]) -> SlotValues:
        """Slots in the order of the names."""
        return SlotValues(self.names, leaves, self.leaf.has_rows)

    def fitted(self, variable: str, beside: SlotValues) -> SlotValues:
        """What is there, in the order of the names.

        Raises:
            ValueError: It is not what the optimizer keeps here.
        """
        found = dict(zip(beside.names, beside.leaves, strict=True))
        if beside.names == self.names or set(found) == set(self.names):
            wanted = {n: k.shape for n, k in zip(self.names, self.kinds, strict=True)}
            if all(found[name].shape == shape for name, shape in wanted.items()):
                return self.beside([found[name] for name in self.names])
        there = {name: tuple(leaf.shape) for name, leaf in found.items()}
        expected = {n: k.shape for n, k in zip(self.names, self.kinds, strict=True)}
        raise ValueError(
            f"optimizer {self.optimizer.name!r} keeps {expected} beside variable "
            f"{variable!r}, and there is {there}: it was restored, or has moved the "
            "variable as part of another tree. Use one optimizer for one tree, and "
            "name it: zs.Optimizer(transformation, params=params)"
        )

    def _together(self) -> list[Any]:
        tree, leaf = self.leaf.tree, self.leaf
        program = tree.init()
        state = jax.jit(jaxpr_as_fun(program.closed))(*self.values())
        return [state[slot.state] for slot in leaf.slots]


@dataclass(frozen=True, slots=True)
class SlotValues:
    """What one optimizer keeps beside a variable: names, and arrays in their order, as
    steps take them and put them back. ``rows``: the first axis of an array is that of
    the variable."""

    names: tuple[str, ...]
    leaves: list[Any]
    rows: tuple[bool, ...]

    def on_host(self) -> SlotValues:
        """The same slots as arrays of numpy."""
        return SlotValues(self.names, [np.asarray(x) for x in self.leaves], self.rows)

    def items(self) -> Iterator[tuple[str, Any, bool]]:
        """Name, array, and whether it has the rows of the variable."""
        return zip(self.names, self.leaves, self.rows, strict=True)

    def replaced(self, name: str, array: Any) -> SlotValues:
        """These slots, with another array under one name.

        Raises:
            KeyError: There is none of that name.
        """
        if name not in self.names:
            raise KeyError(name)
        pairs = zip(self.names, self.leaves, strict=True)
        leaves = [array if known == name else leaf for known, leaf in pairs]
        return SlotValues(self.names, leaves, self.rows)

    @property
    def is_lost(self) -> bool:
        return any(
            isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in self.leaves
        )

    @property
    def is_void(self) -> bool:
        """Whether it is lost, or the step that makes it has failed. Waits for it."""
        try:
            jax.block_until_ready(self.leaves)  # type: ignore[no-untyped-call]
        except Exception:  # of that step: it says here that there is nothing
            return True
        return self.is_lost
