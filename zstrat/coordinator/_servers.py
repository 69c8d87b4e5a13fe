"""`ParameterServers`: requests of a program to its parameter servers, as coroutines.

Translates variable specs, which name the server of a variable, to requests. The law of
this file: no request is sent while a parameter server is lost, as a part of the model
is missing; the request fails, or waits until the server is restored (`recovery/`).

`session_of` asks a parameter server for the session that another program opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections import Counter
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, final

import numpy as np

from zstrat.errors import AlreadyExistsError, DeadlineExceededError
from zstrat.ps import PsUpdate, Ref, RowsRef
from zstrat.wire import (
    DTYPES,
    Awaited,
    AwaitedOptimizer,
    JoinSession,
    SessionOpened,
    StoreEntry,
    UpdateOp,
)

from ._calls import Code
from .connecting import ProbedTask
from .recovery import entry_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

    from zstrat.ps import PsClient
    from zstrat.transport import MakeTaskLink
    from zstrat.variables import Rounds, VariableSpec
    from zstrat.wire import InitialEntry, TableEntry

    from ._cluster import Cluster
    from .recovery import Inventory

SpecUpdate = tuple["VariableSpec", UpdateOp, int, "Sequence[np.ndarray]"]
"""A variable, the operation, the number of the optimizer (0: none) and the operands."""

ANSWER_SECONDS: Final = 5.0
"""Seconds, beyond the timeout, for a server to answer that the awaited variables were
not created."""

_AWAITED: Final = 512
"""The most variables that one message waits for: their names easily fit the header."""

_RATE: Final = 32 * 2**20
"""The least bytes per second with which an initializer fills a variable: numpy draws
ten times as many normal numbers on a slow core."""

_PIECE: Final = 4 * 2**20
"""Bytes of an optimizer slot that one message reads."""


P = ParamSpec("P")
T = TypeVar("T")


def repeated(
    method: Callable[Concatenate[ParameterServers, P], Awaitable[T]],
) -> Callable[Concatenate[ParameterServers, P], Coroutine[Any, Any, T]]:
    """Decorates an idempotent request: repeats it when lost servers have returned."""

    @wraps(method)
    async def repeat(self: ParameterServers, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._cluster.through(partial(method, self, *args, **kwargs))

    return repeat


@final
class ParameterServers:
    """Requests to the parameter servers of one session.

    In a session that another program opened, the methods that create variables and
    optimizers wait ``timeout`` seconds for that program to create them.

    All methods raise `PSUnavailableError` while a parameter server is lost, and the
    errors of the servers.

    Cancellation, all methods: requests that were sent are carried out.
    """

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self._cluster: Final = cluster
        self._timeout: Final = timeout

    @property
    def _inventory(self) -> Inventory | None:
        """Records what the servers hold, for restores; None without restores."""
        recovery = self._cluster.recovery
        return None if recovery is None else recovery.inventory

    @property
    def client(self) -> PsClient:
        """The client of the session's parameter servers.

        Raises:
            PSUnavailableError: A parameter server is lost, with its variables.
        """
        if (outage := self._cluster.outage_error) is not None:
            raise outage
        return self._cluster.client

    @repeated
    async def create_variables(
        self, variables: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> None:
        """Creates variables with these values, on the servers that their specs name."""
        if self._cluster.options.joins:
            await self._wait_for([spec for spec, _ in variables], [], self._timeout)
            return
        with self._explain_resume():
            await self.client.create(
                [(spec.ps, entry_of(spec), array) for spec, array in variables]
            )
        self._created([spec for spec, _ in variables])

    @repeated
    async def initialize_variables(
        self, entries: Sequence[tuple[VariableSpec, InitialEntry]], code: bytes
    ) -> None:
        """Creates variables with a pickled initializer, which the servers run, so that
        no value is sent.

        Raises:
            InvalidArgumentError: The initializer failed, or its result has another
                shape or dtype.
        """
        timeout = initializing_timeout(entries, self._timeout)
        if self._cluster.options.joins:
            await self._wait_for([spec for spec, _ in entries], [], timeout)
            return
        deadline = asyncio.get_running_loop().time() + timeout
        requests = [(spec.ps, entry) for spec, entry in entries]
        with self._explain_resume():
            await self.client.initialize(requests, code, deadline=deadline)
        self._created([spec for spec, _ in entries])

    @repeated
    async def create_tables(
        self, entries: Sequence[tuple[VariableSpec, TableEntry]], code: bytes
    ) -> None:
        """Creates parts of tables (which take any id), without rows, on the servers;
        ``code`` is the pickled initializer of rows."""
        if self._cluster.options.joins:
            await self._wait_for([spec for spec, _ in entries], [], self._timeout)
            return
        with self._explain_resume():
            requests = [(spec.ps, entry) for spec, entry in entries]
            await self.client.create_tables(requests, code)
        if self._inventory is not None:
            self._inventory.created_tables(entries, code)

    @repeated
    async def table_sizes(
        self, specs: Sequence[VariableSpec]
    ) -> list[tuple[int, int, int, int]]:
        """Returns four numbers for each part of a table: its rows, their bytes, its
        current cut (a number with which to ask later which rows have changed), and the
        ids that wait for a row."""
        return await self.client.table_sizes([Ref(s.ps, s.key) for s in specs])

    @repeated
    async def table_rows(
        self,
        spec: VariableSpec,
        first: int,
        last: int,
        since: int = -1,
        ids: Sequence[np.ndarray] = (),
    ) -> Sequence[np.ndarray]:
        """Returns ids ``[n]`` and rows ``[n, ...]`` of the buckets from ``first`` to
        before ``last`` of a part of a table; for ``since`` and ``ids`` see
        `PullTable`."""
        ref = Ref(spec.ps, spec.key)
        return await self.client.pull_table(ref, first, last, since, ids)

    async def keep_initial(self, specs: Sequence[VariableSpec]) -> None:
        """Stores here the initial values of new variables that cannot be saved; a
        restore gives the variables these values again."""
        if self._inventory is not None:
            values = await self.read(specs)
            self._inventory.note_initial(specs, values)

    async def delete_variables(self, specs: Sequence[VariableSpec]) -> None:
        """Deletes the variables."""

        async def delete() -> None:
            # Forgotten after the servers have: a restore in between creates it again,
            # and the request is repeated.
            await self.client.delete([Ref(spec.ps, spec.key) for spec in specs])
            if self._inventory is not None:
                self._inventory.deleted(specs)

        await self._cluster.through(delete, again=False)

    @repeated
    async def read(self, specs: Sequence[VariableSpec]) -> list[np.ndarray]:
        """Returns the values of variables in order, as read-only arrays. One request
        per server."""
        return await self.client.pull([Ref(spec.ps, spec.key) for spec in specs])

    @repeated
    async def read_rows(
        self, parts: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> list[np.ndarray]:
        """Returns rows ``[n, ...]`` for each of ``parts``, a variable and the indices
        ``[n]`` of its first axis. One request per server.

        Raises:
            InvalidArgumentError: An index is out of range; names it and the variable.
        """
        rows = [RowsRef(spec.ps, spec.key, indices) for spec, indices in parts]
        return await self.client.pull((), rows)

    async def update(self, updates: Sequence[SpecUpdate]) -> None:
        """Applies updates with one request per server, which applies all of its updates
        or none. Returns when every reader sees them.

        Raises:
            ValueError: The updates of a server do not fit one message.
        """
        pushed = [
            PsUpdate(spec.ps, spec.key, op, optimizer, tuple(arrays))
            for spec, op, optimizer, arrays in updates
        ]
        # Through the gate, as a checkpoint has each update whole or not at all.
        gate, recovery = self._cluster.pause.gate, self._cluster.recovery

        async def update() -> None:
            deadline = None
            if recovery is not None:
                # On a broken connection it waits as long as its server may be away.
                timeout = self._timeout + recovery.return_timeout
                deadline = asyncio.get_running_loop().time() + timeout
            await gate.through(lambda: self.client.update(pushed, deadline=deadline))

        # It is not idempotent by itself: only a restore undoes what it may have done.
        await self._cluster.through(update, again=False)

    @repeated
    async def create_optimizer(
        self, optimizer: int, name: str, code: bytes, rounds: Rounds | None = None
    ) -> None:
        """Creates the optimizer on all parameter servers."""
        if self._cluster.options.joins:
            await self._wait_for([], [AwaitedOptimizer(optimizer, name)], self._timeout)
            return
        with self._explain_resume():
            if rounds is None:
                self._cluster.rounds.rounds.require_rounds(optimizer, name)
            await self.client.create_optimizer(optimizer, name, code)
        if self._inventory is not None:
            self._inventory.registered(optimizer, name, code)
        if rounds is not None:
            self._cluster.rounds.add(optimizer, name, rounds, Code(code))

    @repeated
    async def read_slots(
        self, optimizer: int, specs: Sequence[VariableSpec]
    ) -> list[dict[str, np.ndarray]]:
        """Returns the optimizer's slots of each variable, by name of the slot, from one
        snapshot of each server."""
        # A random number names the snapshot.
        client, number = self.client, secrets.randbits(62)
        refs = [Ref(spec.ps, spec.key) for spec in specs]
        slots: dict[int, dict[str, np.ndarray]] = {spec.key: {} for spec in specs}
        try:
            for ps, place, entry in await client.pin(number, refs, [optimizer]):
                if entry.optimizer != optimizer:
                    continue
                dtype = DTYPES[entry.dtype]
                nbytes = math.prod(entry.shape) * dtype.itemsize
                # In pieces: one answer with all of it would hold up other requests for
                # long.
                parts = [
                    await client.read_snapshot(
                        ps, number, place, at, min(_PIECE, nbytes - at)
                    )
                    for at in range(0, nbytes, _PIECE)
                ]
                whole = np.concatenate(parts) if parts else np.empty(0, np.uint8)
                slots[entry.key][entry.leaf] = whole.view(dtype).reshape(entry.shape)
        finally:
            # In any case: a pin keeps old values in the servers' memory.
            await client.release(number)
        return [slots[spec.key] for spec in specs]

    @repeated
    async def write_slot(
        self, optimizer: int, spec: VariableSpec, name: str, value: np.ndarray
    ) -> None:
        """Assigns a value to an optimizer's slot of a variable."""
        entry = StoreEntry(spec.key, optimizer, name, 0)
        await self.client.store(spec.ps, [entry], [value])

    @repeated
    async def bind_optimizer(self, optimizer: int, data: bytes) -> None:
        """Binds an optimizer to its variables on all parameter servers. ``data`` is
        `zstrat.optimizers.Binding.encoded`. Idempotent. Every program that applies
        gradients calls this before its first gradient."""
        await self.client.bind(optimizer, data)
        if self._inventory is not None:
            self._inventory.bound(optimizer, data)

    @repeated
    async def withdraw(
        self, specs: Sequence[VariableSpec], optimizers: Sequence[int]
    ) -> None:
        """Removes the variables and optimizers that a failed creation left on the
        servers."""
        # In the session of another program, this one has created nothing.
        if not self._cluster.options.joins:
            refs = [Ref(spec.ps, spec.key) for spec in specs]
            await self.client.withdraw(refs, optimizers)
            if self._inventory is not None:
                self._inventory.deleted(specs)
                self._inventory.withdrawn(optimizers)

    @contextlib.contextmanager
    def _explain_resume(self) -> Iterator[None]:
        """Adds an explanation to errors for variables that a resumed session already
        has."""
        try:
            yield
        except AlreadyExistsError as error:
            if not self._cluster.renewal.resumed:
                raise
            raise AlreadyExistsError(
                f"{error}. The program before, with the session "
                f"{self._cluster.name!r}, created other variables or optimizers, or in "
                "another order. They stay as they are; to start without them, pass "
                "another name as resume=, or none"
            ) from None

    def _created(self, specs: Sequence[VariableSpec]) -> None:
        if self._inventory is not None:
            self._inventory.created(specs)

    async def _wait_for(
        self,
        specs: Sequence[VariableSpec],
        optimizers: list[AwaitedOptimizer],
        timeout: float,
    ) -> None:
        """Waits until the program that opened the session has created these variables
        and optimizers.

        Raises:
            DeadlineExceededError: Something was not created in time; names it.
            InvalidArgumentError: The program created something else in their place.
        """
        client, session = self.client, self._cluster.session
        awaited: dict[int, list[Awaited]] = {}
        if optimizers:  # which are on all servers
            awaited = {ps: [] for ps in range(client.count)}
        for spec in specs:
            variable = Awaited(spec.key, spec.name, spec.dtype, list(spec.shape))
            awaited.setdefault(spec.ps, []).append(variable)
        messages = [
            (ps, JoinSession(session, names[at : at + _AWAITED], optimizers, timeout))
            for ps, names in awaited.items()
            # At least one message to each server, for the optimizers.
            for at in range(0, len(names) or 1, _AWAITED)
        ]
        deadline = asyncio.get_running_loop().time() + timeout + ANSWER_SECONDS
        await client.each(messages, SessionOpened, deadline=deadline)


