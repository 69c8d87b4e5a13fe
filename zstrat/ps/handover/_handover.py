"""Hands what a parameter server holds from a process that ends to the one after it.

The process that is told to stop answers nothing any more when it has finished what it
had accepted, and leaves what it holds in a state folder; who asks it meanwhile hears
nothing, sees it leave, and asks again. The next process loads all of it and removes the
state before it answers anybody. So a state is used once, and is the newest that its
process had: who is killed later has none, and comes back empty.

Peers know a parameter server by its incarnation, which stands for what it holds. It is
handed over with the state, and so are those of the copies that it keeps for others, at
their addresses. Law of the file: **an incarnation answers for one state at a time**:
the old process is silent before the state is complete, and the new one answers when it
is removed. All that a process had is handed over, or nothing.

With second copies another process may have gone on meanwhile. So what comes back of
such a store serves nobody until the coordinator says that it does, who knows the views:
see `StoreRole`.
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
from zstrat.ps._thread import ComputeThread
from zstrat.ps.engine._engine import OptimizerEngine
from zstrat.ps.replication._copying import StoreCopy
from zstrat.ps.replication._replay import replay
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
    """What a process was to a store."""

    ALONE = "alone"
    """No other process had a copy of it with all that was acknowledged: who comes next
    serves it."""
    PRIMARY = "primary"
    """Another one had, and may serve it: who comes next waits for `DetachBackup`."""
    BACKUP = "backup"
    """It had a copy with all that was acknowledged: who comes next may be promoted."""
    NOTHING = "nothing"
    """There is nothing of it, or nothing that is whole."""


@dataclass(frozen=True, slots=True)
class HandedOverStore:
    """What a process has of one store.

    Args:
        number: Of the store.
        view: The newest one of it that the process knew of.
        store: What it holds; None: nothing.
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
    """What the process before has left: its own store, and copies that it kept.
    ``owner`` has no connection yet."""

    incarnation: int
    owner: Owner
    own: HandedOverStore
    copies: Sequence[HandedOverStore] = ()


@final
class Handover:
    """Hands over what one parameter server holds.

    Args:
        folder: Its state folder, which others may not write to.
        task: Names it in errors.
        make_thread: Makes the thread that writes.

    Raises:
        PermissionDeniedError, OSError: As `StateFiles`.
    """

    def __init__(
        self,
        folder: Path,
        index: int,
        task: str,
        make_thread: MakeThread = ComputeThread,
    ) -> None:
        self._files, self._task = StateFiles(folder, index), task
        self._make_thread = make_thread

    async def leave(self, left: Inherited, patience: float) -> bool:
        """Leaves what is here for the next process.

        Returns:
            False if it could not be written within ``patience`` seconds; the log says
            why.

        Cancellation: there is no state.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(patience):
                await self.write(left)
        except TimeoutError:
            words = f"it was not written within ZSTRAT_HANDOVER={patience:g} s"
        except Exception as error:  # goes to the log: the process ends all the same
            words = f"{type(error).__name__}: {error}"
        else:
            log.info("left %s in %.1f s", _words(left), loop.time() - began)
            return True
        log.error("what this process holds is lost with it: %s", words)
        return False

    async def write(self, left: Inherited) -> None:
        """Writes what the stores hold, which change no more.

        Raises:
            ZstratError, OSError: It could not be written; there is no state.

        Cancellation: there is no state.
        """
        thread = self._make_thread(f"state {self._task}")
        disk = DiskThread(thread, self._task)
        path, stores = self._files.new_path(), StoreWriting()
        facts = {
            "incarnation": left.incarnation,
            "owner": _plain(left.owner),
            "stores": [_told(each, stores) for each in (left.own, *left.copies)],
        }
        names = [str(number) for number in range(len(stores.tensors))]
        snapshot = ServerSnapshot(stores.tensors)
        try:
            # If this fails half-way, no older state may be taken for it.
            await disk.run(self._files.remove)
            writing = SnapshotWrite(snapshot, disk, _no_turn)
            written = await writing.run(path, snapshot.tensors, names)
            commit = partial(self._files.commit, path, written.digests, facts)
            await disk.run(commit)
        finally:
            await thread.close(asyncio.get_running_loop().time() + 1.0)

    def take(
        self, load_code: Callable[[bytes], object], *, largest: int
    ) -> Inherited | None:
        """Loads what the process before has left; None if there is nothing. A state
        that cannot be used is removed, and the log says why. Any other stays until
        `took`, for the next process, should this one die before.

        Blocks: to be called before anybody is served.

        Raises:
            OSError: It cannot be removed.
        """
        try:
            with self._files.open() as state:
                if state is not None:
                    return self._inherited(state, load_code, largest)
            self._files.remove()  # what somebody has left who was killed
            return None
        except Exception as error:  # goes to the log: nobody else can do anything
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
        """Removes the state, as it is used now and nobody may use it again.

        Raises:
            OSError: It cannot be removed, so nothing may be answered.
        """
        self._files.remove()

    def _inherited(
        self, state: StateReader, load_code: Callable[[bytes], object], largest: int
    ) -> Inherited:
        facts, stores = state.facts, []
        for told in facts["stores"]:
            store, task = None, f"/job:ps/task:{told['number']}"
            if told["store"] is not None:
                store = Store(OptimizerEngine(load_code), task=task, largest=largest)
                restore(store, told["store"], state)
            role = StoreRole(told["role"])
            stores.append(HandedOverStore(**{**told, "role": role, "store": store}))
        owner, incarnation = _owner(facts["owner"]), int(facts["incarnation"])
        left = Inherited(incarnation, owner, stores[0], stores[1:])
        log.info(
            "goes on with what the process before has left: %s of session %#x of %s, "
            "incarnation %x",
            _words(left),
            owner.session,
            owner,
            incarnation,
        )
        return left


def _told(left: HandedOverStore, stores: StoreWriting) -> dict[str, Any]:
    return {
        "number": left.number,
        "role": left.role.value,
        "view": left.view,
        "store": None if left.store is None else stores.add(left.store),
        "address": left.address,
        "incarnation": left.incarnation,
    }


def _words(left: Inherited) -> str:
    """The stores by their roles, with how many variables they have, for the log."""
    own = left.own
    held = 0 if own.store is None else len(own.store)
    if own.role is StoreRole.ALONE:
        return f"{held} variables"
    roles = "; ".join(
        f"store {each.number}: {each.role.value}, view {each.view}"
        for each in (own, *left.copies)
    )
    return f"{held} variables ({roles})"


def _no_turn(names: object) -> contextlib.AbstractAsyncContextManager[None]:
    """A turn that has not to be waited for: nobody else uses what is left."""
    return contextlib.nullcontext()


def _plain(owner: Owner) -> dict[str, Any]:
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
    return Owner(**{**plain, "hello": Hello(**plain["hello"]), "peer": AbsentPeer()})


Facts = dict[str, Any]
"""Of JSON's kinds."""


