"""Variables on parameter servers (ps): creates them, and reads and updates them through
handles.

`ServerVariables` is the creator of variables for the strategy's scope, and the storage
of all these variables. `_variable_placement` decides on which server each variable is
stored, and its key.
"""

from __future__ import annotations

import contextlib
import threading
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from zstrat.errors import NotFoundError
from zstrat.program import PerWorkerVariable, dump_code
from zstrat.transport import warn_of_blocking
from zstrat.variables import (
    DeferredValue,
    StrategyCreator,
    Variable,
    VariableHandle,
    VariableSpec,
    admission,
    encoded,
    handle,
    hashed,
    joined,
)
from zstrat.wire import TableEntry, UpdateOp

from ._variable_placement import Numbers, PlacementRule, VariablePlacement, draft

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import numpy as np

    from zstrat.coordinator import ClusterSession
    from zstrat.program import Plan
    from zstrat.variables import (
        AbstractVariable,
        GradientCall,
        HashTable,
        OptimizerHandle,
        StorageRows,
        StorageUpdate,
        TableRequest,
        VariableRequest,
    )
    from zstrat.wire import InitialEntry

    from ._variable_placement import VariablePlan

_TWINS: Final = {
    UpdateOp.ASSIGN: "variable.assign_async(value)",
    UpdateOp.ADD: "variable.assign_add_async(delta)",
    UpdateOp.SUB: "variable.assign_sub_async(delta)",
    **dict.fromkeys(
        (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS, UpdateOp.OPERANDS),
        "optimizer.apply_gradients_async(grads_and_vars)",
    ),
}
"""For each update the method that does not block, for messages; `scatter_async` for
updates that are not listed."""

T = TypeVar("T")
_Request: TypeAlias = "tuple[Coroutine[Any, Any, T], str]"
"""The arguments of `ClusterSession.run` and `run_async`: the coroutine, and its
description."""

_colocated: Final[ContextVar[VariableHandle | None]] = ContextVar(
    "zstrat_colocated", default=None
)
"""The variable with which new variables are placed, in ``colocate_vars_with``."""


