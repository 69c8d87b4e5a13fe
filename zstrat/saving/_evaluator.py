"""Evaluates the checkpoints of a folder as they appear, and writes the metrics down.

The evaluator is a separate program that runs during training, and shares only the
folder with it. It looks at the folder again and again, because the file systems that
machines share do not report changes to each other; between two looks it waits, and can
be stopped. The metrics are written to a file of JSON lines, and to TensorBoard.

`MetricsExport` sends the metrics of a training run to the same writers. Its law:
training never waits for a writer, nor fails because of one. A thread asks the
coordinator from time to time; if a disk is full or a folder hangs, points are lost, and
the failure is logged.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import numpy as np

from zstrat.checkpoint import MANIFEST, CheckpointFiles, Manifest, absolute
from zstrat.errors import DataLossError, NotFoundError
from zstrat.paths import explained
from zstrat.threads import Latch, SteadyThread

from ._graph import graph_of
from ._rotation import latest_checkpoint
from ._tensors import stored_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Self

    from ._checkpoint import Checkpoint


log = logging.getLogger("zstrat.evaluator")

PAUSE: Final = 1.0
"""Seconds between two looks at the folder: far less than the time between checkpoints,
and one look costs one directory listing."""


@final
class SidecarEvaluator:
    """Calls ``evaluate`` with the values of each new checkpoint.

    Args:
        checkpoint: Has the objects that `evaluate` reads; values of a saved checkpoint
            that are not in this object are ignored.
        evaluate: Called without arguments; returns metrics: a number for each name.
        checkpoint_dir: The folder of the training's ``CheckpointManager``.
        max_evaluations: Ends with the checkpoint of this number or a later one (the
            number after the last dash of its name).
        writers: Receive the metrics: `JsonLines`, `TensorBoardEvents`.
        step: The step at which a checkpoint was written: a variable in ``checkpoint``,
            or a callable. Left out: the value of the manager's ``step_counter`` when it
            saved, or the ``iterations`` of an optimizer.
        pause: Seconds between two looks at the folder.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        evaluate: Callable[[], Mapping[str, Any]],
        checkpoint_dir: str | os.PathLike[str],
        *,
        max_evaluations: int | None = None,
        writers: Sequence[MetricsWriter] = (),
        step: Any = None,
        checkpoint_name: str | None = None,
        pause: float = PAUSE,
    ) -> None:
        if max_evaluations is not None and max_evaluations < 1:
            raise ValueError(f"max_evaluations={max_evaluations}: expected 1 or more")
        self._checkpoint, self._evaluate = checkpoint, evaluate
        self._directory, self._name = absolute(checkpoint_dir), checkpoint_name
        self._max, self._writers = max_evaluations, tuple(writers)
        self._step, self._pause = step, pause
        self._stop = Latch()
        self._seen: tuple[str, int] | None = None
        self._complained: str | None = None
        self._done = 0

    def start(self) -> None:
        """Watches the folder and evaluates until `stop`, or until ``max_evaluations``.

        If several checkpoints were written during an evaluation the newest is evaluated
        next. A checkpoint that is being deleted or is damaged is skipped, and tried
        again while it is the newest.

        Raises:
            RuntimeError: A checkpoint does not say its step; says what to do.
            NotFoundError, InvalidArgumentError: A checkpoint does not fit
                ``checkpoint``.
            PSUnavailableError: A parameter server that holds variables is gone.
            Exception: Whatever ``evaluate`` raises.
        """
        while not self._stop.is_open:
            path = self._new()
            if path is None:
                self._stop.wait(self._pause)
            elif self._evaluated(path) and self._is_last(path):
                return

    def stop(self) -> None:
        """Ends `start` after the evaluation that is running. May be called from any
        thread."""
        self._stop.open()

    def summary(self) -> str:
        """Describes in a few words how far the evaluator is."""
        last = "none yet" if self._seen is None else os.path.basename(self._seen[0])
        return f"{self._done} evaluations, last {last}"

    def _new(self) -> str | None:
        """Returns the newest checkpoint if it was not evaluated yet, else None."""
        path = latest_checkpoint(self._directory, self._name)
        if path is None or _version(path) in (None, self._seen):
            return None
        return path

    def _evaluated(self, path: str) -> bool:
        """Evaluates a checkpoint; returns False if the checkpoint could not be read
        now."""
        # Before it is read: if it is replaced meanwhile, the next look finds it new.
        version = _version(path)
        try:
            self._checkpoint.read(path)
            step = self._step_of(path)
        except (DataLossError, NotFoundError, FileNotFoundError) as error:
            # Else the manager may be deleting it: it keeps only the newest ones.
            if isinstance(error, NotFoundError) and _version(path) is not None:
                raise  # it is there, and lacks something: trying again will not help
            # Once for each checkpoint: it is tried again every second.
            if self._complained != path:
                self._complained = path
                log.warning("%s is left out, and tried again: %s", path, error)
            self._stop.wait(self._pause)
            return False
        began = time.monotonic()
        values = {k: float(np.asarray(v)) for k, v in self._evaluate().items()}
        about = {
            "checkpoint": path,
            "time": time.time(),
            "seconds": time.monotonic() - began,
        }
        for writer in self._writers:
            writer.write(step, values, about)
        said = ", ".join(f"{name} {value:.6g}" for name, value in values.items())
        log.info("%s, step %d: %s", os.path.basename(path), step, said)
        self._seen, self._done = version, self._done + 1
        return True

    def _is_last(self, path: str) -> bool:
        return self._max is not None and int(path.rsplit("-", 1)[1]) >= self._max

    def _step_of(self, path: str) -> int:
        if self._step is not None:
            return int(self._step() if callable(self._step) else self._step)
        manifest = Manifest.of(path)
        # From what says it most exactly to what only counts updates.
        if type(step := manifest.metadata.get("step")) is int:
            return step
        for node in graph_of(self._checkpoint).optimizers:
            if node.value.iterations is not None:
                return int(node.value.iterations.numpy())
        return _stored_iterations(path, manifest)


