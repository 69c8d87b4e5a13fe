"""Hands the stores of a parameter server from a process that ends to the next process
of its task.

A process that has to stop finishes the requests that it has accepted, stops answering,
and writes its stores to a state folder. Callers get no answer meanwhile, see the
process leave, and ask again. The next process loads the state and removes it before it
answers its first request. So a state is used once, and is the newest that its process
had: a process that is killed later leaves no state, and its successor begins empty.

Peers identify the content of a parameter server by its incarnation. The incarnation is
handed over with the state, and so are incarnations and addresses of the copies that the
process hosts for other processes. Law of the file: **an incarnation answers for one
state at a time**: the old process is silent before the state is complete, and the new
process answers only when it has removed the state. All stores of a process are handed
over, or none.

If the store has a backup, another process may have served the store meanwhile. Such a
store is not served until the coordinator, which knows the current view, orders so: see
`StoreRole`.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from zstrat.config import Limits
from zstrat.errors import BusyError, ClosedError
from zstrat.ps._thread import ComputeThread
from zstrat.ps.engine._engine import OptimizerEngine
from zstrat.ps.replication._replay import StoreCopy, replay, tables_of
from zstrat.ps.snapshots._snapshot import ServerSnapshot, SnapshotTensor
from zstrat.ps.snapshots._snapshot_files import DiskThread, SnapshotWrite
from zstrat.ps.store._pins import Pin
from zstrat.ps.store._store import Store
from zstrat.wire import (
    AbsentPeer,
    CopiedPart,
    CopyParts,
    Hello,
    Message,
    Owner,
    TensorEntry,
    decode,
    encode,
)

from ._state_files import StateFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from zstrat.ps._thread import MakeThread

    from ._state_files import StateReader

log = logging.getLogger("zstrat.ps")


class StoreRole(enum.Enum):
    """The role of a process for a store when the process ended."""

    ALONE = "alone"
    """No other process had a copy with all that was acknowledged: the next process
    serves the store."""
    PRIMARY = "primary"
    """Another process had a copy with all that was acknowledged, and may serve the
    store: the next process waits for `DetachBackup`."""
    BACKUP = "backup"
    """The process had a backup with all that was acknowledged: the next process may
    serve the store, if ordered."""
    NOTHING = "nothing"
    """The process had no usable copy of the store."""


@dataclass(frozen=True, slots=True)
class HandedOverStore:
    """The state of one store that a process leaves to the next.

    Args:
        number: The number of the store.
        view: The newest view of the store that the process knew.
        store: The content of the store; None if the process had none.
        address, incarnation: Those of a copy that the process hosts for another
            process. Empty for its own store, which has those of the process.
    """

    number: int
    role: StoreRole
    view: int
    store: Store | None
    address: str = ""
    incarnation: int = 0


class Inherited(NamedTuple):
    """The state that the process before has left: its own store, and the copies that it
    hosted. ``owner`` is the owner of the session, not connected yet."""

    incarnation: int
    owner: Owner
    own: HandedOverStore
    copies: Sequence[HandedOverStore] = ()


@final
class Handover:
    """Writes and loads the state of one parameter server for its next process.

    Args:
        folder: The state folder of the server, which other users must not be able to
            write to.
        task: Names the server in errors.
        make_thread: Makes the thread that writes the state.
        spill: The folder in which rows of tables of any id are kept, as in
            `HeldVariables`.

    Raises:
        PermissionDeniedError, OSError: As `StateFiles`.
    """

    def __init__(
        self,
        folder: Path,
        index: int,
        task: str,
        make_thread: MakeThread = ComputeThread,
        spill: Path | None = None,
    ) -> None:
        self._files, self._task = StateFiles(folder, index), task
        self._make_thread, self._spill = make_thread, spill

    async def leave(self, left: Inherited, seconds: float) -> bool:
        """Writes the state for the next process.

        Returns:
            False if the state could not be written within ``seconds``; the log says
            why.

        Cancellation: no state is left, unless it is complete already.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        # Not the compute thread, which `drain` has ended by now.
        thread = self._make_thread(f"state {self._task}")
        try:
            async with asyncio.timeout(seconds):
                await self._write(left, DiskThread(thread, self._task))
        except TimeoutError:
            words = f"it was not written within ZSTRAT_HANDOVER={seconds:g} s"
        except Exception as error:  # goes to the log: the process ends all the same
            words = f"{type(error).__name__}: {error}"
        else:
            log.info("left %s in %.1f s", _words(left), loop.time() - began)
            return True
        finally:
            # Outside of the limit: a state that is complete by now is left. What could
            # not be written may still hold the disk; the process does not wait for it.
            await thread.close(loop.time() + 1.0)
        log.error("what this process holds is lost with it: %s", words)
        return False

    async def _write(self, left: Inherited, disk: DiskThread) -> None:
        """Writes the content of all stores, which no longer change.

        Raises:
            ZstratError, OSError: The state could not be written; no state is left.

        Cancellation: no state is left.
        """
        path, stores = self._files.new_path(), StoreWriting()
        facts = {
            "incarnation": left.incarnation,
            "owner": _plain_owner(left.owner),
            "stores": [_plain_store(each, stores) for each in (left.own, *left.copies)],
        }
        names = [str(number) for number in range(len(stores.tensors))]
        snapshot = ServerSnapshot(stores.tensors)
        try:
            # If this fails half-way, no older state may be taken for it.
            await disk.run(self._files.remove)
            # In no turn: no request uses what is left.
            writing = SnapshotWrite(snapshot, disk, lambda _: contextlib.nullcontext())
            written = await writing.run(path, snapshot.tensors, names)
            commit = partial(self._files.commit, path, written.digests, facts)
            await disk.run(commit)
        except BaseException:
            # On the thread, after what is under way there: a state that gets complete
            # now must not be found, as this process says that it leaves none. If it
            # cannot be removed either, what is wrong with the disk is reported already.
            with contextlib.suppress(ClosedError, BusyError):
                removed = disk.submit(self._files.remove)
                removed.add_done_callback(lambda done: done.exception())
            raise

    def take(
        self, load_code: Callable[[bytes], object], *, largest: int
    ) -> Inherited | None:
        """Loads the state of the process before; None if there is none. An unusable
        state is removed, and logged. A state that was loaded stays in the folder until
        `took`, for the next process in case this one dies before.

        Blocks: call it before the first request.

        Raises:
            OSError: An unusable state cannot be removed.
        """
        try:
            with self._files.open() as state:
                # It stays until `took`: a process that dies here leaves it to the next
                # one.
                if state is not None:
                    return self._inherited(state, load_code, largest)
            self._files.remove()  # what a process has left that was killed
            return None
        except Exception as error:  # to the log: no caller can do anything
            log.error(
                "what the process before has left in %s is not used, and this one "
                "begins empty: %s: %s",
                self._files.path,
                type(error).__name__,
                error,
            )
        self._files.remove()
        return None

    def took(self) -> None:
        """Removes the loaded state, which may be used only once.

        Raises:
            OSError: The state cannot be removed, so no request may be answered.
        """
        self._files.remove()

    def _inherited(
        self, state: StateReader, load_code: Callable[[bytes], object], largest: int
    ) -> Inherited:
        facts, stores = state.facts, []
        for plain in facts["stores"]:
            store, task = None, f"/job:ps/task:{plain['number']}"
            if plain["store"] is not None:
                engine, spill = OptimizerEngine(load_code), self._spill
                store = Store(engine, task=task, largest=largest, spill=spill)
                restore(store, plain["store"], state)
            role = StoreRole(plain["role"])
            # The plain form has the same names, so a field that is added is handed
            # over, too.
            stores.append(HandedOverStore(**{**plain, "role": role, "store": store}))
        owner, incarnation = _owner(facts["owner"]), int(facts["incarnation"])
        left = Inherited(incarnation, owner, stores[0], stores[1:])
        log.info(
            "takes over what the process before has left: %s of session %#x of %s, "
            "incarnation %x",
            _words(left),
            owner.session,
            owner,
            incarnation,
        )
        return left


