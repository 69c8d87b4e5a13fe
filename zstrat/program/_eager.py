"""The recorder of eager steps: a read or update happens when Python comes to it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.variables import recorder

from . import _refusals
from ._fresh import fresh

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.variables import Home, Optimizer, Variable
    from zstrat.wire._messages import UpdateOp

    from ._iterator import StepIterator


class Immediate:
    """Reads and updates through ``home``, or each variable's own if that is None.

    Values and elements are jax arrays, as in a captured step, but with values.
    """

    def __init__(self, home: Home | None) -> None:
        self._home = home
        self._drawn: list[Any] = []
        self._scope = ExitStack()

    @contextmanager
    def recording(self) -> Iterator[Immediate]:
        """Runs what is inside as the body."""
        with self._scope:
            self._scope.enter_context(fresh())
            before = recorder.set(self)
            try:
                yield self
            finally:
                recorder.reset(before)

    def read(self, variable: Variable) -> jax.Array:
        return jnp.asarray(self._home_of(variable).read(variable))

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: tuple[jax.Array, ...],
        optimizer: Optimizer | None,
    ) -> None:
        if any(isinstance(operand, jax.core.Tracer) for operand in operands):
            raise _refusals.update_inside(variable.spec, op.name)
        host = tuple(np.array(operand, order="C") for operand in operands)
        self._home_of(variable).update(variable, op, host, optimizer)
        # Inner functions that jax has compiled already hold the old value.
        self._scope.enter_context(fresh())

    def draw(self, iterator: StepIterator) -> Any:
        # A copy: the dataset may fill the same buffer again.
        element = jax.tree.map(jnp.array, iterator.draw())
        self._drawn.extend(jax.tree.leaves(element))
        return element

    def drew(self, leaf: object) -> bool:
        """Whether this very array is (a leaf of) an element drawn in this step."""
        return any(leaf is drawn for drawn in self._drawn)

    def _home_of(self, variable: Variable) -> Home:
        return variable.home if self._home is None else self._home
