"""Requests that create, bind, count and delete variables and optimizers on parameter
servers."""

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
"""The most variables created by one message: their names easily fit the header."""


class VariableCalls(AskedServers, abc.ABC):
    """The calls of `PsClient` that create, bind and delete variables and optimizers.

    Raises, all methods:
        PSUnavailableError: A parameter server is gone.
        StaleSessionError: The server serves another coordinator.
    """

    @abc.abstractmethod
    def _forget(self, refs: Iterable[Ref]) -> None:
        """Drops the cached values of these variables."""

    async def create(
        self, variables: Sequence[tuple[int, VariableEntry, np.ndarray]]
    ) -> None:
        """Creates variables, ``(ps, entry, initial value)`` each.

        An existing variable of the same key, shape and dtype stays as it is.

        Raises:
            AlreadyExistsError: Another variable has the key.

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
        """Makes the servers create variables, ``(ps, entry)`` each, with one shipped
        initializer, so that no value is sent.

        An existing variable of the same key, shape and dtype stays as it is.

        Args:
            deadline: In loop time; None: the default of the link, which is too short
                for tables of many gigabytes.

        Raises:
            InvalidArgumentError: The initializer failed, or returned another shape or
                dtype; the error says what.
            AlreadyExistsError: Another variable has the key.

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
        """Makes the servers create parts of tables of any id, ``(ps, entry)`` each,
        with one shipped initializer.

        Raises:
            InvalidArgumentError: The initializer cannot be loaded, or does not make
                rows; the error says why.
            AlreadyExistsError: Another variable has the key.

        Cancellation: tables may have been created.
        """
        messages = [
            (ps, CreateTables(self.session, entries, code))
            for ps, entries in _batches(tables)
        ]
        await self.each(messages, object)

    async def table_sizes(self, refs: Sequence[Ref]) -> list[tuple[int, int, int, int]]:
        """Returns, for each of some parts of tables: the number of rows, their bytes,
        the number of the last change, and the number of ids that wait for a row.

        Raises:
            NotFoundError, InvalidArgumentError: A variable does not exist, or is not a
                table.

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
        of ids from ``first`` to before ``last``. With ``since``, the number of a
        change: reads the rows that have changed since then, the ids ``[m]`` that were
        removed, and the number of the last change, ``[1]``.

        Args:
            ids: Empty, or one array of distinct ids: the rows of these ids are read
                instead of buckets. Ids without rows are left out.

        Cancellation: nothing is lost.
        """
        message = PullTable(self.session, ref.key, first, last, since, tuple(ids))
        return (await self.each([(ref.ps, message)], Pulled))[0].arrays

    async def delete(self, refs: Sequence[Ref]) -> None:
        """Deletes variables with their optimizer slots.

        Raises:
            NotFoundError: A variable does not exist; its server has deleted nothing.

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
        """Drops variables and optimizers that a failed creation has left. Requests of
        the creation that are under way are completed first.

        Cancellation: they may have been dropped.
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
            InvalidArgumentError: The transformation cannot run on a server; the error
                says what to write instead.
            AlreadyExistsError: Another optimizer has the id.

        Cancellation: the optimizer may have been registered.
        """
        message = CreateOptimizer(self.session, optimizer, name, code)
        await self.each([(ps, message) for ps in range(self.count)], object)

    async def bind(self, optimizer: int, data: bytes) -> None:
        """Binds variables to an optimizer on all servers; ``data`` is
        `zstrat.optimizers.Binding.encoded`. Binding the same data again costs one round
        trip.

        Raises:
            NotFoundError: The optimizer does not exist.
            InvalidArgumentError: The tree does not fit the variables, or the optimizer
                traces to another program on a server.
            AlreadyExistsError: A variable is in another tree, which updates it in
                another way.
            BusyError: The optimizer has too many trees.

        Cancellation: the variables may have been bound.
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
    """Groups items by server, in batches that each fit one message."""
    for ps, items in by_server(pairs).items():
        for at in range(0, len(items), BATCH):
            yield ps, items[at : at + BATCH]
