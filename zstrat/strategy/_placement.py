"""Where new variables go, and how a handle reaches its value there.

`Placement` decides (no I/O): round robin over the parameter servers in the order of
creation, one counter per strategy, as TF does. `ServerVariables` carries it out: it is
the creator of the strategy's scope and the home of all that was created in it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol

from zstrat.errors import NotFoundError
from zstrat.program import dump_code
from zstrat.variables import Request, Variable, VariableSpec, handle, initialize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from zstrat.program import Plan
    from zstrat.variables import HomeRows, HomeUpdate, Optimizer
    from zstrat.wire import InitialEntry, UpdateOp

_colocated: Final[ContextVar[Variable | None]] = ContextVar(
    "zstrat_colocated", default=None
)
"""The variable that new ones are placed with, in ``colocate_vars_with``."""

_BLOCK_BITS: Final = 20
_BLOCKS: Final = 2**40


class ServerSession(Protocol):
    """What a strategy asks of the connection to its cluster. Every method blocks; the
    twins ``..._async`` may be awaited in any event loop."""

    @property
    def session(self) -> int:
        """A random number that tells this session from every other one."""
        ...

    def create_variables(
        self, variables: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> None: ...

    def delete_variables(self, specs: Sequence[VariableSpec]) -> None: ...

    def create_optimizer(self, optimizer: int, name: str, code: bytes) -> None: ...

    def read(self, specs: Sequence[VariableSpec]) -> list[np.ndarray]: ...

    async def read_async(self, specs: Sequence[VariableSpec]) -> list[np.ndarray]: ...

    def update(
        self,
        spec: VariableSpec,
        op: UpdateOp,
        optimizer: int,
        arrays: Sequence[np.ndarray],
    ) -> None: ...

    async def update_async(
        self,
        spec: VariableSpec,
        op: UpdateOp,
        optimizer: int,
        arrays: Sequence[np.ndarray],
    ) -> None: ...

    def initialize_variables(
        self, entries: Sequence[tuple[VariableSpec, InitialEntry]], code: bytes
    ) -> None:
        """Creates variables whose values their ps make, with one shipped initializer
        for all of them."""
        ...

    def read_rows(
        self, parts: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> list[np.ndarray]:
        """Rows ``[n, ...]`` of variables by indices ``[n]``. One request per ps."""
        ...

    async def read_rows_async(
        self, parts: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> list[np.ndarray]: ...

    def update_many(
        self,
        updates: Sequence[tuple[VariableSpec, UpdateOp, int, Sequence[np.ndarray]]],
    ) -> None:
        """Updates as in `update`, by one request per ps."""
        ...

    async def update_many_async(
        self,
        updates: Sequence[tuple[VariableSpec, UpdateOp, int, Sequence[np.ndarray]]],
    ) -> None: ...


class Placement:
    """Decides on which ps the next variable lives."""

    def __init__(self, ps_count: int) -> None:
        self._ps_count = ps_count
        self._placed = 0

    def place(self, count: int, beside: int | None = None) -> list[int]:
        """Task indices for ``count`` new variables. ``beside`` puts all of them there
        and leaves the turn of the others as it is."""
        if beside is not None:
            return [beside] * count
        first = self._placed
        self._placed += count
        return [(first + i) % self._ps_count for i in range(count)]


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
    ) -> None:
        self._session = session
        self._placement = Placement(ps_count)
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
        specs = (*plan.reads, *(update.spec for update in plan.updates))
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

    @contextlib.contextmanager
    def colocated(self, variable: Variable) -> Iterator[None]:
        """New variables go where that one is."""
        before = _colocated.get()
        _colocated.set(variable)
        try:
            yield
        finally:
            _colocated.set(before)

    # ---- the creator of a scope ----------------------------------------------------

    def create_variables(self, requests: Sequence[Request]) -> list[Variable]:
        """New variables, in one round trip per ps.

        Raises:
            ValueError: A request has no initial value, or the partitioner's answer is
                none.
            NotImplementedError: The partitioner asks for several parts.
            PSUnavailableError: A ps is gone.
        """
        arrays = [initialize(request) for request in requests]
        beside = _colocated.get()
        if beside is None:
            for request, array in zip(requests, arrays, strict=True):
                self._check_whole(request.name, array)
        with self._lock:
            where = self._placement.place(
                len(requests), None if beside is None else beside.spec.ps
            )
            specs = [
                self._spec(*new) for new in zip(requests, arrays, where, strict=True)
            ]
            self._session.create_variables(list(zip(specs, arrays, strict=True)))
        return [handle(spec, self) for spec in specs]

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
        if variables:
            self._session.delete_variables([each.spec for each in variables])

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

    def _spec(self, request: Request, array: np.ndarray, ps: int) -> VariableSpec:
        self._created += 1
        return VariableSpec(
            self._created,
            request.name,
            array.shape,
            array.dtype.name,
            ps,
            request.trainable,
            request.aggregation,
            request.synchronization,
        )

    def _check_whole(self, name: str, array: np.ndarray) -> None:
        if self._partitioner is None or not array.shape:
            return
        given = self._partitioner(shape=array.shape, dtype=array.dtype)
        parts = min(_first_axis(given, name, array.shape), array.shape[0])
        if parts > 1:
            raise NotImplementedError(
                f"variable_partitioner wants variable {name!r} of shape {array.shape} "
                f"in {parts} parts, and this version keeps every variable whole on one "
                "ps: leave the partitioner out, or let it return 1 for this shape"
            )


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


def _first_axis(parts: Any, name: str, shape: tuple[int, ...]) -> int:
    """How many parts along the first axis; TF's checks of a partitioner's answer."""
    right = (
        isinstance(parts, list | tuple)
        and len(parts) == len(shape)
        and parts[0] > 0
        and math.prod(parts[1:]) == 1
    )
    if not right:
        raise ValueError(
            f"variable_partitioner must return a list of one positive number per axis "
            f"with 1 everywhere but for the first one; for variable {name!r} of shape "
            f"{shape} it returned {parts!r}"
        )
    return int(parts[0])
