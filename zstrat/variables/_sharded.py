"""A variable in parts: its rows lie in several variables, each on a ps of its own.

To its user it is one array. Whatever is done with it goes to the components that are
concerned: a dense update is cut, rows go where they live, and what is read in part is
fetched in part. Like a `Variable` it is an opaque leaf of pytrees.

Law of the file: the components never change, and each of them knows which rows it is
(`VariableSpec.part`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from ._abstract import AbstractVariable
from ._home import read_all, read_all_async
from ._rows import row_updates
from ._spec import Part, VariableSpec
from ._table import Table
from ._variable import Variable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.wire import UpdateOp

    from ._home import HomeUpdate
    from ._optimizer import Optimizer
    from ._recorder import Recorder


class ShardedVariable(AbstractVariable):
    """One array over the rows of several variables.

    A strategy with a partitioner makes them; ``variables`` of one's own, in the order
    of their rows, are joined here, and know from then on that they are parts.

    Raises:
        TypeError: ``variables`` is no list or tuple of variables, or an empty one.
        ValueError: They differ in dtype, or in shape beyond the first axis; or one of
            them is a part of another variable already.
    """

    __slots__ = ("__weakref__", "_table")
    _table: Table

    def __init__(
        self, variables: Sequence[Variable], name: str = "ShardedVariable"
    ) -> None:
        _check(variables)
        table = Table(name, tuple(variables))
        for index, variable in enumerate(variables):
            offset = int(table.offsets[index])
            part = Part(name, index, len(variables), offset, table.shape[0])
            variable._spec = replace(variable._spec, part=part)
        _fill(self, table)

    @property
    def variables(self) -> list[Variable]:
        """The components, in the order of their rows."""
        return list(self._table.components)

    @property
    def components(self) -> tuple[Variable, ...]:
        return self._table.components

    @property
    def table(self) -> Table:
        return self._table

    # ---- the members of AbstractVariable -------------------------------------------

    def _read_now(self) -> np.ndarray:
        return _joined(read_all(self.components))

    async def _read_now_async(self) -> np.ndarray:
        return _joined(await read_all_async(self.components))

    def _traced_value(self, recording: Recorder) -> Any:
        parts = [recording.read(component) for component in self.components]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def _record(
        self, recording: Recorder, op: UpdateOp, value: Any, optimizer: Optimizer | None
    ) -> None:
        for component, part in self._cut(value):
            recording.update(component, op, (part,), optimizer)

    def _record_rows(
        self,
        recording: Recorder,
        op: UpdateOp,
        rows: tuple[Any, Any],
        optimizer: Optimizer | None,
    ) -> None:
        recording.update_rows(self._table, op, rows, optimizer)

    def _updates(
        self, op: UpdateOp, value: np.ndarray, optimizer: Optimizer | None
    ) -> list[HomeUpdate]:
        return [(part, op, (rows,), optimizer) for part, rows in self._cut(value)]

    def _row_updates(
        self,
        op: UpdateOp,
        rows: tuple[np.ndarray, np.ndarray],
        optimizer: Optimizer | None,
    ) -> list[HomeUpdate]:
        return row_updates(self._table, op, rows, optimizer)

    def _cut(self, value: Any) -> Iterator[tuple[Variable, Any]]:
        offsets = self._table.offsets.tolist()
        for index, component in enumerate(self.components):
            yield component, value[offsets[index] : offsets[index + 1]]

    def __reduce__(self) -> Any:
        return joined, (self.components, self.name)

    def __repr__(self) -> str:
        spec = self._spec
        return (
            f"<zstrat.ShardedVariable {spec.name!r} shape={spec.shape} "
            f"dtype={spec.dtype} parts={len(self.components)}>"
        )


def joined(components: Sequence[Variable], name: str) -> ShardedVariable:
    """The variable over components that know already that they are its parts."""
    sharded = object.__new__(ShardedVariable)
    _fill(sharded, Table(name, tuple(components)))
    return sharded


def _fill(sharded: ShardedVariable, table: Table) -> None:
    first = table.components[0].spec
    sharded._spec = VariableSpec(
        first.key,
        table.name,
        table.shape,
        first.dtype,
        first.ps,
        first.trainable,
        first.aggregation,
        first.synchronization,
    )
    sharded._table = table


def _check(variables: Any) -> None:
    is_list = isinstance(variables, list | tuple)
    if not is_list or not variables or not all(_is_variable(v) for v in variables):
        raise TypeError(
            f"variables should be a non-empty list of zs.Variable, got {variables!r}"
        )
    dtypes = {v.dtype.name for v in variables}
    if len(dtypes) > 1:
        raise ValueError(
            f"all variables of a ShardedVariable must have the same dtype, got "
            f"{[v.dtype.name for v in variables]}"
        )
    if any(not v.shape for v in variables) or len({v.shape[1:] for v in variables}) > 1:
        raise ValueError(
            f"all variables of a ShardedVariable must have the same shapes except for "
            f"the first axis, got {[v.shape for v in variables]}"
        )
    for variable in variables:
        if variable.spec.part is not None:
            raise ValueError(
                f"{variable.spec} is part {variable.spec.part.index} of "
                f"{variable.spec.part.whole!r} already: a variable is in one "
                "ShardedVariable"
            )


def _is_variable(value: object) -> bool:
    return isinstance(value, Variable)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    whole = np.concatenate(parts)
    whole.flags.writeable = False
    return whole
