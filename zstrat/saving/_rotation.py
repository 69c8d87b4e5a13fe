"""``zs.CheckpointManager``: numbered checkpoints in one folder, and which are kept."""

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
from zstrat.errors import DataLossError
from zstrat.variables import user_line

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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zstrat.checkpoint import FolderLock

    from ._checkpoint import Checkpoint


log: Final = logging.getLogger("zstrat.saving")


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, and an older one was taken in its place."""


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike[str], checkpoint_name: str | None = None
) -> str | None:
    """Path of the newest complete checkpoint in a folder, None if there is none.

    Args:
        checkpoint_name: Only those that are called ``<checkpoint_name>-<N>``.

    Raises:
        NotFoundError: It is a file, or is below one; says which.
        TypeError: The name is no text.
    """
    directory = absolute(checkpoint_dir)
    prefix = None if checkpoint_name is None else name_given(checkpoint_name)
    names = read_state(directory, prefix).names
    return os.path.join(directory, names[-1]) if names else None


@final
class CheckpointManager:
    """Saves numbered checkpoints to a folder and deletes the oldest ones.

    Made anew for a folder with checkpoints of its name it goes on with them. Those of
    other names, of other managers say, it never deletes, and restores only where there
    is none of its own. From its first save until `close` (or until it is dropped) no
    other process can save to the folder.

    Args:
        max_to_keep: So many of the newest are kept; None: all.
        keep_checkpoint_every_n_hours: Of those that would be deleted one is kept for
            good each time that so many hours have passed; each name has hours of its
            own.
        checkpoint_name: Of the folders: ``<checkpoint_name>-<N>``.
        step_counter: A variable (or a callable) that says which step the program is at.
        checkpoint_interval: Steps between two checkpoints; `save` does nothing before.
        init_fn: Called by `restore_or_initialize` if there is no checkpoint.
        checkpoint_interval_s: Seconds between two checkpoints; `save` does nothing
            before, so that it may be called in each round of a loop. With
            ``checkpoint_interval``, too, it saves when either has passed.
        clock: Seconds since 1970.

    Raises:
        ValueError: ``max_to_keep`` is below 1, there is an interval of steps and no
            counter, or one of seconds that is not above 0.
        TypeError: ``max_to_keep`` is no whole number, hours or an interval are none at
            all, or the name is no text.
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
        """Paths of those in turn to be deleted one day, the oldest first."""
        return self._paths(self._own())

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest one, which `restore_or_initialize` restores: without any
        of its name, as in TensorFlow, the newest in the list of the folder."""
        paths = self._paths(self._restorable())
        return paths[-1] if paths else None

    def _own(self) -> SavedList:
        return read_state(self._directory, self._name).without(self._damaged)

    def _restorable(self) -> SavedList:
        """What a restore takes one of, the newest last. Damaged ones are among it only
        where there is no other, so that nobody begins anew beside them."""
        for found in (self._own(), read_state(self._directory, self._name)):
            if found.saved:
                return found
        return read_state(self._directory)

    def _paths(self, found: SavedList) -> list[str]:
        return [os.path.join(self._directory, name) for name in found.names]

    def save(
        self, checkpoint_number: Any = None, check_interval: bool = True
    ) -> str | None:
        """Saves a checkpoint and deletes what is too old; returns its path, or None if
        the interval has not passed.

        Args:
            checkpoint_number: A whole number or variable in place of the
                `save_counter`, which grows all the same. One of that number is
                replaced.
            check_interval: False: saves however few steps have passed.

        Raises:
            ValueError: ``checkpoint_number`` is no whole number, or below 0.
            Exception: Else as `zs.Checkpoint.save`. What was saved before is as it was.
        """
        return run_blocking(
            self.save_async(checkpoint_number, check_interval), "manager.save_async()"
        )

    async def save_async(
        self, checkpoint_number: Any = None, check_interval: bool = True
    ) -> str | None:
        """`save`, without blocking the running loop.

        Cancellation: nothing was saved, and what was before is as it was; or it was
        saved, and what is too old is deleted by the next call.
        """
        async with in_turn(self._checkpoint), FileThread() as disk:
            step = await disk(self._step)
            if check_interval and not self._is_due(step):
                return None
            await disk(make_folder, self._directory)
            if self._lock is None:
                self._lock = await disk(writer_of, self._directory)
            await disk(clean, self._directory, self._name)
            # The counter itself grows when the checkpoint is written, so a save that
            # fails leaves it.
            count = int(self._checkpoint.save_counter.numpy()) + 1
            number = count
            if checkpoint_number is not None:
                number = _numbered(checkpoint_number)
            name = f"{self._name}-{number}"
            path = os.path.join(self._directory, name)

            def note() -> Mapping[str, Any]:
                nonlocal step
                # While training stands still, so that the number fits the values. A
                # callable of the user's might wait for a step, and none begins now.
                if not callable(self._counter):
                    step = self._step()
                return {} if step is None else {"step": step}

            await self._checkpoint._write(path, count, note)
            self._last_step, self._last_at = step, self._clock()
            self._damaged.discard(name)
            await disk(self._rotate, name)
        return path

    def _step(self) -> int | None:
        if self._counter is None:
            return None
        return int(self._counter() if callable(self._counter) else self._counter)

    def _is_due(self, step: int | None) -> bool:
        passed: list[bool] = []
        if self._interval is not None:
            last = self._last_step
            # The first save is due however few steps there were, as in TF.
            if last is None or step is None:
                return True
            passed.append(step - last >= self._interval)
        if self._interval_s is not None:
            if self._last_at is None:
                return True
            passed.append(self._clock() - self._last_at >= self._interval_s)
        return any(passed) or not passed

    def _rotate(self, name: str) -> None:
        """Puts the newest into the list, and deletes what is in it no more."""

        def change(stored: SavedList) -> SavedList:
            state = replace(
                self._own(),
                # A program that was killed while it deleted left some of them: they
                # stay doomed until they are gone.
                doomed=tuple(each for each in stored.doomed if self._is_there(each)),
                left=tuple(
                    filter(self._is_there, sorted({*stored.left, *self._damaged}))
                ),
                preserved_at={self._name: self._began, **stored.preserved_at},
            )
            added = state.with_saved(name, self._clock())
            mine = added.rotated(self._name, self._keep, self._hours)
            return stored.with_those_of(self._name, mine, name)

        # The list first: what is deleted by half when the program is killed is in no
        # list then.
        for doomed in update_state(self._directory, change).doomed:
            remove(os.path.join(self._directory, doomed))

    def _is_there(self, name: str) -> bool:
        return os.path.exists(os.path.join(self._directory, name))

    def close(self) -> None:
        """Lets other processes save to the folder; the next save takes it again."""
        self._lock = None

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint and returns its path; without any, calls
        ``init_fn`` and returns None.

        Without any of this manager's name the newest in the list of the folder is
        restored, whatever it is called, as in TensorFlow; the log says so. One that is
        damaged is left out with a `CheckpointWarning`, for the one before.

        Raises:
            DataLossError: All of them are damaged; names what is wrong with the newest.
            Exception: Else as `zs.Checkpoint.restore`.
        """
        return run_blocking(
            self._restore_or_initialize(user_line()),
            "manager.restore_or_initialize_async()",
        )

    async def restore_or_initialize_async(self) -> str | None:
        """`restore_or_initialize`, without blocking the running loop.

        Cancellation: some of the variables may have been restored.
        """
        return await self._restore_or_initialize(user_line())

    async def _restore_or_initialize(self, line: tuple[str, int]) -> str | None:
        """Warnings are those of ``line``, a file and a number."""
        first: DataLossError | None = None
        for path in reversed(self._paths(self._restorable())):
            try:
                await self._checkpoint.restore_async(path)
            except DataLossError as error:
                first = first or error
                self._damaged.add(os.path.basename(path))
                words = f"checkpoint {path} is damaged and left out: {error}"
                warnings.warn_explicit(words, CheckpointWarning, *line)
                continue
            if self._interval is not None:
                self._last_step = self._step()
            self._last_at = self._clock()
            if prefix_of(os.path.basename(path)) != self._name:
                log.warning(
                    "restored %s, as there is none called %s-<N> beside it; this "
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
    """A checkpoint's number, from what a caller gave.

    Raises:
        ValueError: It is none.
    """
    with contextlib.suppress(TypeError, ValueError):
        given = int(number) if isinstance(number, str | bytes) else number
        whole = _integer("checkpoint_number", given)
        if whole >= 0:
            return whole
    raise ValueError(f"checkpoint_number={number!r}: expected a whole number from 0 on")


def _integer(name: str, number: Any) -> int:
    """A whole number, of whatever type: a variable, say, or a float.

    Raises:
        TypeError: It is none.
    """
    try:
        whole = int(number)
        # Not the float alone, which has not all integers beyond 2**53.
        is_text = isinstance(number, str | bytes)
        if not is_text and (whole == number or whole == float(number)):
            return whole
    except (TypeError, ValueError, OverflowError):
        pass  # to the words below
    raise TypeError(f"{name}={number!r}: expected an integer")


def _require_number(name: str, number: Any) -> None:
    """Refuses what is not None and no number, before it is needed."""
    if number is None:
        return
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not isinstance(number, str | bytes) and not math.isnan(float(number)):
            return
    raise TypeError(f"{name}={number!r}: expected a number, or None")
