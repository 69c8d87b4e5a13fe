"""`RunStatus`: the reports of all tasks of a run, and their last lines of output.

Laws of this file: it is written on the loop and read from any thread, and blocks
neither. A new report of a task replaces the old one, which is dropped when the task is
lost.
"""

from __future__ import annotations

import logging
import math
import operator
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, SupportsFloat, SupportsIndex, final

from zstrat.program import worker_context
from zstrat.telemetry import TaskReport, report

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zstrat.wire import PlainTree, PrintedText

    from ._members import Member
    from .connecting import TaskSession

KEPT_LINES: Final = 200
"""The most lines of output that are kept, of all tasks together."""
LINE_CHARACTERS: Final = 1000
"""The most characters of a line; the rest is cut off."""
KEPT_POINTS: Final = 1000
"""The most points of a scalar that are kept."""
SCALAR_NAMES: Final = 256
"""The most scalars. More names are a mistake, such as a step number in the name."""
_LOGGERS: Final = ("zstrat.coordinator", "zstrat.transport")
"""Loggers whose lines are kept, by a filter that passes everything: with a handler
Python would no longer show warnings of programs that do not set up logging."""
_STREAMS: Final = {1: "stdout", 2: "stderr"}


def short(task: str) -> str:
    """Shortens "/job:worker/task:0" to "worker:0"."""
    return task.removeprefix("/job:").replace("/task", "")


@final
class Scalars:
    """Scalars that a program logs: the last `KEPT_POINTS` of each of at most
    `SCALAR_NAMES`. Usable from any thread."""

    def __init__(self) -> None:
        self._points: Final[dict[str, deque[tuple[int, float, float]]]] = {}
        self._lock: Final = threading.Lock()

    def add(self, name: str, value: float, step: int | None = None) -> None:
        """Adds a point to a scalar. Default step: one after the last point.

        Raises:
            ValueError: There are `SCALAR_NAMES` other scalars.
        """
        with self._lock:
            points = self._points.get(name)
            if points is None:
                if len(self._points) >= SCALAR_NAMES:
                    raise ValueError(
                        f"scalar {name!r}: there are already {SCALAR_NAMES} others. "
                        "Use one name per curve, and pass the step number as step="
                    )
                points = self._points[name] = deque(maxlen=KEPT_POINTS)
            if step is None:
                step = points[-1][0] + 1 if points else 0
            points.append((step, time.monotonic(), value))

    def plain(self, since: float) -> dict[str, PlainTree]:
        """Returns ``[step, seconds after since, value]`` of each point after ``since``
        (of `time.monotonic`), by name. Values that are not finite are None, as in
        JSON."""
        points_by_name: dict[str, PlainTree] = {}
        with self._lock:
            for name, points in self._points.items():
                # Scalars belong to the process: an earlier run of it may have logged,
                # too.
                late: list[PlainTree] = [
                    [step, at - since, value if math.isfinite(value) else None]
                    for step, at, value in points
                    if at >= since
                ]
                if late:
                    points_by_name[name] = late
        return points_by_name


SCALARS: Final = Scalars()
"""The scalars of this process."""