def _plain_store(left: HandedOverStore, stores: StoreWriting) -> dict[str, Any]:
    store = None if left.store is None else stores.add(left.store)
    return {**_plain(left), "role": left.role.value, "store": store}


def _plain(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in fields(value)}


def _words(left: Inherited) -> str:
    """Describes the stores of a state for the log: roles, views, the number of
    variables."""
    own = left.own
    held = 0 if own.store is None else len(own.store)
    if own.role is StoreRole.ALONE:
        return f"{held} variables"
    roles = "; ".join(
        f"store {each.number}: {each.role.value}, view {each.view}"
        for each in (own, *left.copies)
    )
    return f"{held} variables ({roles})"


def _plain_owner(owner: Owner) -> dict[str, Any]:
    # Without the connection, and times of the coordinator's clock.
    plain = {**_plain(owner), "hello": asdict(owner.hello)}
    return {name: plain[name] for name in plain.keys() - {"peer", "sent"}}


def _owner(plain: dict[str, Any]) -> Owner:
    # No connection: the coordinator is waited for as after a lost one
    # (`PsService.take_over`).
    return Owner(**{**plain, "hello": Hello(**plain["hello"]), "peer": AbsentPeer()})


Facts = dict[str, Any]
"""Data that can be encoded as JSON."""


