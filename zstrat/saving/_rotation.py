"""``zs.CheckpointManager``: saves, keeps and deletes numbered checkpoints."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.checkpoint import absolute, make_folder, remove
from zstrat.errors import DataLossError, InvalidArgumentError, NotFoundError
from zstrat.variables import user_line

from ._graph import graph_of
from ._operation import FileThread, in_turn, run_blocking
from ._state import (
    SavedList,
    clean,
    name_given,
    prefix_of,
    read_state,
    update_state,
    writer_of,
)
from ._tables import Base, cuts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zstrat.checkpoint import FolderLock

    from ._checkpoint import Checkpoint


log: Final = logging.getLogger("zstrat.saving")


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, and an older one was restored instead."""


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike[str], checkpoint_name: str | None = None
) -> str | None:
    """Returns the path of the newest complete checkpoint in a folder; None if there is
    none.

    Args:
        checkpoint_name: Only checkpoints called ``<checkpoint_name>-<N>``.

    Raises:
        NotFoundError: ``checkpoint_dir`` is a file, or is below one; names the file.
        TypeError: The name is not text.
    """
    directory = absolute(checkpoint_dir)
    prefix = None if checkpoint_name is None else name_given(checkpoint_name)
    names = read_state(directory, prefix).names
    return os.path.join(directory, names[-1]) if names else None