@final
class RunStatus:
    """The reports, losses and output of all tasks of one session."""

    def __init__(self) -> None:
        self._since: Final = time.monotonic()
        self._reports: dict[str, Mapping[str, PlainTree]] = {}
        self._losses: dict[str, str] = {}
        self._lines: Final[deque[tuple[float, str, str, str]]] = deque(
            maxlen=KEPT_LINES
        )

    def telemetry_received(self, task: str, values: Mapping[str, PlainTree]) -> None:
        """Stores the report of a task, in place of its previous one."""
        self._reports[short(task)] = values

    def task_lost(self, task: str, reason: str) -> None:
        """Notes that a task is lost, and drops its report except for the name of its
        log."""
        # The log outlives the process, and says why it ended.
        report = self._reports.pop(short(task), {})
        self._reports[short(task)] = {"log": report.get("log")}
        self._losses[short(task)] = reason[:LINE_CHARACTERS]

    def printed(self, task: str, texts: Iterable[PrintedText]) -> None:
        """Stores lines that a step or a dataset of the task printed."""
        for stream, text, _ in texts:
            # A step may print megabytes, of which no more would be kept.
            for line in text.splitlines()[-KEPT_LINES:]:
                self._line(short(task), _STREAMS.get(stream, "stdout"), line)

    def begin(self) -> None:
        """Starts to keep lines that zstrat logs."""
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self._logged)

    def end(self) -> None:
        """Stops keeping lines that zstrat logs."""
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(self._logged)

    def _logged(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except Exception:  # shown instead; logging's handlers report it to the caller
            text = f"{record.msg!s} (with arguments that do not fit: {record.args!r})"
        self._line("program", record.levelname, text)
        return True

    def _line(self, name: str, level: str, text: str) -> None:
        at = time.monotonic() - self._since
        self._lines.append((at, name, level, text[:LINE_CHARACTERS]))

    def metrics(
        self,
        workers: Iterable[TaskSession],
        servers: Iterable[TaskSession],
        members: Iterable[Member],
    ) -> dict[str, PlainTree]:
        """Returns `zstrat.telemetry.report` of all tasks, with ``scalars`` and
        ``logs``."""
        known = {member.place: member for member in members}
        tasks = {
            short(task.name): self._worker(task, known.get(task.place))
            for task in workers
        }
        tasks |= {
            short(task.name): self._task(task, _server(task), "") for task in servers
        }
        lines: list[PlainTree] = [list(line) for line in tuple(self._lines)]
        return {
            "seconds": time.monotonic() - self._since,
            **report(tasks),
            "scalars": SCALARS.plain(self._since),
            "logs": lines,
        }

    def _worker(self, task: TaskSession, member: Member | None) -> TaskReport:
        if member is None or task.is_closed:
            return self._task(task, "removed", "")
        state = "leaving" if member.retired else member.state.value
        return self._task(task, state, member.reason or member.last_error)

    def _task(self, task: TaskSession, state: str, error: str) -> TaskReport:
        name = short(task.name)
        loss = self._losses.get(name, "")
        if loss and state == "open":
            loss = f"was lost, and has returned: {loss}"
        error = error or loss
        return TaskReport(state, task.address, error, self._reports.get(name, {}))


def _server(task: TaskSession) -> str:
    if task.is_ready:
        return "open"
    return "connecting" if task.hello is None else "lost"


def log_scalar(
    name: str, value: SupportsFloat, step: SupportsIndex | None = None
) -> None:
    """Logs a point of a curve, such as the loss. The curve appears under ``scalars`` in
    `ClusterCoordinator.metrics`, and in everything that shows a run. The last 1,000
    points of each of 256 names are kept. Takes about a microsecond, and never blocks.

    Args:
        value: A number, or an array with one number. Fetch the value of a step first.
        step: The position of the point on the axis; default: one after the last point.

    Raises:
        RuntimeError: Called in a step, on a worker, where nobody would see the point.
        TypeError: The value is not a number, or the step not an integer.
        ValueError: The name is empty, or there are too many names.
    """
    if worker_context.get() is not None:
        raise RuntimeError(
            f"zs.log_scalar({name!r}) in a step has no effect on a worker; return the "
            "value from the step, and log the fetched value in the program"
        )
    if not isinstance(name, str) or not name:
        raise ValueError(f"zs.log_scalar: expected a name, got {name!r:.80}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"zs.log_scalar({name!r}): expected a number, got "
            f"{type(value).__name__}; log value.fetch() of a RemoteValue"
        ) from None
    try:
        at = None if step is None else operator.index(step)
    except TypeError:
        raise TypeError(
            f"zs.log_scalar({name!r}): step={step!r:.80}: expected an integer"
        ) from None
    SCALARS.add(name, number, at)