def initializing_timeout(
    entries: Sequence[tuple[VariableSpec, InitialEntry]], request: float
) -> float:
    """Returns the seconds within which servers initialize variables: ``request``, and
    time for the bytes of the busiest server."""
    nbytes: Counter[int] = Counter()
    for spec, _ in entries:
        nbytes[spec.ps] += spec.nbytes
    return request + max(nbytes.values(), default=0) / _RATE


async def session_of(make_link: MakeTaskLink, address: str, timeout: float) -> int:
    """Waits until a live program has a session on ps 0, and returns the number of that
    session; after ``timeout`` seconds that of a session whose program has ended.

    Raises:
        DeadlineExceededError: There was no session for ``timeout`` seconds.
        VersionMismatchError, PermissionDeniedError: The ps refuses this program.

    Cancellation: nothing is lost.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    server = ProbedTask("ps", 0, address, make_link)
    server.start()
    try:
        await server.wait_ready(deadline)
        # 0 asks for any session whose coordinator is alive.
        request = JoinSession(0, [], [], max(0.0, deadline - loop.time()))
        answer = await server.link.submit(request, deadline=deadline + ANSWER_SECONDS)
    except DeadlineExceededError as error:
        raise DeadlineExceededError(
            f"no program opened a session on the ps at {address} within {timeout} s: "
            "start the chief, or worker 0 of a cluster without a chief, which opens it "
            f"({error})"
        ) from None
    finally:
        await server.link.close()
    assert isinstance(answer, SessionOpened), answer
    return answer.session
