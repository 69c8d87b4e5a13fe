"""One restored checkpoint: what was matched at once, and what is matched later.

A variable that the program makes after the restore gets its value when it is attached:
set as an attribute of the `Checkpoint` or of a `zs.Module` that was matched. A restore
watches these modules until another restore replaces it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from zstrat.checkpoint import MANIFEST, Manifest
from zstrat.coordinator import PerWorkerIterator
from zstrat.errors import InvalidArgumentError
from zstrat.variables import Module, unwatch, watch

from ._graph import SAVE_COUNTER, is_trackable
from ._load import check, load, remember
from ._match import Matching, MatchResult
from ._operation import FileThread, in_turn, retried_if_restored, run_blocking
from ._tensors import stored_graph

if TYPE_CHECKING:
    from ._operation import ClusterMoment


class Restore:
    """The restore of one checkpoint into the objects below ``root``.

    Args:
        is_partial: Objects that the checkpoint lacks keep their values, and slots in
            the checkpoint that an optimizer does not have are ignored.
        grows: Variables may have more rows than in the checkpoint.
        skips_counter: The checkpoint's count of saves is not restored.
    """

    def __init__(
        self,
        root: Any,
        path: str,
        is_partial: bool,
        skips_counter: bool,
        grows: bool,
    ) -> None:
        self.path, self._grows = path, grows
        self._root, self.is_partial = root, is_partial
        self._skips_counter = skips_counter
        self._matching: Matching | None = None
        self._taken = MatchResult()
        self._moments: list[ClusterMoment] = []
        self._watched: list[Module] = []

    async def begin(self) -> None:
        """Reads, checks and matches the checkpoint, and loads all values that were
        matched.

        Raises:
            NotFoundError: The folder is not a checkpoint, or lacks something of the
                program.
            DataLossError: The checkpoint is damaged; nothing was restored.
            InvalidArgumentError: Shapes or dtypes differ; nothing was restored.
            PSUnavailableError: A server is gone.
            OSError: As reported by the system.

        Cancellation, PSUnavailableError and OSError: some of the variables may have
        been restored.
        """
        async with FileThread() as disk:
            manifest = await disk(Manifest.of, self.path)
            nodes = stored_graph(manifest, os.path.join(self.path, MANIFEST))
            counter = nodes[0].children.get(SAVE_COUNTER)
            skip = {counter} if self._skips_counter and counter is not None else set()
            matching = Matching(
                nodes, manifest.tensors, frozenset(skip), grows=self._grows
            )
            found = matching.find(self._root, 0)
            self._require(found)
            # All bytes before any value: what is damaged is known while nothing has
            # changed. Last, as it takes the longest.
            await check(self.path, manifest, disk)
        await retried_if_restored(found.components, lambda: self._load(found))
        # Only now is it the one that attributes are restored from: a restore that fails
        # leaves the one before in force.
        self._matching = matching
        self._accept(found)

    def attached(self, holder: Any, name: str, value: Any) -> None:
        """Restores the values of an object that was just set as the attribute ``name``.

        Raises: As `begin`; the attribute is set all the same.
        """
        named = not isinstance(holder, Module)
        if self._matching is None or not is_trackable(value, named=named):
            return
        for index in self._matching.child_of(holder, name):
            found = self._matching.find(value, index, name, named=named)
            self._require(found)
            run_blocking(self._load_later(found))
            self._accept(found)

    def refresh(self) -> list[str]:
        """Loads the values of objects that were added to containers since the last
        load; returns the names of the program's objects that the checkpoint lacks."""
        if self._matching is None:
            return []
        found = self._matching.find(self._root, 0)
        found.require_fit(self.path)
        if found.is_new:
            run_blocking(self._load_later(found))
            self._accept(found)
        return found.missing

    def unused(self) -> list[str]:
        """Paths of stored variables, optimizers, slots and iterators that were matched
        with nothing in the program."""
        if self._matching is None:
            return []
        return self._matching.unused()

    def end(self) -> None:
        """Stops watching modules, because another restore replaces this one."""
        for module in self._watched:
            unwatch(module, self.attached)
        self._watched = []
        self._matching = None

    def _require(self, found: MatchResult) -> None:
        found.require_fit(self.path)
        if not self.is_partial:
            found.require_complete(self.path)

    async def _load_later(self, found: MatchResult) -> None:
        async with in_turn(self._root):
            await retried_if_restored(found.components, lambda: self._load(found))

    async def _load(self, found: MatchResult) -> None:
        # First: a worker has to be asked, and a refusal must change nothing.
        await self._require_places(found)
        async with FileThread() as disk:
            moments = await load(self.path, found, disk)
        # What comes later belongs to the moment of the first load.
        self._moments = self._moments or moments
        self._taken.add(found)
        await remember(self.path, self._taken, self._moments)

    async def _require_places(self, found: MatchResult) -> None:
        """Checks with the workers that the stored positions of their iterators are of
        the same data.

        Raises:
            InvalidArgumentError: Positions are of other data; names the iterators.
        """
        refused = MatchResult()
        for iterator, _, state in found.places:
            if isinstance(iterator, PerWorkerIterator):
                try:
                    await iterator.require_fit_async(state)
                except InvalidArgumentError as error:
                    refused.wrong.append(f"  {error}")
        refused.require_fit(self.path)

    def _accept(self, found: MatchResult) -> None:
        if self._matching is not None:
            for module in self._matching.accept(found):
                watch(module, self.attached)
                self._watched.append(module)


class RestoreStatus:
    """The outcome of a restore, with TF's methods. Each method returns the status
    itself.

    A restore is strict: it has raised if, at that time, the program had something that
    the checkpoint lacks, or that has another shape or dtype there. The opposite, stored
    values that the program has not taken (yet), is not an error before
    `assert_consumed`.
    """

    def __init__(self, restore: Restore | None) -> None:
        self._restore = restore

    @property
    def path(self) -> str | None:
        """The folder that was restored; None: no folder was given."""
        return None if self._restore is None else self._restore.path

    @property
    def unused(self) -> list[str]:
        """Paths of stored variables, optimizers and iterators that the program has not
        taken (yet), and of slots that the program's optimizers do not have."""
        return [] if self._restore is None else self._restore.unused()

    def assert_consumed(self) -> RestoreStatus:
        """Checks that program and checkpoint have the same variables, optimizers and
        iterators.

        Variables that were added to lists and dicts since the restore get their values.

        Raises:
            AssertionError: The program or the checkpoint has more than the other, or
                there was no checkpoint; says what.
        """
        self.assert_existing_objects_matched()
        if unused := self.unused:
            raise AssertionError(
                f"checkpoint {self.path} has values that nothing in this program has "
                "taken: " + ", ".join(unused)
            )
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Checks that everything that the program has came from the checkpoint; see
        `assert_consumed`.

        Raises:
            AssertionError: The program has more, or there was no checkpoint; says what.
        """
        if self._restore is None:
            raise AssertionError("no checkpoint was restored: the path was None")
        if missing := self._restore.refresh():
            raise AssertionError(
                f"checkpoint {self.path} lacks what this program has:\n"
                + "\n".join(missing)
            )
        return self

    def expect_partial(self) -> RestoreStatus:
        """Allows checkpoint and program to differ from now on: an object that is
        created later and is not in the checkpoint keeps its value. What exists already
        must have been in the checkpoint: see ``restore(path, expect_partial=True)``."""
        if self._restore is not None:
            self._restore.is_partial = True
        return self
