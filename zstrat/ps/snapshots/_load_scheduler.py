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
from ._table_loading import TableFile, TableLoading, sent_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    import numpy as np

    from zstrat.ps._thread import JobThread
    from zstrat.ps.store._store import Store
    from zstrat.wire import TableLeaf, TableTensor

    from ._snapshot_files import DiskThread, Turn


LoadRequest = LoadTensors | StoreTensors | LoadTable | StoreTable


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

    async def answer(self, message: LoadRequest) -> Done:
        """Carries out one request. The compute thread makes slots, and the disk thread
        reads.

        Cancellation: is raised when the disk thread has finished the read that it has
        begun.
        """
        match message:
            case LoadTensors():
                return await self._load(message)
            case StoreTensors():
                return await self._move(message)
            case LoadTable():
                return await self._load_table(message)
            case StoreTable():
                used = _used_by(message.key, message.leaves)
                loading = partial(sent_rows, self._store, message)
                return await self._bring(message.session, used, loading)

    async def _load(self, message: LoadTensors) -> Done:
        forgotten = [e for e in message.entries if e.optimizer and not e.path]
        files = [e for e in message.entries if not (e.optimizer and not e.path)]
        for entry in files:
            self._disk.require_absolute(entry.path)
        with self._readers() as readers:
            sources = await self._disk.run(partial(self._open, files, readers))
            wanted = [entry for entry in files if entry.name]
            return await self._bring_all(message.session, wanted, sources, forgotten)

    async def _move(self, message: StoreTensors) -> Done:
        if len(message.entries) != len(message.arrays):
            raise InvalidArgumentError(
                f"{self._task}: {len(message.entries)} places came with "
                f"{len(message.arrays)} arrays"
            )
        sources = [Source.of("what was sent", array) for array in message.arrays]
        return await self._bring_all(message.session, message.entries, sources)

    async def _load_table(self, message: LoadTable) -> Done:
        for tensor in message.tensors:
            self._disk.require_absolute(tensor.path)
        with self._readers() as readers:
            opening = partial(self._open_table, message.tensors, readers)
            files = await self._disk.run(opening)
            leaves = {leaf: kind for file in files for leaf, kind in file.kinds.items()}

            def read(loading: TableLoading) -> None:
                for file in files:
                    file.add_to(loading, message.first, message.last)

            key, replaces = message.key, message.replaces
            loading = partial(TableLoading, self._store, key, leaves, read, replaces)
            return await self._bring(message.session, _used_by(key, leaves), loading)

    async def _bring_all(
        self,
        session: int,
        entries: Sequence[LoadEntry] | Sequence[StoreEntry],
        sources: Sequence[Source],
        forgotten: Sequence[LoadEntry] = (),
    ) -> Done:
        """Loads rows from the sources to the values and slots that the entries name.

        Args:
            forgotten: Slots to drop; the next gradient initializes them.
        """
        store = self._store
        places: list[LoadEntry | StoreEntry] = list(entries)

        def loading() -> Loading:
            return Loading(
                [move_to(store, *each) for each in zip(places, sources, strict=True)],
                [(store.variables[entry.key], entry.optimizer) for entry in forgotten],
            )

        used = [(entry.key, entry.optimizer) for entry in [*places, *forgotten]]
        return await self._bring(session, used, loading)

    async def _bring(
        self,
        session: int,
        used: Iterable[tuple[int, int]],
        loading_of: Callable[[], Loading | TableLoading],
    ) -> Done:
        """Loads values, with exclusive use of all variables and optimizers that
        ``used`` names: keys, each with the number of an optimizer or 0."""
        names: set[Hashable] = set()
        for key, optimizer in used:
            names |= {key, ("optimizer", optimizer)} if optimizer else {key}
        async with self._turn(list(names)):
            self._check(session)
            loading = loading_of()
            # Slots may have to be compiled for, which is the compute thread's to do.
            if loading.optimizes:
                await _shielded(self._compute.submit(loading.prepare))
            else:
                loading.prepare()
            whole = False
            try:
                # Shielded, as the thread writes whether or not anybody waits.
                await _shielded(self._disk.submit(loading.compute))
                whole = True
            finally:
                # Also after a failure: some values are new, so the version must not
                # stay the old one.
                loading.commit(whole=whole)
                if (log := self._store.log) is not None:
                    loading.log(log, whole=whole)
        # It took long: the answer must not be taken for one of a later session.
        self._check(session)
        return await acknowledged(self._store.log, Done())

    @contextlib.contextmanager
    def _readers(self) -> Iterator[dict[str, TensorReader]]:
        """Yields a dict for readers of files, which the disk thread closes after the
        block."""
        readers: dict[str, TensorReader] = {}
        try:
            yield readers
        finally:
            with contextlib.suppress(Exception):  # the thread was closed: at exit
                self._disk.submit(partial(_close, readers))

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


def _used_by(key: int, leaves: Iterable[TableLeaf]) -> list[tuple[int, int]]:
    """Returns what a load of leaves of a table uses: the table in any case, as one
    without leaves may replace it by an empty one."""
    return [(key, 0), *((key, leaf.optimizer) for leaf in leaves)]


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