class ServerVariables(StrategyCreator):
    """Creates variables and optimizers on the parameter servers, and reads and updates
    them from outside of steps.

    Calls from several threads are safe; variables are created one after the other.
    """

    def __init__(
        self,
        session: ClusterSession,
        ps_count: int,
        partitioner: Callable[..., Any] | None = None,
        rule: PlacementRule = PlacementRule.ROUND_ROBIN,
        bind_workers: Callable[[str], int] | None = None,
    ) -> None:
        self._session, self._servers = session, session.servers
        self._ps_count = ps_count
        self._numbers = Numbers(session.origin, VariablePlacement(ps_count, rule))
        self._partitioner = partitioner
        self._bind_workers = bind_workers
        # Keys are taken in the order of placement.
        self._lock = threading.Lock()
        self._bound: set[tuple[int, bytes]] = set()
        """Trees of optimizers that the servers have received."""

    @property
    def session(self) -> ClusterSession:
        """The connection to the parameter servers."""
        return self._session

    def owns(self, variable: VariableHandle) -> bool:
        """Returns whether the variable was created by this object."""
        return variable.storage is self

    def require_known(self, plan: Plan) -> None:
        """Refuses a step whose plan uses variables or optimizers of another session.

        Raises:
            NotFoundError: There are such; the error names the variables and optimizers.
        """
        specs = plan.specs
        strangers = [
            f"{spec} (key {spec.key})"
            for spec in specs
            if spec.ps >= 0 and not self._numbers.has_variable(spec)
        ]
        strangers += [
            repr(optimizer)
            for _, optimizer in plan.targets
            if optimizer is not None and not self._numbers.has_optimizer(optimizer.id)
        ]
        if strangers:
            raise NotFoundError(
                f"the step function {plan.function!r} uses "
                f"{', '.join(dict.fromkeys(strangers))}, created in another session: "
                "what is created in a strategy's scope ends with that strategy. "
                "Create it again in the scope of this one, and define the step "
                "function again"
            )

    def colocated(self, variable: AbstractVariable) -> AbstractContextManager[None]:
        """Places variables that are created inside the context on the ps of the given
        one.

        Raises:
            ValueError: The given variable is on several ps.
        """
        if not isinstance(variable, Variable):
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable that is on one "
                f"ps: give a component of {variable!r}, as .variables[0]"
            )
        return _beside(variable)

    def create_variables(
        self, requests: Sequence[VariableRequest]
    ) -> list[AbstractVariable]:
        """Creates variables, with one round trip per ps for all values that this
        process makes, and one for each initializer that runs on the ps. If one variable
        cannot be created, none is, and later variables are numbered as if these had not
        been requested.

        Raises:
            ValueError: A request has no initial value, or the partitioner did not
                return a list of numbers.
            PSUnavailableError: A ps is gone.
        """
        beside = _colocated.get()
        # What is placed beside another variable stays whole, on its server.
        partitioner = self._partitioner if beside is None else None
        # Before the lock is taken: this calls the user's initializers.
        drafts = [draft(request, partitioner) for request in requests]
        with self._lock:
            # What failed before has to be gone, because its keys are taken again now.
            self._withdraw()
            with self._numbers.taking():
                specs = [self._numbers.components(each, beside) for each in drafts]
                self._make(drafts, specs)
        return [self._made(*new) for new in zip(drafts, specs, strict=True)]

    def create_per_worker(self, request: VariableRequest) -> PerWorkerVariable:
        """Creates a variable with a value for each worker, in one round trip per ps. An
        initial value that is a function is called for each worker.

        Raises:
            ValueError: The workers are separate programs without a coordinator; or as
                in `create_variables`.
            PSUnavailableError: A ps is gone.
        """
        if self._bind_workers is None:
            raise ValueError(
                f"variable {request.name!r}: per_worker_variable=True needs a "
                "coordinator, and here every worker runs the whole program: create a "
                "zs.Variable outside of the scope, which lives in this program alone"
            )
        workers = self._bind_workers(
            f"variable {request.name!r} (per_worker_variable=True) has a value for "
            "each worker that there was when it was created"
        )
        asked = [
            replace(request, name=f"{request.name}/worker_{number}", is_whole=True)
            for number in range(workers)
        ]
        made: list[Any] = self.create_variables(asked)
        # No checkpoint has them: without their first values a server that is filled
        # again would lack some.
        if self._session.recovers:
            work = self._servers.keep_initial(_specs(made))
            self._session.run(work, "reading first values")
        return PerWorkerVariable(request.name, made)

    def create_table(self, request: TableRequest) -> HashTable:
        """Creates a `HashTable`, with a part on each ps, in one round trip.

        Raises:
            InvalidArgumentError: A ps cannot load the initializer; the error says why.
            PSUnavailableError: A ps is gone.
        """
        code = dump_code(request.initializer)
        with self._lock:
            self._withdraw()
            with self._numbers.taking():
                specs = self._numbers.parts(request, self._ps_count)
                entries = [(spec, _table_entry(spec, request)) for spec in specs]
                work = self._servers.create_tables(entries, code)
                self._session.run(work, "creating a table")
        parts = [handle(spec, self) for spec in specs]
        rules = request.admission, request.eviction, request.follows
        return hashed(parts, request.name, *rules)

    def table_sizes(
        self, parts: Sequence[VariableHandle]
    ) -> list[tuple[int, int, int, int]]:
        """Returns, for each part of a table, its number of rows, its bytes, its present
        cut (position in the sequence of changes), and the number of ids that are
        counted but have no row yet."""
        work = self._servers.table_sizes(_specs(parts))
        return self._session.run(work, "asking how large a table is")

    def table_rows(
        self,
        part: VariableHandle,
        first: int,
        last: int,
        since: int = -1,
        ids: Sequence[np.ndarray] = (),
    ) -> Sequence[np.ndarray]:
        """Reads ids ``[n]`` and rows ``[n, ...]`` of some buckets of a table's part;
        for ``since`` and ``ids`` see `PullTable`."""
        work = self._servers.table_rows(part.spec, first, last, since, ids)
        return self._session.run(work, "reading rows of a table")

    def delete_variables(self, variables: Sequence[VariableHandle]) -> None:
        """Frees variables that this object created, in one round trip per ps.

        Raises:
            ValueError: A variable was created elsewhere; nothing is deleted.
            NotFoundError: A variable was deleted before; nothing is deleted on its ps.
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
        work = self._servers.delete_variables(_specs(variables))
        self._session.run(work, "deleting variables")
        # Only what the servers have deleted makes room for the next one.
        with self._lock:
            self._numbers.freed(variables)

    def register_optimizer(self, optimizer: OptimizerHandle) -> int:
        """Sends the optimizer's transformation to every ps, which checks that it can
        run; returns the id of the optimizer.

        Raises:
            InvalidArgumentError: A ps refuses the transformation; the error says why.
            PSUnavailableError: A ps is gone.
        """
        rounds, code = optimizer.rounds, dump_code(optimizer.transformation)
        if optimizer.wire is not None and self._bind_workers is None:
            raise ValueError(
                f"optimizer {optimizer.name!r} has wire={optimizer.wire!r}, for "
                "gradients of scheduled steps, and here every worker runs the whole "
                "program and sends its gradients as they are: leave out wire=, or "
                "schedule steps with a zs.ParameterServerStrategy and a "
                "zs.ClusterCoordinator"
            )
        if rounds is not None and self._bind_workers is None:
            raise ValueError(
                f"optimizer {optimizer.name!r} has rounds, which a coordinator closes, "
                "and here every worker runs the whole program: leave out rounds=, or "
                "schedule steps with a zs.ParameterServerStrategy and a "
                "zs.ClusterCoordinator"
            )
        if rounds is not None and (ahead := self._session.cluster.options.prefetch):
            raise ValueError(
                f"optimizer {optimizer.name!r} has rounds, whose steps read the values "
                f"of the round before, but prefetch={ahead} has workers read them "
                "earlier: make the strategy with prefetch=0"
            )
        with self._lock:
            self._withdraw()
            with self._numbers.taking():
                number = self._numbers.optimizer()
                work = self._servers.create_optimizer(
                    number, optimizer.name, code, rounds
                )
                self._session.run(work, "creating an optimizer")
        return number

    def forget_optimizer(self, optimizer: int) -> None:
        """Frees the id of an optimizer whose constructor failed, so that no handle of
        it exists."""
        self._session.forget_rounds(optimizer)
        with self._lock:
            self._numbers.give_back(optimizer)

    # Each request is made once, as a coroutine of the session's loop with the words for
    # it, and then either blocked upon or awaited.

    def read(self, variable: VariableHandle) -> np.ndarray:
        warn_of_blocking("variable.read_value_async()")
        return self._session.run(*self._reading([variable]))[0]

    def read_many(self, variables: Sequence[VariableHandle]) -> list[np.ndarray]:
        warn_of_blocking("variable.read_value_async()")
        return self._session.run(*self._reading(variables))

    async def read_many_async(
        self, variables: Sequence[VariableHandle]
    ) -> list[np.ndarray]:
        return await self._session.run_async(*self._reading(variables))

    def read_rows(self, parts: Sequence[StorageRows]) -> list[np.ndarray]:
        warn_of_blocking("variable.sparse_read_async(indices)")
        return self._session.run(*self._reading_rows(parts))

    async def read_rows_async(self, parts: Sequence[StorageRows]) -> list[np.ndarray]:
        return await self._session.run_async(*self._reading_rows(parts))

    def update_many(self, updates: Sequence[StorageUpdate]) -> None:
        warn_of_blocking(
            _TWINS.get(updates[0][1], "variable.scatter_async(op, sparse_delta)")
        )
        self._session.run(*self._updating(updates))

    async def update_many_async(self, updates: Sequence[StorageUpdate]) -> None:
        await self._session.run_async(*self._updating(updates))

    def bind(self, call: GradientCall) -> None:
        """Sends the tree of variables of an optimizer to the parameter servers, once
        for each tree.

        Raises:
            ValueError: The tree cannot be sent, or a server refuses it; the error says
                why.
            PSUnavailableError: A ps is gone.
        """
        tree = call.optimizer.id, encoded(call)
        if tree not in self._bound:
            # Two threads may send the same tree: a server takes it as one.
            self._session.run(*self._binding(*tree))
            self._bound.add(tree)

    async def bind_async(self, call: GradientCall) -> None:
        """Sends the tree of an optimizer like `bind`, without blocking the running
        loop.

        Cancellation: some servers may have received the tree.
        """
        tree = call.optimizer.id, encoded(call)
        if tree not in self._bound:
            await self._session.run_async(*self._binding(*tree))
            self._bound.add(tree)

    def read_slots(
        self, optimizer: OptimizerHandle, variables: Sequence[VariableHandle]
    ) -> list[Mapping[str, np.ndarray]]:
        """Reads the slots, arrays that an optimizer keeps for variables, by name.

        Raises:
            PSUnavailableError: A ps is gone.
        """
        work = self._servers.read_slots(optimizer.id, _specs(variables))
        return list(self._session.run(work, "reading the state of an optimizer"))

    def write_slot(
        self,
        optimizer: OptimizerHandle,
        variable: VariableHandle,
        name: str,
        value: np.ndarray,
    ) -> None:
        """Assigns a slot, an array that an optimizer keeps for a variable.

        Raises:
            NotFoundError: There is no slot of that name.
            PSUnavailableError: A ps is gone.
        """
        work = self._servers.write_slot(optimizer.id, variable.spec, name, value)
        self._session.run(work, "assigning to the state of an optimizer")

    def _reading(
        self, variables: Sequence[VariableHandle]
    ) -> _Request[list[np.ndarray]]:
        return self._servers.read(_specs(variables)), "reading variables"

    def _reading_rows(self, parts: Sequence[StorageRows]) -> _Request[list[np.ndarray]]:
        wanted = [(variable.spec, indices) for variable, indices in parts]
        return self._servers.read_rows(wanted), "reading rows"

    def _updating(self, updates: Sequence[StorageUpdate]) -> _Request[None]:
        sent = [
            (variable.spec, op, 0 if optimizer is None else optimizer.id, operands)
            for variable, op, operands, optimizer in updates
        ]
        return self._servers.update(sent), "updating variables"

    def _binding(self, optimizer: int, tree: bytes) -> _Request[None]:
        work = self._servers.bind_optimizer(optimizer, tree)
        return work, "sending the tree of an optimizer"

    def _withdraw(self) -> None:
        """Removes from the ps what a failed creation left there, before its keys are
        used again."""
        specs, optimizers = self._numbers.doubtful
        if specs or optimizers:
            work = self._servers.withdraw(specs, optimizers)
            self._session.run(work, "removing what a failed creation has left")
            self._numbers.settled()

    def _make(
        self, drafts: Sequence[VariablePlan], specs: Sequence[list[VariableSpec]]
    ) -> None:
        """Creates components, whose values or initializers are in ``drafts``, on their
        ps."""
        arrays: list[tuple[VariableSpec, np.ndarray]] = []
        entries: dict[bytes, list[tuple[VariableSpec, InitialEntry]]] = {}
        for new, parts in zip(drafts, specs, strict=True):
            if isinstance(new.value, DeferredValue):
                # Those of one initializer go together: its code is sent once.
                code = dump_code(new.value.initializer)
                described = [(spec, new.entry(spec)) for spec in parts]
                entries.setdefault(code, []).extend(described)
            else:
                arrays += [(spec, new.array(spec)) for spec in parts]
        if arrays:
            work = self._servers.create_variables(arrays)
            self._session.run(work, "creating variables")
        for code, described in entries.items():
            work = self._servers.initialize_variables(described, code)
            self._session.run(work, "initializing variables")

    def _made(self, new: VariablePlan, specs: list[VariableSpec]) -> AbstractVariable:
        parts = [handle(spec, self) for spec in specs]
        return parts[0] if new.offsets is None else joined(parts, new.request.name)


@contextlib.contextmanager
def _beside(variable: VariableHandle) -> Iterator[None]:
    before = _colocated.get()
    _colocated.set(variable)
    try:
        yield
    finally:
        _colocated.set(before)


def _table_entry(spec: VariableSpec, request: TableRequest) -> TableEntry:
    rule = request.admission or admission.Admission()
    return TableEntry(
        spec.key,
        spec.name,
        spec.trainable,
        spec.dtype,
        list(request.row),
        request.seed,
        rule.gradients,
        rule.chance,
        request.eviction is not None and request.eviction.tracks,
        request.follows,
        rule.sketch,
    )


def _specs(variables: Sequence[VariableHandle]) -> list[VariableSpec]:
    return [variable.spec for variable in variables]
