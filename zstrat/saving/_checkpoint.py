"""``zs.Checkpoint``: named objects of a program, saved and restored as one."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from zstrat.checkpoint import absolute, local_path, make_folder
from zstrat.variables import Variable, creator

from ._graph import SAVE_COUNTER, Tracked, graph_of, is_trackable
from ._operation import FileThread, in_turn, run_blocking
from ._restore import Restore, RestoreStatus
from ._save import save
from ._state import update_state, writer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._tables import Base

_OWN: Final = frozenset({"_tracked", "_restore", SAVE_COUNTER})


class Checkpoint(Tracked):
    """Objects to be saved and restored together, each under a name.

    Args:
        root: An object whose own children are added under their names; may be left out.
        trackables: ``zs.Variable``, ``zs.ShardedVariable``, ``zs.Optimizer``,
            ``zs.Module``, other checkpoints, iterators of a dataset, and pytrees of
            these. Attributes that are set later are added, too.

    Saves values and the slots of optimizers; each variable is one array, whatever its
    partitioning. Variables are found again by these names and by the attributes, keys
    and indices below them, not by the names of variables. Of an iterator, the position
    in its data is saved: see `zs.data.CheckpointableIterator`.

    Raises:
        TypeError: An object has another type, or contains an array or a number where a
            variable should be, or has two keys with the same text (1 and "1").
    """

    _tracked: dict[str, Any]
    _restore: Restore | None
    save_counter: Variable
    """Number of calls of `save`: an int64 variable of this process."""

    def __init__(self, root: Any = None, **trackables: Any) -> None:
        # Past `__setattr__`, which tracks what it is given and refuses these names.
        counter = local_counter(SAVE_COUNTER)
        self.__dict__.update(
            _tracked={SAVE_COUNTER: counter}, _restore=None, save_counter=counter
        )
        if root is not None:
            trackables = {"root": root, **trackables}
        for name, value in trackables.items():
            if name in _OWN:
                raise ValueError(
                    f"Checkpoint({name}=...): Checkpoint has an attribute of that "
                    f"name; expected any name but {', '.join(sorted(_OWN))}"
                )
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            raise AttributeError(
                f"Checkpoint.{name} cannot be set: Checkpoint has an attribute of that "
                "name; give the object another one"
            )
        _check(name, value)
        object.__setattr__(self, name, value)
        self._tracked[name] = value
        # Last: if it cannot be restored, the attribute is set all the same.
        if self._restore is not None:
            self._restore.attached(self, name, value)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        self._tracked.pop(name, None)

    @property
    def tracked(self) -> dict[str, Any]:
        return dict(self._tracked)  # a copy: a save in a thread walks through it

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Saves to the folder ``<file_prefix>-<N>`` and returns its path; ``N`` is the
        `save_counter`, which this call increments.

        What is saved is one moment of the training, between two steps: the effects of
        each step, and of each update that the program makes by itself, are saved
        completely or not at all, and the manifest lists the saved steps
        (``metadata["steps"]``: all ``below`` a number, and some ``besides``). So steps
        that have not begun wait until the running steps have ended; a step that runs on
        a worker that stops answering is first run again on another worker. Training
        continues while the values are written; parameter servers that can access the
        folder write in parallel. Programs that share parameter servers
        (``BetweenGraphStrategy``) do not wait for each other: then ``steps`` is null,
        and each server is saved at another moment.

        Saves and restores in several threads that have an object in common run one
        after the other.

        For variables with ``synchronization=ON_READ`` (metrics) the aggregated value of
        all replicas is saved. With several processes, saving such a variable is a
        collective: all processes save, at the same place of the program, and those
        whose ``strategy.extended.should_checkpoint`` is false save to a separate
        folder, which they may delete. Without such variables the chief saves alone.

        Raises:
            ValueError: ``file_prefix`` is a URL, such as gs://bucket/x, and not a path.
            CollectiveTimeoutError, PeerLostError: Another process did not save such a
                variable; names both.
            PSUnavailableError: A parameter server is gone. With
                ``on_ps_loss="restore"`` the call instead waits, and saves when all
                servers are there again.
            UnavailableError: No worker is there to finish a step whose worker was lost.
            BusyError: Another program saves to the same folder; says which.
            AlreadyExistsError: The folder has a ``manifest.json`` of another program.
            ResourceExhaustedError: A disk is full.
            NotFoundError: The parent folder could not be made, for example because a
                file has its name; says which.
            OSError: As reported by the system.
        After any of these errors, earlier checkpoints are unchanged.
        """
        return run_blocking(
            self.save_async(file_prefix), "checkpoint.save_async(file_prefix)"
        )

    async def save_async(self, file_prefix: str | os.PathLike[str]) -> str:
        """Does what `save` does, without blocking the running loop.

        Cancellation: nothing was saved, and earlier checkpoints are unchanged. If the
        cancellation comes at the very end, the checkpoint was saved but is not counted:
        the next save replaces it.
        """
        # As by TF: what follows the last slash is the beginning of a name, or empty.
        above, prefix = os.path.split(local_path(file_prefix))
        directory = absolute(above)
        async with in_turn(self), FileThread() as disk:
            number = int(self.save_counter.numpy()) + 1
            name = f"{prefix}-{number}"
            path = os.path.join(directory, name)
            await disk(make_folder, directory)
            lock = await disk(writer_of, directory)
            try:
                await self._write(path, number)
                # Listed when it is complete; if the program is killed in between, the
                # next reader of the folder finds it without the list.
                await disk(
                    update_state,
                    directory,
                    lambda old: old.with_saved(name, time.time()),
                )
            finally:
                del lock  # a caller that catches an error keeps this frame
        return path

    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Saves to exactly this folder, without incrementing `save_counter`; returns
        the path. See `save`. An existing checkpoint is replaced when the new one is
        complete."""
        return run_blocking(
            self.write_async(file_prefix), "checkpoint.write_async(file_prefix)"
        )

    async def write_async(self, file_prefix: str | os.PathLike[str]) -> str:
        """Does what `write` does, without blocking the running loop; see
        `save_async`."""
        if not local_path(file_prefix):
            raise ValueError("file_prefix: expected a folder, got an empty text")
        path = absolute(file_prefix)
        async with in_turn(self):
            async with FileThread() as disk:
                await disk(make_folder, os.path.dirname(path))
            await save(graph_of(self, skip=frozenset({SAVE_COUNTER})), path)
        return path

    async def _write(
        self,
        path: str,
        number: int,
        metadata: Callable[[], Mapping[str, Any]] = dict,
        base: Base | None = None,
    ) -> None:
        """Saves as number ``number``, after all earlier saves and restores of the same
        objects. The counter is incremented only if that succeeds. ``base``: a
        checkpoint to which this one is saved as a difference."""
        before = self.save_counter.numpy()
        # The checkpoint holds its own number, so that the next one gets the next.
        self.save_counter.assign(np.int64(number))
        try:
            await save(graph_of(self), path, metadata, base)
        except BaseException:  # to the caller of save
            self.save_counter.assign(before)
            raise

    def restore(
        self,
        save_path: str | os.PathLike[str] | None,
        *,
        expect_partial: bool = False,
        partial: Literal["rows"] | None = None,
    ) -> RestoreStatus:
        """Restores a checkpoint folder that `save` or `write` has written.

        The checkpoint may have been written with other numbers of parameter servers and
        other partitioners. A variable that the program creates later gets its value
        when it is set as an attribute of this object or of a ``zs.Module`` below it.

        Args:
            save_path: Path of the folder. None restores nothing, for the result of
                `latest_checkpoint` in an empty folder.
            expect_partial: Objects that are not in the checkpoint keep their values,
                and slots in the checkpoint that an optimizer does not have are ignored.
            partial: ``"rows"``: a variable may have more rows than in the checkpoint.
                The rows of the checkpoint are restored and the others keep their
                values. The optimizer's slots of the other rows get their initial
                values, for which the optimizer must know its tree (``params=``).

        Raises:
            NotFoundError: The folder is not a checkpoint, or lacks something that the
                program has now; says what. Nothing was restored.
            ValueError: ``partial`` is something else.
            InvalidArgumentError: Shapes or dtypes differ, the checkpoint has slots that
                an optimizer does not have, or one variable has two names under which
                the checkpoint has different values; names all of them. Nothing was
                restored.
            DataLossError: The checkpoint is damaged; names file and tensor. Nothing was
                restored.
            PSUnavailableError: A parameter server is gone.
            OSError: As reported by the system.
        """
        return run_blocking(
            self.restore_async(
                save_path, expect_partial=expect_partial, partial=partial
            ),
            "checkpoint.restore_async(save_path)",
        )

    async def restore_async(
        self,
        save_path: str | os.PathLike[str] | None,
        *,
        expect_partial: bool = False,
        partial: Literal["rows"] | None = None,
    ) -> RestoreStatus:
        """Does what `restore` does, without blocking the running loop.

        Cancellation: some of the variables may have been restored.
        """
        return await self._begin(
            save_path, expect_partial, partial, skips_counter=False
        )

    def read(
        self,
        save_path: str | os.PathLike[str] | None,
        *,
        expect_partial: bool = False,
        partial: Literal["rows"] | None = None,
    ) -> RestoreStatus:
        """Restores everything except `save_counter`; otherwise as `restore`."""
        work = self.read_async(
            save_path, expect_partial=expect_partial, partial=partial
        )
        return run_blocking(work, "checkpoint.read_async(save_path)")

    async def read_async(
        self,
        save_path: str | os.PathLike[str] | None,
        *,
        expect_partial: bool = False,
        partial: Literal["rows"] | None = None,
    ) -> RestoreStatus:
        """Does what `read` does, without blocking the running loop; see
        `restore_async`."""
        return await self._begin(save_path, expect_partial, partial, skips_counter=True)

    async def _begin(
        self,
        path: str | os.PathLike[str] | None,
        is_partial: bool,
        partial: str | None,
        *,
        skips_counter: bool,
    ) -> RestoreStatus:
        if partial not in (None, "rows"):
            raise ValueError(f"partial={partial!r:.80}: expected 'rows' or None")
        if path is None:
            return RestoreStatus(None)
        grows = partial == "rows"
        begun = Restore(self, absolute(path), is_partial, skips_counter, grows)
        async with in_turn(self):
            await begun.begin()
            # Only now: if this one fails, the one before still serves new attributes.
            if self._restore is not None:
                self._restore.end()
            self.__dict__["_restore"] = begun
        return RestoreStatus(begun)

    def __repr__(self) -> str:
        names = [name for name in self._tracked if name != SAVE_COUNTER]
        return f"<zstrat.Checkpoint of {', '.join(names) or 'nothing'}>"


def _check(name: str, value: Any) -> None:
    if not is_trackable(value, strict=True):
        raise TypeError(
            f"Checkpoint({name}=...) holds zs.Variable, zs.Optimizer, zs.Module, "
            "iterators of datasets and containers of them, got "
            f"{type(value).__name__} {value!r:.40}: a restore could not replace it in "
            "place. Make it a zs.Variable"
        )
    graph_of(value, name)  # says what in it cannot be saved


def local_counter(name: str) -> Variable:
    """Returns a counter variable that is stored in this process, whatever strategy
    scope the program is in."""
    # Outside of all scopes: a strategy would put the count on a server, or mirror it.
    token = creator.set(None)
    try:
        return Variable(np.int64(0), trainable=False, name=name)
    finally:
        creator.reset(token)
