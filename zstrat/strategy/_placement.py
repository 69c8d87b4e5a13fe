"""Where new variables go, and how a handle reaches its value there.

`Placement` decides (no I/O): round robin over the parameter servers in the order of
creation, one counter per strategy, as TF does, or by bytes. `ServerVariables` carries
it out: it is the creator of the strategy's scope and the home of all that was created
in it.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from zstrat.errors import NotFoundError
from zstrat.program import dump_code
from zstrat.variables import DeferredValue, Variable, VariableSpec, handle, joined

from ._drafts import draft

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import numpy as np

    from zstrat.program import Plan
    from zstrat.variables import (
        AbstractVariable,
        HomeRows,
        HomeUpdate,
        Optimizer,
        Request,
    )
    from zstrat.wire import InitialEntry, UpdateOp

    from ._drafts import Draft
    from ._server_session import ServerSession

_colocated: Final[ContextVar[Variable | None]] = ContextVar(
    "zstrat_colocated", default=None
)
"""The variable that new ones are placed with, in ``colocate_vars_with``."""

_BLOCK_BITS: Final = 20
_BLOCKS: Final = 2**40


class PlacementRule(enum.StrEnum):
    """Which ps a new component goes to."""

    ROUND_ROBIN = "round_robin"
    BYTES = "bytes"


class Placement:
    """Decides on which ps the next component lives."""

    def __init__(
        self, ps_count: int, rule: PlacementRule = PlacementRule.ROUND_ROBIN
    ) -> None:
        self._rule = rule
        self._placed = 0
        self._bytes = [0] * ps_count

    def place(self, sizes: Sequence[int], beside: int | None = None) -> list[int]:
        """Task indices for new components of these bytes: in turn, or each to the ps
        with the fewest bytes, the first of several. ``beside`` puts all of them there
        and leaves the turn of the others as it is."""
        where = []
        for size in sizes:
            ps = self._next() if beside is None else beside
            self._bytes[ps] += size
            where.append(ps)
        return where

    def free(self, ps: int, size: int) -> None:
        """A component of that many bytes is gone."""
        self._bytes[ps] -= size

    def _next(self) -> int:
        if self._rule is PlacementRule.BYTES:
            return min(range(len(self._bytes)), key=self._bytes.__getitem__)
        ps = self._placed % len(self._bytes)
        self._placed += 1
        return ps


class ServerVariables:
    """Creates variables and optimizers on the parameter servers, and reads and updates
    them from outside of steps.

    Calls from several threads are safe; creations happen one after the other.
    """

    def __init__(
        self,
        session: ServerSession,
        ps_count: int,
        partitioner: Callable[..., Any] | None = None,
        rule: PlacementRule = PlacementRule.ROUND_ROBIN,
    ) -> None:
        self._session = session
        self._placement = Placement(ps_count, rule)
        self._partitioner = partitioner
        self._first = first_number(session.session)
        self._created = self._first
        self._optimizers = self._first
        # Keys are taken in the order of placement.
        self._lock = threading.Lock()

    @property
    def session(self) -> ServerSession:
        """The connection to the parameter servers."""
        return self._session

    def owns(self, variable: Variable) -> bool:
        """Whether the variable was created here."""
        return variable.home is self

    def require_known(self, plan: Plan) -> None:
        """Refuses a step that uses what was created for another connection.

        Raises:
            NotFoundError: Names the variables and optimizers.
        """
        specs = plan.specs
        strangers = [
            f"{spec} (key {spec.key})"
            for spec in specs
            if not self._first < spec.key <= self._created
        ]
        strangers += [
            repr(optimizer)
            for _, optimizer in plan.targets
            if optimizer is not None
            and not self._first < optimizer.id <= self._optimizers
        ]
        if strangers:
            raise NotFoundError(
                f"the step function {plan.function!r} uses "
                f"{', '.join(dict.fromkeys(strangers))}, created in another session: "
                "what is created in a strategy's scope ends with that strategy. Create "
                "it again in the scope of this one, and define the step function anew"
            )

    def colocated(self, variable: AbstractVariable) -> AbstractContextManager[None]:
        """New variables go where that one is, which was created here.

        Raises:
            ValueError: It is on several ps.
        """
        if not isinstance(variable, Variable):
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable that is on one "
                f"ps: give a component of {variable!r}, as .variables[0]"
            )
        return _beside(variable)

    # ---- the creator of a scope ----------------------------------------------------

    def create_variables(self, requests: Sequence[Request]) -> list[AbstractVariable]:
        """New variables, in one round trip per ps for all values that are made here,
        and one for each initializer that runs there.

        Raises:
            ValueError: A request has no initial value, or the partitioner's answer is
                none.
            PSUnavailableError: A ps is gone.
        """
        beside = _colocated.get()
        partitioner = self._partitioner if beside is None else None
        drafts = [draft(request, partitioner) for request in requests]
        with self._lock:
            specs = [self._specs(each, beside) for each in drafts]
            try:
                self._make(drafts, specs)
            except BaseException:
                for spec in itertools.chain(*specs):
                    self._placement.free(spec.ps, spec.nbytes)
                raise
        return [self._made(*new) for new in zip(drafts, specs, strict=True)]

    def delete_variables(self, variables: Sequence[Variable]) -> None:
        """Frees variables that were created here, in one round trip per ps.

        Raises:
            ValueError: One was created elsewhere; nothing is deleted.
            NotFoundError: One was deleted before; nothing is deleted on its ps.
            PSUnavailableError: A ps is gone.
        """
        for variable in variables:
            if not self.owns(variable):
                raise ValueError(
                    f"variable {variable.name!r} was not created in the scope of this "
                    "strategy, which deletes only its own"
                )
        if not variables:
            return
        self._session.delete_variables([each.spec for each in variables])
        with self._lock:
            for variable in variables:
                self._placement.free(variable.spec.ps, variable.spec.nbytes)

    def register_optimizer(self, optimizer: Optimizer) -> int:
        """Ships the transformation to every ps, which tries it there.

        Raises:
            InvalidArgumentError: A ps refuses it; says why.
            PSUnavailableError: A ps is gone.
        """
        code = dump_code(optimizer.transformation)
        with self._lock:
            self._optimizers += 1
            number = self._optimizers
            self._session.create_optimizer(number, optimizer.name, code)
        return number

    # ---- the home of the variables ---------------------------------------------------

    def read(self, variable: Variable) -> np.ndarray:
        return self._session.read([variable.spec])[0]

    def read_many(self, variables: Sequence[Variable]) -> list[np.ndarray]:
        return self._session.read([variable.spec for variable in variables])

    async def read_async(self, variable: Variable) -> np.ndarray:
        return (await self._session.read_async([variable.spec]))[0]

    async def read_many_async(self, variables: Sequence[Variable]) -> list[np.ndarray]:
        return await self._session.read_async([variable.spec for variable in variables])

    def read_rows(self, parts: Sequence[HomeRows]) -> list[np.ndarray]:
        return self._session.read_rows([(v.spec, indices) for v, indices in parts])

    async def read_rows_async(self, parts: Sequence[HomeRows]) -> list[np.ndarray]:
        wanted = [(variable.spec, indices) for variable, indices in parts]
        return await self._session.read_rows_async(wanted)

    def update_many(self, updates: Sequence[HomeUpdate]) -> None:
        self._session.update_many([_sent(*update) for update in updates])

    async def update_many_async(self, updates: Sequence[HomeUpdate]) -> None:
        await self._session.update_many_async([_sent(*update) for update in updates])

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: tuple[np.ndarray, ...],
        optimizer: Optimizer | None,
    ) -> None:
        number = 0 if optimizer is None else optimizer.id
        self._session.update(variable.spec, op, number, operands)

    async def update_async(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: tuple[np.ndarray, ...],
        optimizer: Optimizer | None,
    ) -> None:
        number = 0 if optimizer is None else optimizer.id
        await self._session.update_async(variable.spec, op, number, operands)

    def _specs(self, new: Draft, beside: Variable | None) -> list[VariableSpec]:
        """The components of a new variable, with keys and places."""
        where = self._placement.place(
            new.sizes, None if beside is None else beside.spec.ps
        )
        first = self._created + 1
        self._created += len(where)
        return [new.spec(n, first + n, ps) for n, ps in enumerate(where)]

    def _make(
        self, drafts: Sequence[Draft], specs: Sequence[list[VariableSpec]]
    ) -> None:
        """Creates the components on their ps."""
        arrays: list[tuple[VariableSpec, np.ndarray]] = []
        entries: dict[bytes, list[tuple[VariableSpec, InitialEntry]]] = {}
        for new, parts in zip(drafts, specs, strict=True):
            if isinstance(new.value, DeferredValue):
                code = dump_code(new.value.initializer)
                described = [(spec, new.entry(spec)) for spec in parts]
                entries.setdefault(code, []).extend(described)
            else:
                arrays += [(spec, new.array(spec)) for spec in parts]
        if arrays:
            self._session.create_variables(arrays)
        for code, described in entries.items():
            self._session.initialize_variables(described, code)

    def _made(self, new: Draft, specs: list[VariableSpec]) -> AbstractVariable:
        parts = [handle(spec, self) for spec in specs]
        return parts[0] if new.offsets is None else joined(parts, new.request.name)


@contextlib.contextmanager
def _beside(variable: Variable) -> Iterator[None]:
    before = _colocated.get()
    _colocated.set(variable)
    try:
        yield
    finally:
        _colocated.set(before)


def _sent(
    variable: Variable,
    op: UpdateOp,
    operands: tuple[np.ndarray, ...],
    optimizer: Optimizer | None,
) -> tuple[VariableSpec, UpdateOp, int, tuple[np.ndarray, ...]]:
    return variable.spec, op, 0 if optimizer is None else optimizer.id, operands


def first_number(session: int) -> int:
    """What the keys and optimizer ids of a session are counted from.

    A handle that outlives its session must not name a variable of the next one by
    chance. Below 2**60, which fits the 63 bits of a signed integer on the wire.
    """
    return session % _BLOCKS << _BLOCK_BITS
