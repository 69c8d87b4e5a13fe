"""``zs.PreemptionCheckpointHandler``: saves a program that is about to be ended.

All processes of a synchronous strategy save after the same run: after each run they
exchange what each of them wants to do, in one small collective, and do the most urgent
of that. A coordinator of workers saves alone, and so does the chief of programs that
share parameter servers. What one process wants is decided without a clock
(`Countdown`).

The end of a program is announced some time before, by a signal or by a function that
the program supplies.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import numpy as np

from zstrat.checkpoint import absolute
from zstrat.cluster import id_in_cluster, query_cluster_spec
from zstrat.collectives import Group
from zstrat.config import TRY_AGAIN
from zstrat.coordinator import ClusterSession
from zstrat.errors import InvalidArgumentError, NotFoundError
from zstrat.signals import handle

from ._checkpoint import Checkpoint, local_counter
from ._graph import graph_of
from ._operation import clusters_of
from ._rotation import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from zstrat.cluster import ClusterResolver


@final
@dataclass(frozen=True)
class TerminationConfig:
    """Options: how a program learns of its end, and what it does then.

    Args:
        termination_watcher_fn: Returns whether the end was announced; called between
            two runs, at most once a second. None: SIGTERM and SIGUSR1 announce the end.
        exit_fn: Called after the last save. None: ``sys.exit(75)``, which engines and
            service managers take as "try again".
        grace_period: Seconds from the announcement to the end. Training continues until
            shortly before the end, with one checkpoint at once and another one at the
            end. None or 0: the current run ends, and the program saves and exits.
        save_fn: Saves instead of the checkpoint manager; called in every process.

    Raises:
        ValueError: ``grace_period`` is negative.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        if self.grace_period is not None and self.grace_period < 0:
            raise ValueError(f"grace_period={self.grace_period}: expected 0 or more")


class Wish(enum.IntEnum):
    """The action that one process wants all processes to take; they take the greatest
    of all wishes."""

    GO_ON = 0
    SAVE = 1
    """Save and continue: the end is announced, and time is left."""
    LEAVE = 2
    """The time is up: save, and exit."""


@final
class Countdown:
    """Decides what this process wants, from the announcement of the end and the
    durations of runs and checkpoints."""

    def __init__(self, grace_period: float) -> None:
        self._grace = grace_period
        self._announced_at: float | None = None
        self._has_saved = False
        self._saving = self._running = 0.0

    def announced(self, now: float) -> None:
        """Records that the end was announced; the first announcement counts."""
        if self._announced_at is None:
            self._announced_at = now

    def ran(self, seconds: float) -> None:
        """Records how long a run took; the longest counts."""
        self._running = max(self._running, seconds)

    def saved(self, seconds: float) -> None:
        """Records how long a checkpoint took; the longest counts."""
        self._has_saved = True
        self._saving = max(self._saving, seconds)

    def wish(self, now: float) -> Wish:
        """Returns what this process wants after a run. It wants to continue if twice
        the duration of a run and a checkpoint fits into the time that is left."""
        if self._announced_at is None:
            return Wish.GO_ON
        left = self._announced_at + self._grace - now
        # Twice: the next run may be longer than all so far.
        if not self._grace or left <= 2 * (self._running + self._saving):
            return Wish.LEAVE
        return Wish.SAVE

    def is_due(self, agreed: Wish) -> bool:
        """Returns whether to save now: once when the end is announced, and once at the
        end."""
        return agreed is Wish.LEAVE or (agreed is Wish.SAVE and not self._has_saved)


T = TypeVar("T")