def _stored_iterations(path: str, manifest: Manifest) -> int:
    """Returns the step count (``iterations``) of the first optimizer in a checkpoint
    that has one."""
    nodes = stored_graph(manifest, os.path.join(path, MANIFEST))
    for node in nodes:
        if node.kind == "optimizer" and "iterations" in node.children:
            tensor = manifest.tensors[nodes[node.children["iterations"]].tensor]
            with CheckpointFiles(path) as files:
                return int(files.read(tensor))
    raise RuntimeError(
        f"checkpoint {path} does not say at which step it was written: give the "
        "training's CheckpointManager a step_counter, its optimizer "
        "count_iterations=True, or this evaluator a step="
    )


def _version(path: str) -> tuple[str, int] | None:
    """Identifies a version of a checkpoint, to distinguish it from one that replaced
    it; None if the checkpoint is gone."""
    try:
        return path, os.stat(os.path.join(path, MANIFEST)).st_mtime_ns
    except OSError:
        return None


class MetricsWriter(Protocol):
    """Writes the metrics of evaluations."""

    def write(
        self, step: int, values: Mapping[str, float], about: Mapping[str, Any]
    ) -> None:
        """Writes the metrics of one step. ``about``: further facts, such as
        ``checkpoint``."""
        ...

    def close(self) -> None: ...


@final
class JsonLines:
    """Appends ``{"step": 1200, "loss": 0.25, "checkpoint": ..., "time": ...}`` to a
    file, one line per evaluation; a number that JSON cannot represent (NaN) becomes
    null.

    Raises:
        OSError: The file cannot be written; also in `write`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Line by line: readers of the file see whole lines only.
        with explained("JsonLines", path):
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def write(
        self, step: int, values: Mapping[str, float], about: Mapping[str, Any]
    ) -> None:
        # Python would write NaN as it is, which readers of JSON refuse.
        plain = {k: v if math.isfinite(v) else None for k, v in values.items()}
        line = json.dumps({"step": step, **plain, **about}, ensure_ascii=False)
        self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()


@final
class TensorBoardEvents:
    """Writes metrics as scalars for TensorBoard to a folder (``pip install
    zstrat[tensorboard]``).

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
        OSError: The folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"TensorBoard events need tensorboardX ({error}): "
                "pip install 'zstrat[tensorboard]'"
            ) from error
        with explained("TensorBoardEvents", folder):
            self._events = SummaryWriter(os.fspath(folder))

    def write(
        self, step: int, values: Mapping[str, float], about: Mapping[str, Any]
    ) -> None:
        del about
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        self._events.close()


_export_log: Final = logging.getLogger("zstrat.saving")

_CLOSING: Final = 10.0
"""Seconds that writers have to write the last points."""
_QUANTILES: Final = ("p50", "p99")

