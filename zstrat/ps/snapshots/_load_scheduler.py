"""Schedules requests to load values: their turns, their threads, and the files they
read.

`_load_plan` writes the rows. Files are opened, read and closed on the disk thread,
slots are made on the thread of optimizers, and no other request uses the variables from
the first step to the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from zstrat.checkpoint import TensorReader
from zstrat.errors import InvalidArgumentError
from zstrat.ps.store._changes import acknowledged
from zstrat.wire import (
    Done,
    LoadEntry,
    LoadTable,
    LoadTensors,
    StoreEntry,
    StoreTable,
    StoreTensors,
)

from ._load_plan import Loading, Source, move_to
from ._table_loading import Kind, TableFile, TableLoading, sent_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import numpy as np

    from zstrat.ps._thread import JobThread
    from zstrat.ps.store._changes import ChangeLog
    from zstrat.ps.store._store import Store
    from zstrat.wire import TableLeaf, TableTensor

    from ._snapshot_files import DiskThread, Turn


class Loads:
    """Carries out the requests to load values on one parameter server.

    Args:
        turn: Holds names (keys of variables, optimizers), so that no other request uses
            them.
        check: Raises unless the session with this number is open.
        compute: The thread on which optimizers run.
    """

    def __init__(
        self,
        task: str,
        store: Store,
        turn: Turn,
        check: Callable[[int], None],
        compute: JobThread,
        disk: DiskThread,
    ) -> None:
        self._task, self._store = task, store
        self._turn, self._check = turn, check
        self._compute, self._disk = compute, disk

    async def load(self, message: LoadTensors) -> Done:
        """Loads values and slots from files that this server can read.

        Cancellation: is raised when the disk thread has finished the read that it has
        begun.
        """
        forgotten = [e for e in message.entries if e.optimizer and not e.path]
        files = [e for e in message.entries if not (e.optimizer and not e.path)]
        for entry in files:
            self._disk.require_absolute(entry.path)
        readers: dict[str, TensorReader] = {}
        try:
            sources = await self._disk.run(partial(self._open, files, readers))
            wanted = [entry for entry in files if entry.name]
            await self._bring(message.session, wanted, sources, forgotten)
        finally:
            with contextlib.suppress(Exception):  # the thread was closed: at exit
                self._disk.submit(partial(_close, readers))
        # It took long: the answer must not be taken for one of a later session.
        self._check(message.session)
        return await acknowledged(self._store.log, Done())

    async def move(self, message: StoreTensors) -> Done:
        """Stores the values and slots of the message. Cancellation: as in `load`."""
        if len(message.entries) != len(message.arrays):
            raise InvalidArgumentError(
                f"{self._task}: {len(message.entries)} places came with "
                f"{len(message.arrays)} arrays"
            )
        sources = [Source.of("what was sent", array) for array in message.arrays]
        await self._bring(message.session, message.entries, sources)
        self._check(message.session)
        return await acknowledged(self._store.log, Done())

    async def load_table(self, message: LoadTable) -> Done:
        """Loads rows of a table from files. Cancellation: as in `load`."""
        for tensor in message.tensors:
            self._disk.require_absolute(tensor.path)
        readers: dict[str, TensorReader] = {}
        try:
            files = await self._disk.run(
                partial(self._open_table, message.tensors, readers)
            )
            leaves = {leaf: kind for file in files for leaf, kind in file.kinds.items()}
            read = partial(_read_table, files, message.first, message.last)
            await self._bring_table(message, leaves, read)
        finally:
            with contextlib.suppress(Exception):  # the thread was closed: at exit
                self._disk.submit(partial(_close, readers))
        self._check(message.session)
        return await acknowledged(self._store.log, Done())

    async def store_table(self, message: StoreTable) -> Done:
        """Stores the rows of the message in a table. Cancellation: as in `load`."""
        rows = sent_rows(message, self._task)
        await self._bring_table(message, rows.kinds, rows.add_to)
        self._check(message.session)
        return await acknowledged(self._store.log, Done())

    async def _bring_table(
        self,
        message: LoadTable | StoreTable,
        leaves: Mapping[TableLeaf, Kind],
        read: Callable[[TableLoading], None],
    ) -> None:
        """Loads rows into a table, with exclusive use of the table and of all
        optimizers that the request names."""
        names: set[Hashable] = {message.key}
        names |= {("optimizer", e.optimizer) for e in leaves if e.optimizer}
        async with self._turn(list(names)):
            self._check(message.session)
            store = self._store
            loading = TableLoading(store, message.key, leaves, message.replaces)
            # Slots may have to be compiled for, which is the compute thread's to do.
            if loading.optimizes:
                await _shielded(self._compute.submit(loading.prepare))
            else:
                loading.prepare()
            whole = False
            try:
                # Shielded, as the thread writes to the table whether or not anybody
                # waits.
                await _shielded(self._disk.submit(partial(read, loading)))
                whole = True
            finally:
                loading.commit(whole=whole)
                if store.log is not None:
                    _log_table(store.log, loading, message, whole=whole)

    def _open_table(
        self, tensors: Sequence[TableTensor], readers: dict[str, TensorReader]
    ) -> list[TableFile]:
        """Opens files and finds the table's tensors in them; runs on the disk
        thread."""
        files: dict[tuple[str, str], TableFile] = {}
        for tensor in tensors:
            path = tensor.path
            with self._disk.blamed(path, "reading"):
                if path not in readers:
                    readers[path] = TensorReader(path)
                reader = readers[path]
                file = files.get((path, tensor.ids))
                if file is None:
                    file = TableFile(path, reader, tensor.ids, self._disk)
                    files[path, tensor.ids] = file
                file.add(tensor)
        return list(files.values())

    async def _bring(
        self,
        session: int,
        entries: Sequence[LoadEntry] | Sequence[StoreEntry],
        sources: Sequence[Source],
        forgotten: Sequence[LoadEntry] = (),
    ) -> None:
        """Loads rows from the sources to the values and slots that the entries name,
        with exclusive use of all their variables and optimizers.

        Args:
            forgotten: Slots to drop; the next gradient initializes them.
        """
        places: list[LoadEntry | StoreEntry] = list(entries)
        used = [*places, *forgotten]
        names: set[Hashable] = {entry.key for entry in used}
        names |= {("optimizer", e.optimizer) for e in used if e.optimizer}
        async with self._turn(list(names)):
            self._check(session)
            store = self._store
            loading = Loading(
                [move_to(store, *each) for each in zip(places, sources, strict=True)],
                [(store.variables[entry.key], entry.optimizer) for entry in forgotten],
            )
            if loading.optimizes:
                await _shielded(self._compute.submit(loading.prepare))
            else:
                loading.prepare()
            whole = False
            try:
                await _shielded(self._disk.submit(loading.compute))
                whole = True
            finally:
                # Also after a failure: some values are new, so the version must not
                # stay the old one.
                loading.commit()
                if store.log is not None:
                    _log_loading(store.log, loading, forgotten, whole=whole)

    def _open(
        self, entries: Sequence[LoadEntry], readers: dict[str, TensorReader]
    ) -> list[Source]:
        """Opens files and finds the tensors of the entries in them; runs on the disk
        thread."""
        sources: list[Source] = []
        for entry in entries:
            path = entry.path
            with self._disk.blamed(path, "reading"):
                # An entry without a name asks whether the file is there.
                if not entry.name:
                    os.stat(path)
                    continue
                if path not in readers:
                    readers[path] = TensorReader(path)
                sources.append(self._source(readers[path], entry))
        return sources

    def _source(self, reader: TensorReader, entry: LoadEntry) -> Source:
        info = reader.info(entry.name)
        what, shape, start = f"{entry.name!r} of {entry.path}", info.shape, 0
        if entry.stop:
            start, stop = entry.start, entry.stop
            if not shape or not 0 <= start <= stop <= shape[0]:
                raise InvalidArgumentError(
                    f"{self._task}: {what}, {info}, has no rows {start}:{stop}"
                )
            shape = (stop - start, *shape[1:])

        def read_into(out: np.ndarray) -> None:
            with self._disk.blamed(entry.path, "reading"):
                reader.read_into(entry.name, start, out)

        return Source(what, info.numpy_dtype, shape, read_into)


def _log_loading(
    log: ChangeLog, loading: Loading, forgotten: Sequence[LoadEntry], *, whole: bool
) -> None:
    """Logs loaded values and slots for the backup, as values: the files may be visible
    to this server alone. If not ``whole``, the load has failed half way, and the backup
    is marked as diverged."""
    if not whole:
        log.mark_diverged("a load failed half way")
        return
    if forgotten:
        log.append(LoadTensors(0, list(forgotten)))
    for target in loading.loaded():
        entries = [
            StoreEntry(
                move.held.entry.key,
                0 if move.optimizer is None else move.optimizer.optimizer,
                move.leaf,
                move.at,
                move.rows,
            )
            for move, _ in target
        ]
        log.append(StoreTensors(0, entries, tuple([array for _, array in target])))


def _read_table(
    files: Sequence[TableFile], first: int, last: int, loading: TableLoading
) -> None:
    for file in files:
        file.add_to(loading, first, last)


def _log_table(
    log: ChangeLog,
    loading: TableLoading,
    message: LoadTable | StoreTable,
    *,
    whole: bool,
) -> None:
    """Logs loaded rows of a table for the backup. If not ``whole``, the load has
    failed; the backup is marked as diverged if the table may have changed."""
    if not whole:
        # A table that would have been replaced is as it was.
        if not loading.replaces:
            log.mark_diverged("a load failed half way")
    elif isinstance(message, StoreTable):
        log.append(replace(message, session=0))
    else:
        # As values, and all of the table: the backup may not see the files.
        for each in loading.content():
            log.append(each)


def _close(readers: dict[str, TensorReader]) -> None:
    for reader in readers.values():
        reader.close()


async def _shielded(done: asyncio.Future[None]) -> None:
    """Waits until a job is done, even if the caller is cancelled: the job works on
    variables that no other request may use meanwhile.

    Cancellation: is raised when the job is done.
    """
    cancelled = False
    while not done.done():
        try:
            await asyncio.shield(asyncio.wait([done]))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    done.result()