@final
class CheckpointManager:
    """Saves numbered checkpoints to a folder and deletes the oldest ones.

    The manager continues with the checkpoints of its name that are in the folder. It
    never deletes checkpoints of other names, for example of other managers, and
    restores them only if it has none itself. From its first save until `close` (or
    until the manager is dropped) no other process can save to the folder.

    Args:
        max_to_keep: The number of newest checkpoints to keep; None: all.
        keep_checkpoint_every_n_hours: Of those that would be deleted, one is kept
            permanently each time that so many hours have passed, per name.
        checkpoint_name: Name of the folders: ``<checkpoint_name>-<N>``.
        step_counter: A variable, or a callable, with the number of the current step.
        checkpoint_interval: Steps between two checkpoints; `save` does nothing before.
        init_fn: Called by `restore_or_initialize` if there is no checkpoint.
        full_every: One of so many checkpoints has all rows of tables that were created
            with ``follow_changes=True``. The others have only the rows that have
            changed since, and hard links to the files of the full one, so each can be
            restored by itself.
        checkpoint_interval_s: Seconds between two checkpoints; `save` does nothing
            before, so that it may be called in each round of a loop. With
            ``checkpoint_interval``, too, it saves when either has passed.
        clock: Returns seconds since 1970.

    Raises:
        ValueError: ``max_to_keep`` is below 1, there is an interval of steps and no
            counter, or one of seconds that is not above 0.
        TypeError: ``max_to_keep`` is not an integer, hours or an interval are not
            numbers, or the name is not text.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        *,
        checkpoint_interval_s: float | None = None,
        full_every: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for argument, number in (
            ("keep_checkpoint_every_n_hours", keep_checkpoint_every_n_hours),
            ("checkpoint_interval", checkpoint_interval),
            ("checkpoint_interval_s", checkpoint_interval_s),
        ):
            _require_number(argument, number)
        keep = None if max_to_keep is None else _integer("max_to_keep", max_to_keep)
        if keep is not None and keep <= 0:
            raise ValueError(f"max_to_keep={keep}: expected 1 or more, or None")
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError(
                "step_counter should be passed if checkpoint_interval is not None"
            )
        if checkpoint_interval_s is not None and not checkpoint_interval_s > 0:
            raise ValueError(
                f"checkpoint_interval_s={checkpoint_interval_s}: expected seconds "
                "above 0, or None"
            )
        if (every := _integer("full_every", full_every)) <= 0:
            raise ValueError(f"full_every={full_every}: expected 1 or more")
        name = name_given(checkpoint_name)
        if not name or "/" in name:
            raise ValueError(
                f"checkpoint_name={checkpoint_name!r}: expected a name without '/'"
            )
        self._checkpoint = checkpoint
        self._directory = absolute(directory)
        # None are kept for good every 0 hours, as in TF.
        self._keep, self._hours = keep, keep_checkpoint_every_n_hours or None
        self._name, self._clock = name, clock
        self._counter, self._interval = step_counter, checkpoint_interval
        self._interval_s = checkpoint_interval_s
        self._init_fn = init_fn
        self._last_step: int | None = None
        self._last_at: float | None = None
        self._full_every, self._differences = every, 0
        self._base: Base | None = None
        """The last checkpoint that this object saved with all rows of tables; None if
        it saved none."""
        self._lock: FolderLock | None = None
        self._damaged: set[str] = set()
        self._began = clock()

    @property
    def checkpoint(self) -> Checkpoint:
        return self._checkpoint

    @property
    def directory(self) -> str:
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the checkpoints that the manager may delete, the oldest first."""
        return self._paths(self._own())

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest checkpoint, which `restore_or_initialize` restores: the
        newest of the manager's name or, if there is none, as in TensorFlow, of any name
        in the folder."""
        paths = self._paths(self._restorable())
        return paths[-1] if paths else None

    def _own(self) -> SavedList:
        return read_state(self._directory, self._name).without(self._damaged)

    def _restorable(self) -> SavedList:
        """Returns the checkpoints to try to restore, the newest last. Damaged ones are
        included only if there are no others, so that no program starts training from
        the beginning in a folder with checkpoints."""
        for saved in (self._own(), read_state(self._directory, self._name)):
            if saved.saved:
                return saved
        return read_state(self._directory)

    def _paths(self, saved: SavedList) -> list[str]:
        return [os.path.join(self._directory, name) for name in saved.names]

    def save(
        self, checkpoint_number: Any = None, check_interval: bool = True
    ) -> str | None:
        """Saves a checkpoint and deletes old ones; returns its path, or None if the
        interval has not passed.

        Args:
            checkpoint_number: An integer or variable to use instead of the
                `save_counter`, which is incremented all the same. A checkpoint of that
                number is replaced.
            check_interval: False: saves even if the interval has not passed.

        Raises:
            ValueError: ``checkpoint_number`` is not an integer, or is below 0.
            Exception: Otherwise as `zs.Checkpoint.save`. Earlier checkpoints are
                unchanged.
        """
        return run_blocking(
            self.save_async(checkpoint_number, check_interval), "manager.save_async()"
        )

    async def save_async(
        self, checkpoint_number: Any = None, check_interval: bool = True
    ) -> str | None:
        """Does what `save` does, without blocking the running loop.

        Cancellation: nothing was saved, and earlier checkpoints are unchanged; or the
        new checkpoint was saved, and the next call deletes old ones.
        """
        async with in_turn(self._checkpoint), FileThread() as disk:
            # Off the loop: a counter on a parameter server is read by a request.
            step = await disk(self._step)
            if check_interval and not self._is_due(step):
                return None
            await disk(make_folder, self._directory)
            # Kept until `close`: no other program may rotate the list in between.
            if self._lock is None:
                self._lock = await disk(writer_of, self._directory)
            await disk(clean, self._directory, self._name)
            # The counter grows when the checkpoint is written, so not in a save that
            # fails.
            count = int(self._checkpoint.save_counter.numpy()) + 1
            number = count
            if checkpoint_number is not None:
                number = _numbered(checkpoint_number)
            name = f"{self._name}-{number}"
            path = os.path.join(self._directory, name)

            def note() -> Mapping[str, Any]:
                nonlocal step
                # While no step runs, so that the number fits the values. A callable of
                # the user might wait for a step, and none begins now.
                if not callable(self._counter):
                    step = self._step()
                return {} if step is None else {"step": step}

            await self._written(path, count, note)
            self._last_step, self._last_at = step, self._clock()
            self._damaged.discard(name)
            await disk(self._rotate, name)
        return path

    async def _written(
        self, path: str, count: int, note: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Writes a checkpoint: complete, or only the rows of tables that changed since
        the base."""
        base = self._base
        if base is not None and self._differences + 1 < self._full_every:
            try:
                await self._checkpoint._write(path, count, note, base)
            except (InvalidArgumentError, NotFoundError, DataLossError, OSError) as why:
                # A server knows no more what has changed, or the base is gone.
                log.warning("checkpoint %s is written whole: %s", path, why)
            else:
                self._differences += 1
                # The whole one may leave the list, and be deleted.
                self._base = base._replace(path=path, is_linked=True)
                return
        # The cuts before the values: a row that changes in between is in both, rather
        # than in neither.
        cuts: Mapping[int, int] = {}
        if self._full_every > 1:
            cuts = await cuts_of(graph_of(self._checkpoint))
        await self._checkpoint._write(path, count, note)
        self._base = Base(path, cuts) if cuts else None
        self._differences = 0

    def _step(self) -> int | None:
        if self._counter is None:
            return None
        return int(self._counter() if callable(self._counter) else self._counter)

    def _is_due(self, step: int | None) -> bool:
        passed: list[bool] = []
        if self._interval is not None:
            last = self._last_step
            # The first save is always due, as in TF.
            if last is None or step is None:
                return True
            passed.append(step - last >= self._interval)
        if self._interval_s is not None:
            if self._last_at is None:
                return True
            passed.append(self._clock() - self._last_at >= self._interval_s)
        return any(passed) or not passed

    def _rotate(self, name: str) -> None:
        """Adds the new checkpoint to the folder's list, and deletes those that the list
        drops."""

        def change(stored: SavedList) -> SavedList:
            state = replace(
                self._own(),
                # A program that was killed while it deleted has left some of them:
                # they stay doomed until they are deleted.
                doomed=tuple(filter(self._exists, stored.doomed)),
                left=tuple(
                    filter(self._exists, sorted({*stored.left, *self._damaged}))
                ),
                preserved_at={self._name: self._began, **stored.preserved_at},
            )
            added = state.with_saved(name, self._clock())
            own = added.rotated(self._name, self._keep, self._hours)
            return stored.with_those_of(self._name, own, name)

        # The list first: a checkpoint that is half deleted when the program is killed
        # is not listed.
        for doomed in update_state(self._directory, change).doomed:
            remove(os.path.join(self._directory, doomed))

    def _exists(self, name: str) -> bool:
        return os.path.exists(os.path.join(self._directory, name))

    def close(self) -> None:
        """Allows other processes to save to the folder, until the next save."""
        self._lock = None

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint and returns its path; if there is no
        checkpoint, calls ``init_fn`` and returns None.

        If there is none of this manager's name, the newest of any name in the folder is
        restored, as in TensorFlow, and logged. If a checkpoint is damaged, an older one
        is restored, with a `CheckpointWarning`.

        Raises:
            DataLossError: All checkpoints are damaged; says what is wrong with the
                newest.
            Exception: Otherwise as `zs.Checkpoint.restore`.
        """
        return run_blocking(
            self._restore_or_initialize(user_line()),
            "manager.restore_or_initialize_async()",
        )

    async def restore_or_initialize_async(self) -> str | None:
        """Does what `restore_or_initialize` does, without blocking the running loop.

        Cancellation: some of the variables may have been restored.
        """
        return await self._restore_or_initialize(user_line())

    async def _restore_or_initialize(self, line: tuple[str, int]) -> str | None:
        """Does what `restore_or_initialize` does. ``line`` is the file and line number
        to which warnings refer."""
        first: DataLossError | None = None
        for path in reversed(self._paths(self._restorable())):
            try:
                await self._checkpoint.restore_async(path)
            except DataLossError as error:
                first = first or error
                # So that `_rotate` does not count it among those that are kept.
                self._damaged.add(os.path.basename(path))
                words = f"checkpoint {path} is damaged and skipped: {error}"
                warnings.warn_explicit(words, CheckpointWarning, *line)
                continue
            # The checkpoint that was restored counts as the last one saved.
            if self._interval is not None:
                self._last_step = self._step()
            self._last_at = self._clock()
            if prefix_of(os.path.basename(path)) != self._name:
                log.warning(
                    "restored %s, as no checkpoint is called %s-<N>; this "
                    "CheckpointManager does not delete it",
                    path,
                    self._name,
                )
            return path
        if first is not None:
            raise first
        if self._init_fn is not None:
            self._init_fn()
        return None

    def __repr__(self) -> str:
        return f"<zstrat.CheckpointManager of {self._directory}>"


def _numbered(number: Any) -> int:
    """Returns the argument as the number of a checkpoint.

    Raises:
        ValueError: The argument is not an integer from 0 on.
    """
    with contextlib.suppress(TypeError, ValueError):
        given = int(number) if isinstance(number, str | bytes) else number
        whole = _integer("checkpoint_number", given)
        if whole >= 0:
            return whole
    raise ValueError(f"checkpoint_number={number!r}: expected an integer from 0 on")


def _integer(name: str, number: Any) -> int:
    """Converts an argument of any type, such as a variable or a float, to an integer.

    Raises:
        TypeError: The argument is not an integer.
    """
    try:
        whole = int(number)
        # Not only as a float, which lacks some integers above 2**53.
        is_text = isinstance(number, str | bytes)
        if not is_text and (whole == number or whole == float(number)):
            return whole
    except (TypeError, ValueError, OverflowError):
        pass  # raised below
    raise TypeError(f"{name}={number!r}: expected an integer")


def _require_number(name: str, number: Any) -> None:
    """Refuses, when the manager is made, an argument that is neither a number nor
    None."""
    if number is None:
        return
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(number, str | bytes) and not math.isnan(float(number)):
            return
    raise TypeError(f"{name}={number!r}: expected a number, or None")
