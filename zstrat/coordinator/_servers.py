"""What a program asks of its parameter servers, as coroutines on the cluster's loop.

The translation from specs to requests, in one place: a spec says where a variable is.
Law of the file: nothing is asked once a parameter server of the session is lost, as a
part of the model is gone then; or it is asked when that was filled again (`recovery/`).

A program that joins asks a parameter server for the session that another one holds.
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

from .connecting import ProbedTask
from .recovery import entry_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

    from zstrat.ps import PsClient
    from zstrat.transport import MakeTaskLink
    from zstrat.variables import VariableSpec
    from zstrat.wire import InitialEntry

    from ._cluster import Cluster
    from .recovery import Inventory, Recovery
    from .replication import Replication

SpecUpdate = tuple["VariableSpec", UpdateOp, int, "Sequence[np.ndarray]"]
"""A variable, what is done to it, the optimizer (0 for none) and the operands."""

ANSWER_SECONDS: Final = 5.0
"""Seconds that a server has to say that what it was asked to wait for did not come."""

_WISHES: Final = 512
"""Variables that one message waits for: their names fit the header by far."""

_RATE: Final = 32 * 2**20
"""Bytes per second that a parameter server fills by an initializer at the least: numpy
draws ten times as many normal numbers on a slow core."""

_PIECE: Final = 4 * 2**20
"""Bytes of a slot that are read with one message."""


P = ParamSpec("P")
T = TypeVar("T")


def steady(
    method: Callable[Concatenate[ParameterServers, P], Awaitable[T]],
) -> Callable[Concatenate[ParameterServers, P], Coroutine[Any, Any, T]]:
    """Repeats a request, which may be made twice, when lost servers are back."""

    @wraps(method)
    async def asked(self: ParameterServers, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.patient is None:
            return await method(self, *args, **kwargs)
        return await self.patient.through(partial(method, self, *args, **kwargs))

    return asked


@final
class ParameterServers:
    """All methods raise what a lost parameter server raises, and what the servers say.

    Where another program holds the session, what is to be created is waited for, for
    ``timeout`` seconds.

    Cancellation, all methods: what was sent is carried out.
    """

    def __init__(self, cluster: Cluster, timeout: float) -> None:
        self._cluster: Final = cluster
        self._timeout: Final = timeout

    @property
    def patient(self) -> Recovery | Replication | None:
        """Repeats requests when lost servers are back; None: nothing does."""
        return self._cluster.recovery or self._cluster.replication

    @property
    def _inventory(self) -> Inventory | None:
        """Notes what the servers have, for a recovery; None if there will be none."""
        recovery = self._cluster.recovery
        return None if recovery is None else recovery.inventory

    @property
    def client(self) -> PsClient:
        """The client of the session, unless a parameter server is lost.

        Raises:
            PSUnavailableError: One is; the variables that it held are gone.
        """
        if (outage := self._cluster.outage_error) is not None:
            raise outage
        return self._cluster.client

    @steady
    async def create_variables(
        self, variables: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> None:
        """Creates the variables with these values, where their specs say."""
        if self._cluster.options.joins:
            await self._wait_for([spec for spec, _ in variables], [], self._timeout)
            return
        with self._told_of_resuming():
            await self.client.create(
                [(spec.ps, entry_of(spec), array) for spec, array in variables]
            )
        self._created([spec for spec, _ in variables])

    @steady
    async def initialize_variables(
        self, entries: Sequence[tuple[VariableSpec, InitialEntry]], code: bytes
    ) -> None:
        """Has the servers make the variables, where their specs say, by one shipped
        initializer; no value travels.

        Raises:
            InvalidArgumentError: The initializer failed there, or its result has
                another shape or dtype.
        """
        timeout = initializing_timeout(entries, self._timeout)
        if self._cluster.options.joins:
            await self._wait_for([spec for spec, _ in entries], [], timeout)
            return
        deadline = asyncio.get_running_loop().time() + timeout
        places = [(spec.ps, entry) for spec, entry in entries]
        with self._told_of_resuming():
            await self.client.initialize(places, code, deadline=deadline)
        self._created([spec for spec, _ in entries])

    async def keep_initial(self, specs: Sequence[VariableSpec]) -> None:
        """These variables were created just now, and cannot be saved: they begin anew
        when a lost server is filled again."""
        if self._inventory is not None:
            values = await self.read(specs)
            self._inventory.note_initial(specs, values)

    async def delete_variables(self, specs: Sequence[VariableSpec]) -> None:
        """Frees the variables."""

        async def delete() -> None:
            await self.client.delete([Ref(spec.ps, spec.key) for spec in specs])
            if self._inventory is not None:
                self._inventory.deleted(specs)

        await self._once(delete)

    @steady
    async def read(self, specs: Sequence[VariableSpec]) -> list[np.ndarray]:
        """The values, in order; read-only arrays. One request per server."""
        return await self.client.pull([Ref(spec.ps, spec.key) for spec in specs])

    @steady
    async def read_rows(
        self, parts: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> list[np.ndarray]:
        """Rows of variables, ``[n, ...]`` for each of ``parts``: a variable and the
        indices ``[n]`` of its first axis. One request per server.

        Raises:
            InvalidArgumentError: A row is not there; names the variable and the index.
        """
        rows = [RowsRef(spec.ps, spec.key, indices) for spec, indices in parts]
        return await self.client.pull((), rows)

    async def update(self, updates: Sequence[SpecUpdate]) -> None:
        """Applies updates, in one request per server: on each server all of its own, or
        none. Ends when every reader sees them.

        Raises:
            ValueError: The updates of one server do not fit one message.
        """
        pushed = [
            PsUpdate(spec.ps, spec.key, op, optimizer, tuple(arrays))
            for spec, op, optimizer, arrays in updates
        ]
        gate, recovery = self._cluster.pause.gate, self._cluster.recovery
        if recovery is None:
            await gate.through(lambda: self.client.update(pushed))
            return

        async def update() -> None:
            # Over a line that is cut it waits for as long as its server may be away.
            waits = self._timeout + recovery.return_timeout
            deadline = asyncio.get_running_loop().time() + waits
            await gate.through(lambda: self.client.update(pushed, deadline=deadline))

        await recovery.through(update, again=False)

    @steady
    async def create_optimizer(self, optimizer: int, name: str, code: bytes) -> None:
        """Gives the optimizer to all parameter servers."""
        if self._cluster.options.joins:
            await self._wait_for([], [AwaitedOptimizer(optimizer, name)], self._timeout)
            return
        with self._told_of_resuming():
            await self.client.create_optimizer(optimizer, name, code)
        if self._inventory is not None:
            self._inventory.registered(optimizer, name, code)

    @steady
    async def read_slots(
        self, optimizer: int, specs: Sequence[VariableSpec]
    ) -> list[dict[str, np.ndarray]]:
        """What an optimizer keeps beside variables, by name, of one moment of each
        server."""
        # The pin is known by a number that nobody else draws.
        client, number = self.client, secrets.randbits(62)
        refs = [Ref(spec.ps, spec.key) for spec in specs]
        found: dict[int, dict[str, np.ndarray]] = {spec.key: {} for spec in specs}
        try:
            for ps, place, entry in await client.pin(number, refs, [optimizer]):
                if entry.optimizer != optimizer:
                    continue
                dtype = DTYPES[entry.dtype]
                nbytes = math.prod(entry.shape) * dtype.itemsize
                parts = [
                    await client.read_snapshot(ps, number, place, at, size)
                    for at, size in _pieces(nbytes)
                ]
                whole = np.concatenate(parts) if parts else np.empty(0, np.uint8)
                found[entry.key][entry.leaf] = whole.view(dtype).reshape(entry.shape)
        finally:
            await client.release(number)
        return [found[spec.key] for spec in specs]

    @steady
    async def write_slot(
        self, optimizer: int, spec: VariableSpec, name: str, value: np.ndarray
    ) -> None:
        """Assigns one array that an optimizer keeps beside a variable."""
        entry = StoreEntry(spec.key, optimizer, name, 0)
        await self.client.store(spec.ps, [entry], [value])

    @steady
    async def bind_optimizer(self, optimizer: int, data: bytes) -> None:
        """Tells all parameter servers which variables the optimizer moves: ``data`` is
        `zstrat.optimizers.Binding.encoded`. The same again is fine. Every program that
        applies gradients tells the tree, before its first gradient."""
        await self.client.bind(optimizer, data)
        if self._inventory is not None:
            self._inventory.bound(optimizer, data)

    @steady
    async def withdraw(
        self, specs: Sequence[VariableSpec], optimizers: Sequence[int]
    ) -> None:
        """Removes what a creation that failed has left on its servers."""
        # Where another program holds the session, this one has created nothing.
        if not self._cluster.options.joins:
            refs = [Ref(spec.ps, spec.key) for spec in specs]
            await self.client.withdraw(refs, optimizers)
            if self._inventory is not None:
                self._inventory.deleted(specs)
                self._inventory.withdrawn(optimizers)

    @contextlib.contextmanager
    def _told_of_resuming(self) -> Iterator[None]:
        """What is in the place of something new was there before this program."""
        try:
            yield
        except AlreadyExistsError as error:
            if not self._cluster.renewal.resumed:
                raise
            raise AlreadyExistsError(
                f"{error}. The program that left the session {self._cluster.name!r} "
                "created other variables or optimizers than this one, or in another "
                "order: what is there stays for that program; give another name as "
                "resume=, or none, to begin anew"
            ) from None

    def _created(self, specs: Sequence[VariableSpec]) -> None:
        if self._inventory is not None:
            self._inventory.created(specs)

    async def _once(self, work: Callable[[], Awaitable[None]]) -> None:
        """What must not be done twice is done again behind a restore alone."""
        if self.patient is None:
            await work()
        else:
            await self.patient.through(work, again=False)

    async def _wait_for(
        self,
        specs: Sequence[VariableSpec],
        optimizers: list[AwaitedOptimizer],
        timeout: float,
    ) -> None:
        """Waits until the program that holds the session has created these.

        Raises:
            DeadlineExceededError: It has not; names what a server misses.
            InvalidArgumentError: It has created something else in their place.
        """
        client, session = self.client, self._cluster.session
        wishes: dict[int, list[Awaited]] = {}
        if optimizers:
            # An optimizer is on all of them.
            wishes = {ps: [] for ps in range(client.count)}
        for spec in specs:
            wish = Awaited(spec.key, spec.name, spec.dtype, list(spec.shape))
            wishes.setdefault(spec.ps, []).append(wish)
        messages = [
            (ps, JoinSession(session, mine[at : at + _WISHES], optimizers, timeout))
            for ps, mine in wishes.items()
            # One message also where none of the variables is: for the optimizers.
            for at in range(0, len(mine) or 1, _WISHES)
        ]
        deadline = asyncio.get_running_loop().time() + timeout + ANSWER_SECONDS
        await client.each(messages, SessionOpened, deadline=deadline)


def initializing_timeout(
    entries: Sequence[tuple[VariableSpec, InitialEntry]], request: float
) -> float:
    """Seconds to wait for variables that their servers make: one has ``request`` for
    any request, and time for its bytes besides."""
    nbytes: Counter[int] = Counter()
    for spec, _ in entries:
        nbytes[spec.ps] += spec.nbytes
    return request + max(nbytes.values(), default=0) / _RATE


def _pieces(nbytes: int) -> list[tuple[int, int]]:
    """Offsets and sizes of what is read of a tensor in one message each."""
    return [(at, min(_PIECE, nbytes - at)) for at in range(0, nbytes, _PIECE)]


async def session_of(make_link: MakeTaskLink, address: str, timeout: float) -> int:
    """The number of the session that ps 0 serves, once there is one whose program is
    alive; after ``timeout`` seconds that of one whose program has ended.

    Raises:
        DeadlineExceededError: There was none in ``timeout`` seconds.
        VersionMismatchError, PermissionDeniedError: The ps will never answer us.

    Cancellation: nothing is lost.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    server = ProbedTask("ps", 0, address, make_link)
    server.start()
    try:
        await server.wait_ready(deadline)
        wish = JoinSession(0, [], [], max(0.0, deadline - loop.time()))
        answer = await server.link.submit(wish, deadline=deadline + ANSWER_SECONDS)
    except DeadlineExceededError as error:
        raise DeadlineExceededError(
            f"no program has opened a session on the ps at {address} in {timeout} s: "
            "start the chief, or worker 0 of a cluster without one, which does so "
            f"({error})"
        ) from None
    finally:
        await server.link.close()
    assert isinstance(answer, SessionOpened), answer
    return answer.session
