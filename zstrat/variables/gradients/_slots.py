"""Slots: the arrays that an optimizer keeps for a variable, named by path in its state.

`SlotRule` describes the slots of a variable; the optimizer makes it when it knows its
tree of variables. Slots that were restored earlier are kept as stored, and checked when
the rule is made.
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

    from zstrat.codecs import Wire
    from zstrat.optimizers import LeafRule

    from ._rounds import Rounds


class OptimizerHandle(Protocol):
    """An optimizer, in the form that storages, recorders and slots use."""

    @property
    def id(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def transformation(self) -> Any: ...

    @property
    def rounds(self) -> Rounds | None: ...

    @property
    def wire(self) -> Wire | None: ...

    def slot_rule(self, variable: Any) -> SlotRule:
        """Returns the rule of the slots that the optimizer keeps for a variable of this
        process.

        Raises:
            RuntimeError: The optimizer has not seen the variable yet.
        """
        ...


class SlotInfo(NamedTuple):
    """Describes a slot: its path in the state, its dtype and shape, and whether its
    first axis is that of the variable (``rows``)."""

    leaf: str
    dtype: str
    shape: tuple[int, ...]
    rows: bool


@dataclass(frozen=True, eq=False)
class SlotRule:
    """The slots that an optimizer keeps for one variable, or for a component of one.

    Args:
        size: Number of rows of the component; None if the component is the whole
            variable.
        values: Reads the values of all leaves of the tree, in order.
    """

    optimizer: OptimizerHandle
    leaf: LeafRule
    size: int | None
    values: Callable[[], list[Any]]

    @property
    def id(self) -> int:
        """The id of the optimizer."""
        return self.optimizer.id

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of the slots in the optimizer's state, without the path of the
        leaf."""
        return self.leaf.names

    @cached_property
    def kinds(self) -> list[Any]:
        """Shapes and dtypes of the slots, in the order of the names."""
        return self.leaf.steady_kinds(self.size)

    def initial(self, value: Any) -> list[Any]:
        """Computes the slots of a variable with this value before its first
        gradient."""
        with self.leaf.tree.precision():
            if self.leaf.begins_together:
                slots = self._together()
            else:
                slots = list(jax.jit(self.leaf.init)(value))
            # In the dtypes that updates give them, or the second update would be
            # another program than the first.
            pairs = zip(slots, self.kinds, strict=True)
            return [jnp.asarray(slot, kind.dtype) for slot, kind in pairs]

    def beside(self, leaves: list[Any]) -> SlotValues:
        """Attaches the names of the slots to arrays that are in the order of the
        rule."""
        return SlotValues(self.names, leaves, self.leaf.has_rows)

    def fitted(self, variable: str, beside: SlotValues) -> SlotValues:
        """Sorts stored slots of a variable in the order of the rule.

        Raises:
            ValueError: The stored slots are not those of this optimizer.
        """
        stored = dict(zip(beside.names, beside.leaves, strict=True))
        if beside.names == self.names or set(stored) == set(self.names):
            wanted = {n: k.shape for n, k in zip(self.names, self.kinds, strict=True)}
            if all(stored[name].shape == shape for name, shape in wanted.items()):
                return self.beside([stored[name] for name in self.names])
        there = {name: tuple(leaf.shape) for name, leaf in stored.items()}
        expected = {n: k.shape for n, k in zip(self.names, self.kinds, strict=True)}
        raise ValueError(
            f"optimizer {self.optimizer.name!r} keeps slots {expected} for variable "
            f"{variable!r}, got {there}: they were restored, or the optimizer has "
            "updated the variable as part of another tree. Use one optimizer for one "
            "tree, and name it: zs.Optimizer(transformation, params=params)"
        )

    def _together(self) -> list[Any]:
        tree, leaf = self.leaf.tree, self.leaf
        program = tree.init()
        # Run whole, as the first slots of this leaf depend on other leaves, too.
        state = jax.jit(jaxpr_as_fun(program.closed))(*self.values())
        return [state[slot.state] for slot in leaf.slots]


@dataclass(frozen=True, slots=True)
class SlotValues:
    """The slots of one optimizer for a variable: names, and arrays in the same order.

    ``rows`` says for each array whether its first axis is that of the variable.
    """

    names: tuple[str, ...]
    leaves: list[Any]
    rows: tuple[bool, ...]

    def on_host(self) -> SlotValues:
        """Converts the slots to numpy arrays."""
        return SlotValues(self.names, [np.asarray(x) for x in self.leaves], self.rows)

    def items(self) -> Iterator[tuple[str, Any, bool]]:
        """Iterates over name, array, and whether the array's first axis is that of the
        variable."""
        return zip(self.names, self.leaves, self.rows, strict=True)

    def replaced(self, name: str, array: Any) -> SlotValues:
        """Returns the slots with another array for one name.

        Raises:
            KeyError: There is no slot of that name.
        """
        if name not in self.names:
            raise KeyError(name)
        pairs = zip(self.names, self.leaves, strict=True)
        leaves = [array if known == name else leaf for known, leaf in pairs]
        return SlotValues(self.names, leaves, self.rows)

    @property
    def is_lost(self) -> bool:
        """Whether a slot was donated to XLA for a step that failed."""
        return any(
            isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in self.leaves
        )

    @property
    def is_void(self) -> bool:
        """Whether slots are lost, or the step that computes them failed. Waits for that
        step."""
        try:
            jax.block_until_ready(self.leaves)  # type: ignore[no-untyped-call]
        except Exception:  # of that step, which has raised it already
            return True
        return self.is_lost
