"""Requests to create, bind, count and delete what parameter servers hold."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.wire import (
    AskTables,
    BindOptimizer,
    CreateOptimizer,
    CreateTables,
    CreateVariables,
    DeleteVariables,
    InitialEntry,
    InitializeVariables,
    Inspect,
    Pulled,
    PullTable,
    Statistics,
    TableSizes,
    VariableEntry,
    Withdraw,
)

from ._asking import AskedServers, by_server

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from zstrat.wire import PlainTree, TableEntry

    from ._asking import T
    from ._reading import Ref

BATCH: Final = 512
"""Variables created by one message: their names fit the header by far."""


class VariableCalls(AskedServers, abc.ABC):
    """The calls of `PsClient` that create, bind and delete variables and optimizers.

    Raises, all methods:
        PSUnavailableError: A parameter server is gone.
        StaleSessionError: It serves another coordinator.
    """

    @abc.abstractmethod
    def _forget(self, refs: Iterable[Ref]) -> None:
        """Forgets the remembered values of these variables."""

    async def create(
        self, variables: Sequence[tuple[int, VariableEntry, np.ndarray]]
    ) -> None:
        """Creates variables, ``(ps, entry, initial value)`` each.

        One of the same key, shape and dtype that is there already stays as it is.

        Raises:
            AlreadyExistsError: A key is taken by another variable.

        Cancellation: variables may have been created.
        """
        messages = []
        # By server and in batches: a server creates each batch whole or not at all.
        pairs = [(ps, (entry, value)) for ps, entry, value in variables]
        for ps, some in _batches(pairs):
            entries, values = zip(*some, strict=True)
            message = CreateVariables(self.session, list(entries), values)
            messages.append((ps, message))
        await self.each(messages, object)

    async def initialize(
        self,
        variables: Sequence[tuple[int, InitialEntry]],
        code: bytes,
        *,
        deadline: float | None = None,
    ) -> None:
        """Has the servers make variables, ``(ps, entry)`` each, with one shipped
        initializer; no value travels.

        One of the same key, shape and dtype that is there already stays as it is.

        Args:
            deadline: Loop time; None: the default of the link, which is too short for
                tables of many gigabytes.

        Raises:
            InvalidArgumentError: The initializer failed or returned something else;
                says what.
            AlreadyExistsError: A key is taken by another variable.

        Cancellation: variables may have been created.
        """
        messages = [
            (ps, InitializeVariables(self.session, entries, code))
            for ps, entries in _batches(variables)
        ]
        await self.each(messages, object, deadline=deadline)

    async def create_tables(
        self, tables: Sequence[tuple[int, TableEntry]], code: bytes
    ) -> None:
        """Has the servers create parts of tables of any id, ``(ps, entry)`` each, with
        one shipped initializer.

        Raises:
            InvalidArgumentError: The initializer cannot be loaded, or does not make
                rows; says why.
            AlreadyExistsError: A key is taken by another variable.

        Cancellation: tables may have been created.
        """
        messages = [
            (ps, CreateTables(self.session, entries, code))
            for ps, entries in _batches(tables)
        ]
        await self.each(messages, object)

    async def table_sizes(self, refs: Sequence[Ref]) -> list[tuple[int, int, int, int]]:
        """Returns rows, bytes, cut, and ids that wait, of each of some parts of tables.

        Raises:
            NotFoundError, InvalidArgumentError: One is not a table.

        Cancellation: nothing is lost.
        """
        keys_of = by_server(ref[:2] for ref in refs)
        asked = [(ps, AskTables(self.session, keys)) for ps, keys in keys_of.items()]
        answers = await self.each(asked, TableSizes)
        found = {
            key: sizes
            for keys, answer in zip(keys_of.values(), answers, strict=True)
            for key, *sizes in zip(
                keys,
                answer.rows,
                answer.nbytes,
                answer.cuts,
                answer.waiting,
                strict=True,
            )
        }
        # In the order of the question, as answers come by server.
        return [
            (rows, size, cut, waiting)
            for rows, size, cut, waiting in (found[ref.key] for ref in refs)
        ]

    async def pull_table(
        self,
        ref: Ref,
        first: int,
        last: int,
        since: int = -1,
        ids: Sequence[np.ndarray] = (),
    ) -> Sequence[np.ndarray]:
        """Reads ids ``[n]`` and rows ``[n, ...]`` of a part of a table, in the buckets
        from ``first`` to before ``last``; with ``since`` what has changed since that
        cut, ids ``[m]`` that were removed, and the cut of now, ``[1]``.

        Args:
            ids: Maybe one array of distinct ids, in place of buckets: those of them
                that have rows are read.

        Cancellation: nothing is lost.
        """
        message = PullTable(self.session, ref.key, first, last, since, tuple(ids))
        return (await self.each([(ref.ps, message)], Pulled))[0].arrays

    async def delete(self, refs: Sequence[Ref]) -> None:
        """Deletes variables with their optimizer slots.

        Raises:
            NotFoundError: A variable does not exist; nothing is deleted on its server.

        Cancellation: variables may have been deleted.
        """
        # Before it is sent: a variable of the same key may be created at once
        # afterwards.
        self._forget(refs)
        messages = [
            (ps, DeleteVariables(self.session, keys))
            for ps, keys in by_server(ref[:2] for ref in refs).items()
        ]
        await self.each(messages, object)

    async def withdraw(self, refs: Sequence[Ref], optimizers: Sequence[int]) -> None:
        """Drops what a failed creation has left of these variables and optimizers.
        Requests of it that are under way are completed before.

        Cancellation: it may have been dropped.
        """
        self._forget(refs)
        numbers, keys_of = list(optimizers), by_server(ref[:2] for ref in refs)
        # A variable is on one server, an optimizer on all.
        asked = range(self.count) if numbers else keys_of
        messages = [
            (ps, Withdraw(self.session, keys_of.get(ps, []), numbers)) for ps in asked
        ]
        await self.each(messages, object)

    async def create_optimizer(self, optimizer: int, name: str, code: bytes) -> None:
        """Ships an optax transformation to all parameter servers.

        Raises:
            InvalidArgumentError: It cannot run there; says what to write instead.
            AlreadyExistsError: The id is taken by another one.

        Cancellation: it may have been registered.
        """
        message = CreateOptimizer(self.session, optimizer, name, code)
        await self.each([(ps, message) for ps in range(self.count)], object)

    async def bind(self, optimizer: int, data: bytes) -> None:
        """Binds variables to an optimizer on all servers; ``data`` is
        `zstrat.optimizers.Binding.encoded`. The same again costs a round trip.

        Raises:
            NotFoundError: The optimizer does not exist.
            InvalidArgumentError: It does not fit, or is another program there.
            AlreadyExistsError: A variable is in another tree, which moves it otherwise.
            BusyError: The optimizer has too many trees.

        Cancellation: it may have been bound.
        """
        arrays = (np.frombuffer(data, np.uint8),)
        message = BindOptimizer(self.session, optimizer, arrays)
        await self.each([(ps, message) for ps in range(self.count)], object)

    async def statistics(self) -> list[dict[str, PlainTree]]:
        """Returns the statistics of each parameter server, in task order.

        Cancellation: nothing is lost.
        """
        asked = [(ps, Inspect()) for ps in range(self.count)]
        return [answer.values for answer in await self.each(asked, Statistics)]


def _batches(pairs: Iterable[tuple[int, T]]) -> Iterator[tuple[int, list[T]]]:
    """Groups items by server, in batches that fit one message."""
    for ps, items in by_server(pairs).items():
        for at in range(0, len(items), BATCH):
            yield ps, items[at : at + BATCH]
