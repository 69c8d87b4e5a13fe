"""What a requested variable will be: its parts, with their shapes and values.

TF's rules of partitioning say which parts there are and how large (`draft`). Keys and
places of the parts are given out elsewhere (`_variable_placement`).

Law of the file. Nothing here talks to a parameter server, and a value that can be made
there is not made here.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.variables import ComponentRows, DeferredValue, VariableSpec, initial
from zstrat.wire import InitialEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.variables import VariableRequest


_log: Final = logging.getLogger(__name__)

_MAX_SHIPPED_ELEMENTS: Final = 10**9
"""Elements (TF's number) beyond which a value should not be made on the coordinator."""


@dataclass(frozen=True, slots=True)
class VariablePlan:
    """A variable to be: ``offsets`` are the first rows of its parts and, behind them,
    the number of all rows; None if it stays whole."""

    request: VariableRequest
    value: DeferredValue | np.ndarray
    offsets: tuple[int, ...] | None

    @property
    def parts(self) -> int:
        """How many components there will be."""
        return 1 if self.offsets is None else len(self.offsets) - 1

    @property
    def sizes(self) -> list[int]:
        """Bytes of each component."""
        shapes = (self.shape_of(index) for index in range(self.parts))
        return [math.prod(shape) * self.value.dtype.itemsize for shape in shapes]

    def shape_of(self, index: int) -> tuple[int, ...]:
        """The shape of a component."""
        if self.offsets is None:
            return self.value.shape
        start, stop = self.offsets[index : index + 2]
        return (stop - start, *self.value.shape[1:])

    def spec(self, index: int, key: int, ps: int) -> VariableSpec:
        """The component as a variable of its own, TF's name included."""
        request, part, name = self.request, None, self.request.name
        if self.offsets is not None:
            start, rows = self.offsets[index], self.offsets[-1]
            part = ComponentRows(name, index, self.parts, start, rows)
            name = f"{name}/part_{index}"
        return VariableSpec(
            key,
            name,
            self.shape_of(index),
            self.value.dtype.name,
            ps,
            request.trainable,
            request.aggregation,
            request.synchronization,
            part,
        )

    def array(self, spec: VariableSpec) -> np.ndarray:
        """A component's value that was made here."""
        assert not isinstance(self.value, DeferredValue), spec
        if spec.part is None:
            return self.value
        start = spec.part.offset
        return self.value[start : start + spec.shape[0]]

    def entry(self, spec: VariableSpec) -> InitialEntry:
        """What a ps is told of a component whose value it makes."""
        shape, part = self.value.shape, spec.part
        offset = [0] * len(shape)
        if part is not None:
            offset[0] = part.offset
        return InitialEntry(
            spec.key,
            spec.name,
            spec.trainable,
            part is not None,
            spec.dtype,
            list(spec.shape),
            list(shape),
            offset,
        )


def draft(
    request: VariableRequest, partitioner: Callable[..., Any] | None
) -> VariablePlan:
    """Decides how a variable is made.

    Raises:
        ValueError: The request has no initial value, or one of another shape; or the
            partitioner's answer is none.
        TypeError: The value is no array of numbers or booleans.
    """
    value = initial(request)
    if partitioner is None or request.is_whole or not value.shape:
        return VariablePlan(request, value, None)
    given = partitioner(shape=value.shape, dtype=value.dtype)
    parts = _first_axis(given, request.name, value.shape)
    if parts == 1 or not value.shape[0]:
        return VariablePlan(request, value, None)
    size = math.prod(value.shape)
    if size > _MAX_SHIPPED_ELEMENTS and not isinstance(value, DeferredValue):
        _log.warning(
            "variable %r of %d elements is made whole on the coordinator and then cut "
            "into parts: give it a shape, a dtype and an initializer that makes parts "
            "(one of zs.initializers, or any that takes partition_shape and "
            "partition_offset), which runs on the parameter servers",
            request.name,
            size,
        )
    return VariablePlan(request, value, div(value.shape[0], parts))


def div(rows: int, parts: int) -> tuple[int, ...]:
    """TF's layout: at most one part per row, the first ones a row longer than the rest.
    First row of each part, and behind them ``rows``."""
    count = min(rows, parts)
    base, extra = divmod(rows, count)
    return tuple(index * base + min(index, extra) for index in range(count + 1))


def _first_axis(parts: Any, name: str, shape: Sequence[int]) -> int:
    """How many parts along the first axis; TF's checks of a partitioner's answer."""
    right = (
        isinstance(parts, list | tuple)
        and len(parts) == len(shape)
        and all(_is_count(n) for n in parts)
        and all(n == 1 for n in parts[1:])
    )
    if not right:
        raise ValueError(
            f"variable_partitioner must return a list/tuple whose elements are 1 "
            f"besides the first element (non-zero), one per axis; for variable "
            f"{name!r} of shape {tuple(shape)} it returned {parts!r}"
        )
    return int(parts[0])


def _is_count(number: Any) -> bool:
    return isinstance(number, int | np.integer) and int(number) > 0
