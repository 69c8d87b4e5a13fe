"""The plan of a requested variable: its parts, their servers and their keys.

TF's rules of partitioning determine the parts and their sizes (`draft`).
`VariablePlacement` chooses the parameter server (ps) of each: round robin in the order
of creation, with one counter per strategy as in TF, or by bytes. `Numbers` assigns keys
in the same order.

Laws of the file. Nothing here communicates with a parameter server, and a value that a
server can make is not made here. Keys of a failed creation are used again, because
programs that share parameter servers identify a variable by its index in the order of
creation. Some components of the failed creation may be on a ps nevertheless, and must
be removed first: see `Numbers.doubtful`.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from zstrat.ids import BUCKETS
from zstrat.variables import (
    BUCKET_ROWS,
    ComponentRows,
    DeferredValue,
    VariableSpec,
    initial,
)
from zstrat.wire import InitialEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.variables import TableRequest, VariableHandle, VariableRequest


_log: Final = logging.getLogger(__name__)

_MAX_SHIPPED_ELEMENTS: Final = 10**9
"""Number of elements (TF's limit) above which a value should not be made on the
coordinator."""


@dataclass(frozen=True, slots=True)
class VariablePlan:
    """The plan of a variable that will be created. ``offsets`` are the first rows of
    its parts and, last, the number of all rows; None if the variable stays whole."""

    request: VariableRequest
    value: DeferredValue | np.ndarray
    offsets: tuple[int, ...] | None

    @property
    def parts(self) -> int:
        """Number of components."""
        return 1 if self.offsets is None else len(self.offsets) - 1

    @property
    def sizes(self) -> list[int]:
        """Size in bytes of each component."""
        shapes = (self.shape_of(index) for index in range(self.parts))
        return [math.prod(shape) * self.value.dtype.itemsize for shape in shapes]

    def shape_of(self, index: int) -> tuple[int, ...]:
        """Returns the shape of a component."""
        if self.offsets is None:
            return self.value.shape
        start, stop = self.offsets[index : index + 2]
        return (stop - start, *self.value.shape[1:])

    def spec(self, index: int, key: int, ps: int) -> VariableSpec:
        """Returns the spec of a component as a separate variable, with TF's name for
        it."""
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
        """Returns the value of a component, whose variable's value was made in this
        process."""
        assert not isinstance(self.value, DeferredValue), spec
        if spec.part is None:
            return self.value
        start = spec.part.offset
        return self.value[start : start + spec.shape[0]]

    def entry(self, spec: VariableSpec) -> InitialEntry:
        """Returns the description with which a ps creates a component and makes its
        value."""
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
    """Makes the plan of a requested variable: its parts, and where its initial value is
    made.

    Raises:
        ValueError: The request has no initial value, or one of another shape; or the
            partitioner does not return a list of numbers.
        TypeError: The value is not an array of numbers or booleans.
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
    """Divides rows as TF does: at most one part per row, the first parts are one row
    longer than the rest. Returns the first row of each part, and last ``rows``."""
    count = min(rows, parts)
    base, extra = divmod(rows, count)
    return tuple(index * base + min(index, extra) for index in range(count + 1))


def _first_axis(parts: Any, name: str, shape: Sequence[int]) -> int:
    """Returns the number of parts along the first axis, after TF's checks of the
    partitioner's result.

    Raises:
        ValueError: The result is not a list with a positive number for each axis, or
            splits another axis than the first.
    """
    right = (
        isinstance(parts, list | tuple)
        and len(parts) == len(shape)
        and all(isinstance(n, int | np.integer) and int(n) > 0 for n in parts)
        and all(n == 1 for n in parts[1:])
    )
    if not right:
        raise ValueError(
            f"variable_partitioner must return a list/tuple whose elements are 1 "
            f"besides the first element (non-zero), one per axis; for variable "
            f"{name!r} of shape {tuple(shape)} it returned {parts!r}"
        )
    return int(parts[0])


_BLOCK_BITS: Final = 20
"""Bits of a key below the block: a session has a block of 2**20 keys, far more than a
program creates variables."""

_BLOCKS: Final = 2**40
"""Number of blocks of keys; more sessions would use the same blocks again. With the
bits of a block a key has 60 bits."""


class PlacementRule(enum.StrEnum):
    """How new components are assigned to parameter servers."""

    ROUND_ROBIN = "round_robin"
    BYTES = "bytes"


class VariablePlacement:
    """Decides on which ps each new component of a variable is stored: all of it, or
    some rows of a sharded one."""

    def __init__(
        self, ps_count: int, rule: PlacementRule = PlacementRule.ROUND_ROBIN
    ) -> None:
        self._rule = rule
        self._placed = 0
        self._bytes = [0] * ps_count

    def place(self, sizes: Sequence[int], beside: int | None = None) -> list[int]:
        """Returns the task indices of the ps for new components of these sizes in
        bytes: in turn, or for each the ps with the fewest bytes (the first of several).
        With ``beside`` all are placed on that ps, which does not count as a turn."""
        where = []
        for size in sizes:
            ps = self._next() if beside is None else beside
            self._bytes[ps] += size
            where.append(ps)
        return where

    def mark(self) -> tuple[int, list[int]]:
        """Returns the present state, for `back_to`."""
        return self._placed, list(self._bytes)

    def back_to(self, mark: tuple[int, list[int]]) -> None:
        """Restores the state that `mark` returned: forgets components placed since
        then."""
        self._placed, self._bytes = mark[0], list(mark[1])

    def free(self, ps: int, size: int) -> None:
        """Subtracts a deleted component of ``size`` bytes from the bytes of its ps."""
        self._bytes[ps] -= size

    def _next(self) -> int:
        if self._rule is PlacementRule.BYTES:
            return min(range(len(self._bytes)), key=self._bytes.__getitem__)
        ps = self._placed % len(self._bytes)
        self._placed += 1
        return ps


@final
class Numbers:
    """Assigns the keys of variables and the ids of optimizers of one session, counted
    from its first number. The caller holds a lock to change them."""

    def __init__(self, origin: int, placement: VariablePlacement) -> None:
        self._placement = placement
        # A handle that outlives its session must not name a variable of the next one by
        # chance. Below 2**60, which fits the 63 bits of a signed integer on the wire.
        self._first = origin % _BLOCKS << _BLOCK_BITS
        self._created = self._optimizers = self._first
        self._variables_at_risk: list[VariableSpec] = []
        self._optimizers_at_risk: list[int] = []

    def has_variable(self, spec: VariableSpec) -> bool:
        """Returns whether a variable was created in this session."""
        return self._first < spec.key <= self._created

    def has_optimizer(self, number: int) -> bool:
        """Returns whether an optimizer was created in this session."""
        return self._first < number <= self._optimizers

    @property
    def doubtful(self) -> tuple[list[VariableSpec], list[int]]:
        """Variables and optimizers of a creation that failed or is not finished: they
        may or may not exist on the ps."""
        return list(self._variables_at_risk), list(self._optimizers_at_risk)

    def settled(self) -> None:
        """Empties `doubtful`: the failed creation has been removed from the ps, or has
        succeeded after all."""
        self._variables_at_risk.clear()
        self._optimizers_at_risk.clear()

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Keeps the keys and placements that the block takes; if the block raises,
        releases them."""
        before = self._created, self._optimizers, self._placement.mark()
        try:
            yield
        except BaseException:  # to the caller, who has created nothing
            self._created, self._optimizers, mark = before
            self._placement.back_to(mark)
            raise
        self.settled()

    def parts(self, request: TableRequest, servers: int) -> list[VariableSpec]:
        """Returns the specs of the parts of a hash table, with keys: one part on each
        server, or on the first ones if there are more servers than buckets."""
        count = min(servers, BUCKETS)
        cuts = [BUCKETS * n // count for n in range(count + 1)]
        first = self._created + 1
        self._created += count
        specs = [
            VariableSpec(
                first + n,
                request.name if count == 1 else f"{request.name}/part_{n}",
                ((stop - start) * BUCKET_ROWS, *request.row),
                request.dtype.name,
                n,
                request.trainable,
                buckets=(start, stop),
            )
            for n, (start, stop) in enumerate(itertools.pairwise(cuts))
        ]
        self._variables_at_risk += specs
        return specs

    def components(
        self, new: VariablePlan, beside: VariableHandle | None
    ) -> list[VariableSpec]:
        """Returns the specs of the components of a new variable, with keys and
        servers."""
        where = self._placement.place(
            new.sizes, None if beside is None else beside.spec.ps
        )
        first = self._created + 1
        self._created += len(where)
        specs = [new.spec(n, first + n, ps) for n, ps in enumerate(where)]
        self._variables_at_risk += specs
        return specs

    def optimizer(self) -> int:
        """Returns the id of a new optimizer."""
        self._optimizers += 1
        self._optimizers_at_risk.append(self._optimizers)
        return self._optimizers

    def give_back(self, optimizer: int) -> None:
        """Frees the id of an optimizer that has no handle. The id stays taken if other
        optimizers were created since then."""
        # Only the last one: numbers are counted, and those after it would shift.
        if optimizer == self._optimizers:
            self._optimizers -= 1
            self._optimizers_at_risk.append(optimizer)

    def freed(self, variables: Sequence[VariableHandle]) -> None:
        """Subtracts deleted variables from the bytes of their ps. Their keys are never
        used again, as a handle may still exist."""
        for variable in variables:
            self._placement.free(variable.spec.ps, variable.spec.nbytes)