_RUNS: Final = "checkpointed_runs"
"""The name under which checkpoints have the count of runs, as in TensorFlow."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
_A_DAY: Final = 86_400.0
"""Seconds that one process may wait for the run of another: the loss of a process is
detected much earlier."""
_PAUSE: Final = 1.0
"""Seconds between two calls of a termination_watcher_fn."""

log = logging.getLogger("zstrat.saving")


@final
class PreemptionCheckpointHandler:
    """Saves a checkpoint when the end of the program is announced, and exits with 75;
    restores the checkpoint when the program is restarted.

    SIGTERM or SIGUSR1 announce the end, unless ``termination_config`` says otherwise:
    the current run ends, the same one in all processes of a synchronous strategy, a
    checkpoint is saved, and ``sys.exit(75)`` ends the program. A second SIGTERM ends
    the program at once. Code outside of `run` that is not followed by
    `save_checkpoint_if_preempted` is not interrupted.

    Steps that a run has scheduled on workers end before the checkpoint is saved, so
    schedule no more steps in one run than fit into the time that is left.

    Args:
        cluster_resolver: ``strategy.cluster_resolver``; None: one process alone.
        checkpoint_or_checkpoint_manager: What saves: a `zs.CheckpointManager`, or a
            `zs.Checkpoint`, whose newest checkpoint is kept in ``checkpoint_dir``.
        checkpoint_dir: Folder of a `zs.Checkpoint`; the same for all processes.
        termination_config: A `zs.TerminationConfig`.

    Raises:
        InvalidArgumentError: A `zs.Checkpoint` without a folder, or a manager with
            another folder than ``checkpoint_dir``.
        ValueError: This is not the main thread, which alone receives signals; or this
            process does not train.
        Otherwise as `zs.CheckpointManager.restore_or_initialize`, and as
        `zs.collectives.Group`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        config = termination_config or TerminationConfig()
        self._config = config
        self._countdown = Countdown(config.grace_period or 0.0)
        self._asked_at = -_PAUSE  # so that the first run asks at once
        self._manager = _manager(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._rank, self._trains_in_sync = _part(cluster_resolver)
        self._group: Group | None = None
        self._before: dict[signal.Signals, Any] = {}
        # Restored before signals are caught: one that comes meanwhile ends the program
        # as usual, and nothing is lost.
        self._manager.restore_or_initialize()
        self._runs = _counter(self._manager.checkpoint)
        self._total = int(self._runs.numpy())
        if config.termination_watcher_fn is None:
            self._listen()
        if self._trains_in_sync:
            try:
                self._group = Group(cluster_resolver, name="preemption", timeout=_A_DAY)
            except BaseException:  # to the caller, who has no handler to close
                self.close()
                raise

    @property
    def total_run_calls(self) -> int:
        """Number of calls of `run`, including those before the restored checkpoint."""
        return self._total

    def run(
        self, distributed_train_function: Callable[..., T], *args: Any, **kwargs: Any
    ) -> T:
        """Calls the function, counts the call, and saves and exits if the end is
        announced. In synchronous training all processes have to call this equally
        often.

        Raises:
            SystemExit: The program has to end; do not catch this.
            PeerLostError, CollectiveTimeoutError: Another process did not end this run.
                Continue after `strategy.reform`.
            Otherwise what the function raises; then the call is not counted.
        """
        began = time.monotonic()
        result = distributed_train_function(*args, **kwargs)
        self._countdown.ran(time.monotonic() - began)
        self._total += 1
        self.save_checkpoint_if_preempted()
        return result

    def save_checkpoint_if_preempted(self) -> None:
        """Saves and exits if the end is announced, without a `run`. In synchronous
        training all processes have to call this at the same place.

        Raises: As `run`.
        """
        agreed = self._agreed()
        if self._countdown.is_due(agreed):
            began = time.monotonic()
            self._save()
            self._countdown.saved(time.monotonic() - began)
        if agreed is Wish.LEAVE:
            log.warning("the end was announced: saved after run %d", self._total)
            # Before the exit function, which may take long or raise: from here on a
            # signal does what it did before this handler.
            self.close()
            if self._config.exit_fn is None:
                sys.exit(TRY_AGAIN)
            self._config.exit_fn()

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Calls `save_checkpoint_if_preempted` at the end of a ``with`` block, unless
        the block raises; for steps outside of `run`."""
        yield
        self.save_checkpoint_if_preempted()

    def close(self) -> None:
        """Stops listening to signals, and leaves the group of processes. Idempotent;
        the end of a ``with`` block calls this."""
        if self._group is not None:
            self._group.close()
        for number, handler in self._before.items():
            # Not a handler that other code has set since. The default is ours, too:
            # see `_signalled`.
            if signal.getsignal(number) in (self._signalled, signal.SIG_DFL):
                signal.signal(number, handler)
        self._before.clear()

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "PreemptionCheckpointHandler: only the main thread receives signals: "
                "make it there, or pass a TerminationConfig with a "
                "termination_watcher_fn"
            )
        for number in _SIGNALS:
            # SIGUSR1 only announces the end: processes of a loader continue until then.
            in_children = signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL
            before = handle(number, self._signalled, in_children=in_children)
            self._before[number] = before

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._countdown.announced(time.monotonic())
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)  # a second one ends it at once

    def _agreed(self) -> Wish:
        """Returns what all processes do after this run: the greatest of their
        wishes."""
        now = time.monotonic()
        watch = self._config.termination_watcher_fn
        if watch is not None and now - self._asked_at >= _PAUSE:
            self._asked_at = now
            if watch():
                self._countdown.announced(now)
        wish = self._countdown.wish(now)
        if self._group is None:
            return wish
        if self._group.is_broken:  # the strategy was formed again
            self._group.reform()
        # The greatest wish wins: one process with little time left ends all.
        return Wish(int(self._group.all_reduce(np.array(wish), "max")))

    def _save(self) -> None:
        for session in _sessions(self._manager.checkpoint):
            session.finish()  # so that the checkpoint has all counted runs
        self._runs.assign(np.int64(self._total))
        if self._config.save_fn is not None:
            self._config.save_fn()
        elif self._rank == 0:
            self._manager.save(check_interval=False)
        elif self._trains_in_sync:
            self._take_part()
        if self._group is not None:  # the exit of one process may end the others
            self._group.barrier()

    def _take_part(self) -> None:
        """Takes part in the collectives of the save of another process, such as for
        metrics of all processes. Deletes the files that this process writes for that.
        """
        folder = f"{self._manager.directory}.worker-{self._rank}"
        try:
            self._manager.checkpoint.write(os.path.join(folder, "ckpt"))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def PreemptionHandler(  # as a class of TF's is called
    manager: CheckpointManager,
    strategy: Any = None,
    termination_config: TerminationConfig | None = None,
) -> PreemptionCheckpointHandler:
    """Returns a `PreemptionCheckpointHandler` for a strategy.

    Args:
        manager: Saves the checkpoints.
        strategy: The strategy of the program; None: one process alone.
    """
    resolver = None if strategy is None else strategy.cluster_resolver
    return PreemptionCheckpointHandler(
        resolver, manager, termination_config=termination_config
    )


def _manager(
    given: Checkpoint | CheckpointManager, folder: str | os.PathLike[str] | None
) -> CheckpointManager:
    if isinstance(given, Checkpoint):
        if not folder:
            raise InvalidArgumentError(
                "When a checkpoint is passed, a checkpoint_dir must be passed as well."
            )
        return CheckpointManager(given, folder, max_to_keep=1)
    if folder and absolute(folder) != given.directory:
        raise InvalidArgumentError(
            f"checkpoint_dir={folder!r}, and the CheckpointManager saves to "
            f"{given.directory!r}: leave checkpoint_dir out"
        )
    return given


def _part(resolver: ClusterResolver | None) -> tuple[int, bool]:
    """Returns the number of this process, of which 0 saves, and whether all processes
    train synchronously."""
    if resolver is None:
        return 0, False
    spec = query_cluster_spec(resolver)
    job, index = resolver.task_type, resolver.task_id
    if "ps" in spec.jobs and (job is None or index is None):
        return 0, False  # a coordinator need not have a task
    if not spec or job == "evaluator":
        return 0, False
    if job is None or index is None:
        raise ValueError(
            "PreemptionCheckpointHandler: the resolver does not know the task of this "
            "process: pass it task_type and task_id"
        )
    return id_in_cluster(spec, job, index), "ps" not in spec.jobs


def _sessions(checkpoint: Checkpoint) -> list[ClusterSession]:
    """Returns the sessions of the clusters that store the saved variables."""
    variables = [node.value for node in graph_of(checkpoint).variables]
    parts = [part for variable in variables for part in variable.components]
    clusters: Sequence[object] = clusters_of(parts)
    return [session for session in clusters if isinstance(session, ClusterSession)]


def _counter(checkpoint: Checkpoint) -> Any:
    """Returns the counter of runs, with its restored value. The counter is added to the
    checkpoint after the restore, because a checkpoint that was saved without a handler
    lacks it."""
    if _RUNS not in checkpoint.tracked:
        with contextlib.suppress(NotFoundError):
            setattr(checkpoint, _RUNS, local_counter(_RUNS))
    return checkpoint.tracked[_RUNS]
