"""Evaluates the checkpoints of a folder as they appear, and writes down the numbers.

The evaluator is a program of its own, beside the training: it shares nothing with it
but the folder. It looks at the folder again and again, because the file systems that
machines share do not report changes to each other; between two looks it waits, and can
be stopped. The numbers go to a file of JSON lines, and to TensorBoard.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import numpy as np

from zstrat.checkpoint import MANIFEST, CheckpointFiles, Manifest, absolute
from zstrat.errors import DataLossError, NotFoundError
from zstrat.paths import explained
from zstrat.threads import Latch

from ._graph import graph_of
from ._rotation import latest_checkpoint
from ._tensors import stored_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ._checkpoint import Checkpoint

log = logging.getLogger("zstrat.evaluator")

PAUSE: Final = 1.0
"""Seconds between two looks at the folder: far below the time between checkpoints, and
one look costs a listing."""


@final
class SidecarEvaluator:
    """Calls ``evaluate`` with the values of each new checkpoint.

    Args:
        checkpoint: Holds what `evaluate` reads; values of the checkpoint that are not
            in it are left out.
        evaluate: Called without arguments; returns metrics by name, a number each.
        checkpoint_dir: The folder of the training's ``CheckpointManager``.
        max_evaluations: Ends with the checkpoint of this number or a later one (the
            number after the last dash of its name).
        writers: Where the metrics go: `JsonLines`, `TensorBoardEvents`.
        step: The step that a checkpoint was written at: a variable in ``checkpoint``,
            or a callable. Left out: what the manager's ``step_counter`` said, or the
            ``iterations`` of an optimizer.
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
        """Watches and evaluates until `stop`, or until ``max_evaluations``.

        If several checkpoints were written during an evaluation the newest is next. One
        that is being deleted or is damaged is left out, and tried again while it is the
        newest.

        Raises:
            RuntimeError: A checkpoint does not say its step; says what to do.
            NotFoundError, InvalidArgumentError: It does not fit ``checkpoint``.
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
        """Ends `start` after the evaluation that is under way; from any thread."""
        self._stop.open()

    def summary(self) -> str:
        """Says how far the evaluator is, in a few words."""
        last = "none yet" if self._seen is None else os.path.basename(self._seen[0])
        return f"{self._done} evaluations, last {last}"

    def _new(self) -> str | None:
        """Returns the newest checkpoint, if it was not evaluated yet."""
        path = latest_checkpoint(self._directory, self._name)
        if path is None or _version(path) in (None, self._seen):
            return None
        return path

    def _evaluated(self, path: str) -> bool:
        version = _version(path)
        try:
            self._checkpoint.read(path)
            step = self._step_of(path)
        except (DataLossError, NotFoundError, FileNotFoundError) as error:
            if isinstance(error, NotFoundError) and _version(path) is not None:
                raise  # it is there, and lacks something: trying again will not help
            self._complain(path, error)
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

    def _complain(self, path: str, error: Exception) -> None:
        if self._complained != path:
            self._complained = path
            log.warning("%s is left out, and tried again: %s", path, error)

    def _is_last(self, path: str) -> bool:
        return self._max is not None and int(path.rsplit("-", 1)[1]) >= self._max

    def _step_of(self, path: str) -> int:
        if self._step is not None:
            return int(self._step() if callable(self._step) else self._step)
        manifest = Manifest.of(path)
        if type(step := manifest.metadata.get("step")) is int:
            return step
        for node in graph_of(self._checkpoint).optimizers:
            if node.value.iterations is not None:
                return int(node.value.iterations.numpy())
        return _stored_iterations(path, manifest)


def _stored_iterations(path: str, manifest: Manifest) -> int:
    """Returns the iterations of the first optimizer that counted them."""
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
    """Tells a checkpoint from one that replaced it; None if it is gone."""
    try:
        return path, os.stat(os.path.join(path, MANIFEST)).st_mtime_ns
    except OSError:
        return None


class MetricsWriter(Protocol):
    """Takes the metrics of one evaluation after the other."""

    def write(
        self, step: int, values: Mapping[str, float], about: Mapping[str, Any]
    ) -> None:
        """Metrics at a step. ``about``: what else is known, as ``checkpoint``."""
        ...

    def close(self) -> None: ...


@final
class JsonLines:
    """Appends ``{"step": 1200, "loss": 0.25, "checkpoint": ..., "time": ...}``, one
    line an evaluation; a number that JSON does not have (NaN) becomes null.

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
        plain = {k: v if math.isfinite(v) else None for k, v in values.items()}
        line = json.dumps({"step": step, **plain, **about}, ensure_ascii=False)
        self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()


@final
class TensorBoardEvents:
    """Scalars for TensorBoard in a folder (``pip install zstrat[tensorboard]``).

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
        OSError: There can be no such folder.
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