@final
class StoreWriting:
    """Stores on their way to a file, each told as it is told to a backup.

    The messages that make it on an empty store (`StoreCopy`) are arrays of the file, a
    header and its frames each; what is pinned follows in parts, as values of the file.
    Belongs to the owner of the stores, while nothing is under way there.
    """

    def __init__(self) -> None:
        self.tensors: list[SnapshotTensor] = []
        """The arrays, in order. Released by whoever has them."""

    def add(self, store: Store) -> Facts:
        """Adds a store as it is now, without a copy; returns the facts by which
        `restore` finds its arrays."""
        copy, at = StoreCopy(store), len(self.tensors)
        # Values first: they start where the disk takes them from memory as they are.
        self.tensors += copy.tensors
        told = [_frames(message) for message in copy.messages]
        self.tensors += [tensor for frames in told for tensor in frames]
        return {
            "at": at,
            "values": [list(tensor.entry[:3]) for tensor in copy.tensors],
            "messages": [len(frames) for frames in told],
            "counts": asdict(store.counts),
        }


def restore(store: Store, facts: Facts, arrays: StateReader) -> None:
    """Fills an empty store, which nobody else has seen. It makes the messages as a
    backup does (`replay`), so what the store answers next depends on nothing that is
    not told there, but for what no backup needs: counts.

    Raises:
        KeyError, TypeError, ValueError, ProtocolError: The arrays do not belong to the
            facts.
        Exception: Whatever loading an optimizer raises.
    """
    values, at = facts["values"], facts["at"]
    numbers = count(at + len(values))
    for frames in facts["messages"]:
        header, *bodies = [arrays.read(next(numbers)) for _ in range(frames)]
        _make(store, decode(header, bodies, Limits())[1])
    for number, (key, optimizer, leaf) in enumerate(values, at):
        start = 0
        for part in arrays.parts(number):
            data = np.frombuffer(part, np.uint8)
            _make(store, CopyParts([CopiedPart(key, optimizer, leaf, start)], (data,)))
            start += len(part)
    for name, number in facts["counts"].items():
        setattr(store.counts, name, int(number))


def _make(store: Store, change: Message) -> None:
    for plan in replay(store, change):
        plan.compute()


def _frames(message: Message) -> list[SnapshotTensor]:
    header, frames = encode(message)
    return [_bytes(each) for each in (np.frombuffer(header, np.uint8), *frames)]


def _bytes(data: np.ndarray) -> SnapshotTensor:
    """Bytes that nobody writes to any more."""
    entry = TensorEntry(0, 0, "", data.dtype.name, list(data.shape), True)
    return SnapshotTensor(entry, Pin(data, frozen=True))
