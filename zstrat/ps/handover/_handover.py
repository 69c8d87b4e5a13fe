"""Hands what a parameter server holds from a process that ends to the one after it.

A process that has to stop finishes what it has accepted, falls silent, and writes what
it holds to a state folder. Callers get no answer meanwhile, see the process leave, and
ask again. The next process loads the state and removes it before it answers its first
request. So a state is used once, and is the newest that its process had: a process that
is killed later leaves none, and comes back empty.

Peers know a parameter server by its incarnation, which stands for what it holds. It is
handed over with the state, and so are those of the copies that it keeps for others, at
their addresses. Law of the file: **an incarnation answers for one state at a time**:
the old process is silent before the state is complete, and the new one answers when it
is removed. All that a process had is handed over, or nothing.

With backups another process may have served the store meanwhile. So such a store
is not served until the coordinator, which knows the views, says so: see `StoreRole`.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from zstrat.config import Limits
from zstrat.errors import BusyError, ClosedError
from zstrat.ps._thread import ComputeThread
from zstrat.ps.engine._engine import OptimizerEngine
from zstrat.ps.replication._replay import StoreCopy, index_tables, replay
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
    """The role of a process for a store when it ended."""

    ALONE = "alone"
    """No other process had a copy with all that was acknowledged: the next process
    serves the store."""
    PRIMARY = "primary"
    """Another process had one, and may serve the store: the next process waits for
    `DetachBackup`."""
    BACKUP = "backup"
    """It had a copy with all that was acknowledged: the next process may serve."""
    NOTHING = "nothing"
    """Nothing of it is left, or nothing that is whole."""


@dataclass(frozen=True, slots=True)
class HandedOverStore:
    """The state of one store that a process leaves to the next.

    Args:
        number: Of the store.
        view: The newest one of the store that the process knew of.
        store: What the process holds of it, if anything.
        address, incarnation: Of a copy that it keeps for another process; its own store
            has those of the process.
    """

    number: int
    role: StoreRole
    view: int
    store: Store | None
    address: str = ""
    incarnation: int = 0


class Inherited(NamedTuple):
    """The state of the process before: its own store, and the copies that it kept.
    ``owner`` has no connection yet."""

    incarnation: int
    owner: Owner
    own: HandedOverStore
    copies: Sequence[HandedOverStore] = ()


@final
class Handover:
    """Hands over what one parameter server holds.

    Args:
        folder: Its state folder, which other users may not write to.
        task: Names it in errors.
        make_thread: Makes the thread that writes.
        spill: Where tables of any id are kept, as in `HeldVariables`.

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
            False if it could not be written within ``seconds``; the log says why.

        Cancellation: there is no state.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(seconds):
                await self.write(left)
        except TimeoutError:
            words = f"it was not written within ZSTRAT_HANDOVER={seconds:g} s"
        except Exception as error:  # goes to the log: the process ends all the same
            words = f"{type(error).__name__}: {error}"
        else:
            log.info("left %s in %.1f s", _words(left), loop.time() - began)
            return True
        log.error("what this process holds is lost with it: %s", words)
        return False

    async def write(self, left: Inherited) -> None:
        """Writes what the stores hold, which no longer change.

        Raises:
            ZstratError, OSError: It could not be written; there is no state.

        Cancellation: there is no state.
        """
        # Not the compute thread, which `drain` has ended by now.
        thread = self._make_thread(f"state {self._task}")
        disk = DiskThread(thread, self._task)
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
        finally:
            # What could not be written may still hold the disk; the process does not
            # wait for that.
            await thread.close(asyncio.get_running_loop().time() + 1.0)

    def take(
        self, load_code: Callable[[bytes], object], *, largest: int
    ) -> Inherited | None:
        """Loads the state of the process before; None if there is none. A state that
        cannot be used is removed, and logged. Any other stays until `took`, for the
        next process, in case this one dies before.

        Blocks: call it before the first request.

        Raises:
            OSError: It cannot be removed.
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
        """Removes the state, which may be used only once.

        Raises:
            OSError: It cannot be removed, so no request may be answered.
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
    return {
        "number": left.number,
        "role": left.role.value,
        "view": left.view,
        "store": None if left.store is None else stores.add(left.store),
        "address": left.address,
        "incarnation": left.incarnation,
    }


def _words(left: Inherited) -> str:
    """Describes the stores for the log: roles, views, the number of variables."""
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
    return {
        "session": owner.session,
        "hello": asdict(owner.hello),
        "since": owner.since,
        "alive": owner.alive,
        "name": owner.name,
        "origin": owner.origin,
        "is_shared": owner.is_shared,
        "program": owner.program,
    }


def _owner(plain: dict[str, Any]) -> Owner:
    # No connection: the coordinator is waited for as after a lost one
    # (`PsService.take_over`).
    return Owner(**{**plain, "hello": Hello(**plain["hello"]), "peer": AbsentPeer()})


Facts = dict[str, Any]
"""Values that JSON can hold."""


@final
class StoreWriting:
    """Stores on their way to a file, each as the messages that a backup gets.

    The messages of a `StoreCopy` are arrays of the file, a header and its frames each;
    what is pinned follows in parts, as values of the file. Used by the owner of the
    stores, while no request is under way.
    """

    def __init__(self) -> None:
        self.tensors: list[SnapshotTensor] = []
        """The arrays, in order. Their user releases them."""

    def add(self, store: Store) -> Facts:
        """Adds a store as it is now, without a copy; returns the facts by which
        `restore` finds its arrays."""
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
    """Fills an empty store that serves no requests yet. Replays the messages as a
    backup does, so later answers depend only on what a backup has, and on the counts.

    Raises:
        KeyError, TypeError, ValueError, ProtocolError: The arrays do not belong to the
            facts.
        Exception: Whatever loading an optimizer raises.
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
    index_tables(store).compute()
    for name, number in facts["counts"].items():
        setattr(store.counts, name, int(number))


def _make(store: Store, change: Message) -> None:
    for plan in replay(store, change):
        plan.compute()


def _frames(message: Message) -> list[SnapshotTensor]:
    # Frames of a message are arrays of the file, so that its digests cover them.
    header, frames = encode(message)
    return [_bytes(each) for each in (np.frombuffer(header, np.uint8), *frames)]


def _bytes(data: np.ndarray) -> SnapshotTensor:
    """Returns a tensor of bytes that are no longer written to."""
    entry = TensorEntry(0, 0, "", data.dtype.name, list(data.shape), True)
    return SnapshotTensor(entry, Pin(data, frozen=True))
