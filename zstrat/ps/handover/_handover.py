"""Hands what a parameter server holds from a process that ends to the one after it.

The process that is told to stop answers nothing any more when it has finished what it
had accepted, and leaves what it holds in a state folder; who asks it meanwhile hears
nothing, sees it leave, and asks again. The next process loads all of it and removes the
state before it answers anybody. So a state is used once, and is the newest that there
is: who is killed later has none, and comes back empty.

Peers know a parameter server by its incarnation, which stands for what it holds. It is
handed over with the state. Law of the file: **an incarnation answers for one state at a
time**: the old process is silent before the state is complete, and the new one answers
when it is removed.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

from zstrat.ps._thread import ComputeThread
from zstrat.ps.engine._engine import OptimizerEngine
from zstrat.ps.snapshots._file_thread import DiskThread
from zstrat.ps.snapshots._snapshot_write import SnapshotWrite
from zstrat.ps.store._store import Store
from zstrat.wire import Hello, Owner

from ._state_files import StateFiles
from ._store_state import captured, restore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zstrat.ps.snapshots._snapshot_write import Turn

    from ._state_files import StateReader

log = logging.getLogger("zstrat.ps")


@dataclass(frozen=True, slots=True)
class Inherited:
    """What the process before has left. ``owner`` has no connection yet."""

    incarnation: int
    owner: Owner
    store: Store


@final
class Handover:
    """That of one parameter server.

    Args:
        folder: Its state folder, which others may not write to.
        task: Names it in errors.

    Raises:
        PermissionDeniedError, OSError: As `StateFiles`.
    """

    def __init__(self, folder: Path, index: int, task: str) -> None:
        self._files, self._task = StateFiles(folder, index), task

    async def leave(
        self,
        store: Store,
        owner: Owner,
        incarnation: int,
        turn: Turn,
        patience: float,
    ) -> bool:
        """Leaves what is here for the next process, if that can be done in ``patience``
        seconds; the log says why not.

        Cancellation: there is no state.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(patience):
                await self.write(store, owner, incarnation, turn)
        except TimeoutError:
            words = f"it was not written within ZSTRAT_HANDOVER={patience:g} s"
        except Exception as error:  # goes to the log: the process ends all the same
            words = f"{type(error).__name__}: {error}"
        else:
            log.info("left %d variables in %.1f s", len(store), loop.time() - began)
            return True
        log.error("what this process holds is lost with it: %s", words)
        return False

    async def write(
        self, store: Store, owner: Owner, incarnation: int, turn: Turn
    ) -> None:
        """Writes what the store holds, which changes no more.

        Raises:
            ZstratError, OSError: It could not be written; there is no state.

        Cancellation: there is no state.
        """
        thread = ComputeThread(f"state {self._task}")
        disk = DiskThread(thread, self._task)
        state = captured(store)
        path, tensors = self._files.new_path(), state.snapshot.tensors
        names = [str(number) for number in range(len(tensors))]
        facts = {
            "incarnation": incarnation,
            "owner": _plain(owner),
            "store": state.facts,
        }
        try:
            await disk.run(self._files.remove)
            writing = SnapshotWrite(state.snapshot, disk, turn)
            written = await writing.run(path, tensors, names)
            commit = partial(self._files.commit, path, written.digests, facts)
            await disk.run(commit)
        finally:
            await thread.close(asyncio.get_running_loop().time() + 1.0)

    def take(
        self, load_code: Callable[[bytes], object], *, largest: int
    ) -> Inherited | None:
        """What the process before has left, if it has. A state that cannot be used is
        removed, and the log says why. Until `took` it is there for the next process,
        should this one die.

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
        """The state is used: nobody else may.

        Raises:
            OSError: It cannot be removed, so nothing may be answered.
        """
        self._files.remove()

    def _inherited(
        self, state: StateReader, load_code: Callable[[bytes], object], largest: int
    ) -> Inherited:
        store = Store(OptimizerEngine(load_code), task=self._task, largest=largest)
        facts = state.facts
        restore(store, facts["store"], state)
        owner, incarnation = _owner(facts["owner"]), int(facts["incarnation"])
        log.info(
            "goes on with what the process before has left: %d variables of session "
            "%#x of %s, incarnation %x",
            len(store),
            owner.session,
            owner,
            incarnation,
        )
        return Inherited(incarnation, owner, store)


def _plain(owner: Owner) -> dict[str, Any]:
    return {
        "session": owner.session,
        "hello": asdict(owner.hello),
        "since": owner.since,
        "alive": owner.alive,
        "name": owner.name,
        "origin": owner.origin,
    }


def _owner(plain: dict[str, Any]) -> Owner:
    return Owner(**{**plain, "hello": Hello(**plain["hello"]), "peer": object()})