@final
class StoreWriting:
    """Collects the arrays of stores for a file, each store as the messages that a
    backup gets.

    The messages of a `StoreCopy` become arrays of the file, one for the header of a
    message and one for each frame; pinned values and slots become further arrays. Used
    by the owner of the stores, while no request is under way.
    """

    def __init__(self) -> None:
        self.tensors: list[SnapshotTensor] = []
        """The arrays of the file, in order. The caller releases them."""

    def add(self, store: Store) -> Facts:
        """Adds a store as it is now, without a copy; returns the facts with which
        `restore` finds the arrays of the store."""
        # In no turn: nobody uses a store that is left.
        copy, at = StoreCopy(store), len(self.tensors)
        # Values first: they start where the disk takes them from memory as they are.
        self.tensors += copy.tensors
        messages = [_frames(message) for message in copy.messages]
        self.tensors += [tensor for frames in messages for tensor in frames]
        return {
            "at": at,
            "values": [list(tensor.entry[:3]) for tensor in copy.tensors],
            "messages": [len(frames) for frames in messages],
            "counts": asdict(store.counts),
        }


def restore(store: Store, facts: Facts, arrays: StateReader) -> None:
    """Fills an empty store, which serves no requests yet, from a state. Replays its
    messages as a backup does, so later answers depend only on what a backup has, and on
    the counts.

    Raises:
        KeyError, TypeError, ValueError, ProtocolError: The arrays do not match the
            facts.
        Exception: Any error of loading an optimizer.
    """
    values, at = facts["values"], facts["at"]
    # After all values, where `add` has put the frames of messages.
    numbers = count(at + len(values))
    for frames in facts["messages"]:
        header, *bodies = [arrays.read(next(numbers)) for _ in range(frames)]
        _make(store, decode(header, bodies, Limits())[1])
    for number, (key, optimizer, leaf) in enumerate(values, at):
        start = 0
        # Parts as they come from the file: a value as large as memory is never there
        # twice.
        for part in arrays.parts(number):
            data = np.frombuffer(part, np.uint8)
            _make(store, CopyParts([CopiedPart(key, optimizer, leaf, start)], (data,)))
            start += len(part)
    # Only now are the ids of tables complete.
    for table in tables_of(store):
        table.make_indices()
    for name, number in facts["counts"].items():
        setattr(store.counts, name, int(number))


def _make(store: Store, change: Message) -> None:
    for do in replay(store, change):
        do()


def _frames(message: Message) -> list[SnapshotTensor]:
    # Frames of a message are arrays of the file, so that its digests cover them.
    header, frames = encode(message)
    return [_bytes(each) for each in (np.frombuffer(header, np.uint8), *frames)]


def _bytes(data: np.ndarray) -> SnapshotTensor:
    """Returns a snapshot tensor of bytes that nobody writes to any longer."""
    entry = TensorEntry(0, 0, "", data.dtype.name, list(data.shape), True)
    return SnapshotTensor(entry, Pin(data, frozen=True))