Point = tuple[int, dict[str, float]]
"""A step, and the values of metrics at that step, by name."""


class ReportsMetrics(Protocol):
    """The part of a coordinator that reports metrics."""

    def metrics(self) -> Mapping[str, Any]: ...


@dataclass
class ExportedPoints:
    """Selects the points that were not exported yet. Values given to `zs.log_scalar`
    have their name and step; other metrics of the run have names below ``run/``, and
    the number of finished steps as their step."""

    _until: dict[str, float] = field(default_factory=dict)

    def take(self, metrics: Mapping[str, Any]) -> list[Point]:
        """Returns the points of the metrics that were not returned before."""
        found = [*self._scalars(metrics.get("scalars", {}))]
        # Steps that are done: those scheduled that neither wait nor run.
        done = _number(metrics.get("scheduled_closures")) - sum(
            _number(metrics.get(name))
            for name in ("queued_closures", "inflight_closures")
        )
        return [*found, (int(done), dict(_rates(metrics)))]

    def _scalars(self, scalars: Mapping[str, Any]) -> Iterator[Point]:
        for name, points in scalars.items():
            for step, seconds, value in points:
                # By time, not by step: a program may log a step again after a restore.
                if seconds > self._until.get(name, -math.inf):
                    self._until[name] = seconds
                    yield step, {name: math.nan if value is None else value}


def _rates(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name in ("steps_per_s", "examples_per_s"):
        if metrics.get(name) is not None:
            yield f"run/{name}", _number(metrics[name])
    summaries = {
        "staleness": metrics.get("staleness", {}),
        **{f"{name}_s": each for name, each in metrics.get("phases", {}).items()},
    }
    for name, summary in summaries.items():
        if summary.get("count"):
            for key in _QUANTILES:
                yield f"run/{name}/{key}", _number(summary[key])


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


@final
class MetricsExport:
    """Exports the metrics of a training run while it is open: the scalars of
    `log_scalar`, steps and examples per second, staleness, and the phases of steps.

    A context manager. Errors of a writer do not reach the program: the first of a
    series is logged, and the writer is used again.

    Args:
        coordinator: Its metrics are exported.
        writers: Such as `TensorBoardEvents`; they are closed with this object.
        every: Seconds between two exports. If a scalar gets more than 1,000 points in
            that time, the last 1,000 are written.

    Raises:
        ValueError: ``every`` is not a positive number of seconds.
    """

    def __init__(
        self,
        coordinator: ReportsMetrics,
        writers: Sequence[MetricsWriter],
        *,
        every: float = 10.0,
    ) -> None:
        if not 0 < every < math.inf:
            raise ValueError(f"every={every!r}: expected seconds, above 0")
        self._coordinator, self._every = coordinator, every
        self._writers = tuple(writers)
        self._failing: set[int] = set()
        """The writers, by ``id``, whose last points are lost."""
        self._points = ExportedPoints()
        self._ends = Latch()
        # A daemon: a folder that hangs must not keep the program from ending.
        self._thread = SteadyThread(self._run, name="zstrat metrics export")
        self._thread.start()

    def close(self) -> None:
        """Writes the new points, and closes the writers; waits ten seconds at most.
        Idempotent."""
        self._ends.open()
        self._thread.join(_CLOSING)
        if self._thread.is_alive():
            _export_log.warning(
                "a writer of metrics hangs, and its last points are lost"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        ends = False
        while not ends:
            # Asked once more after the end, so that the last points are written.
            ends = self._ends.wait(self._every)
            try:
                points = self._points.take(self._coordinator.metrics())
            except Exception:  # to the log: no caller waits
                _export_log.exception("asking for metrics")
                continue
            for writer in self._writers:
                self._write(writer, points)
        # Here, not in `close`: a writer that hangs would hang the program there.
        for writer in self._writers:
            try:
                writer.close()
            except Exception:  # to the log: the other writers are closed, too
                _export_log.exception("closing %s", type(writer).__name__)

    def _write(self, writer: MetricsWriter, points: Sequence[Point]) -> None:
        try:
            for step, values in points:
                writer.write(step, values, {})
        except Exception:  # to the log: training continues without these points
            if id(writer) not in self._failing:  # the first of a series
                _export_log.exception("%s: points are lost", type(writer).__name__)
            self._failing.add(id(writer))
        else:
            self._failing.discard(id(writer))
