"""What a program sees of its run: what tasks tell of themselves, and their last lines.

Law of the file: it is written on the loop, and read from any thread; nothing in it
holds up either. What a task has told is replaced as a whole, and forgotten when the
task is lost.
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
"""Lines of all tasks together that are kept."""
LINE_CHARACTERS: Final = 1000
"""Of one line; the rest is cut off."""
KEPT_POINTS: Final = 1000
"""Points of one scalar."""
SCALAR_NAMES: Final = 256
"""Scalars: the names of more are a mistake, such as a step's number in a name."""
_LOGGERS: Final = ("zstrat.coordinator", "zstrat.transport")
"""Whose lines are taken by a filter that lets all pass: a handler would keep Python
from showing warnings where the program has not set logging up."""
_STREAMS: Final = {1: "stdout", 2: "stderr"}


def short(task: str) -> str:
    """ "worker:0" of "/job:worker/task:0"."""
    return task.removeprefix("/job:").replace("/task", "")


@final
class Scalars:
    """Numbers that a program says of its training: the last `KEPT_POINTS` of each of at
    most `SCALAR_NAMES` scalars. From any thread."""

    def __init__(self) -> None:
        self._points: Final[dict[str, deque[tuple[int, float, float]]]] = {}
        self._lock: Final = threading.Lock()

    def add(self, name: str, value: float, step: int | None = None) -> None:
        """A point; without a step it is one more than the last one's.

        Raises:
            ValueError: There are `SCALAR_NAMES` others already.
        """
        with self._lock:
            points = self._points.get(name)
            if points is None:
                if len(self._points) >= SCALAR_NAMES:
                    raise ValueError(
                        f"scalar {name!r}: there are {SCALAR_NAMES} others already. A "
                        "name is one curve; the number of a step goes into step="
                    )
                points = self._points[name] = deque(maxlen=KEPT_POINTS)
            if step is None:
                step = points[-1][0] + 1 if points else 0
            points.append((step, time.monotonic(), value))

    def plain(self, since: float) -> dict[str, PlainTree]:
        """``[step, seconds since then, value]`` of each point that came since a time of
        `time.monotonic`, by name. JSON has no word for what is not finite: None."""
        found: dict[str, PlainTree] = {}
        with self._lock:
            for name, points in self._points.items():
                late: list[PlainTree] = [
                    [step, at - since, value if math.isfinite(value) else None]
                    for step, at, value in points
                    if at >= since
                ]
                if late:
                    found[name] = late
        return found


SCALARS: Final = Scalars()
"""Those of this process."""


@final
class RunStatus:
    """The tasks of one session."""

    def __init__(self) -> None:
        self._since: Final = time.monotonic()
        self._told: dict[str, Mapping[str, PlainTree]] = {}
        self._losses: dict[str, str] = {}
        self._lines: Final[deque[tuple[float, str, str, str]]] = deque(
            maxlen=KEPT_LINES
        )

    def telemetry_received(self, task: str, values: Mapping[str, PlainTree]) -> None:
        """A task has told of itself."""
        self._told[short(task)] = values

    def task_lost(self, task: str, reason: str) -> None:
        """A task is lost. Of what it told only the name of its log still holds."""
        told = self._told.pop(short(task), {})
        self._told[short(task)] = {"log": told.get("log")}
        self._losses[short(task)] = reason[:LINE_CHARACTERS]

    def printed(self, task: str, texts: Iterable[PrintedText]) -> None:
        """A step, or a dataset, has printed lines."""
        for stream, text, _ in texts:
            for line in text.splitlines()[-KEPT_LINES:]:
                self._line(short(task), _STREAMS.get(stream, "stdout"), line)

    def begin(self) -> None:
        """From now on what zstrat logs of the run is kept, too."""
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self._logged)

    def end(self) -> None:
        """The session is over."""
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(self._logged)

    def _logged(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except Exception:  # to the reader: who logs is told by logging's own handlers
            text = f"{record.msg!s} (and arguments that do not fit: {record.args!r})"
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
        """What `zstrat.telemetry.report` makes of it, with ``scalars`` and ``logs``."""
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
            loss = f"was lost, and is back: {loss}"
        error = error or loss
        return TaskReport(state, task.address, error, self._told.get(name, {}))


def _server(task: TaskSession) -> str:
    if task.is_ready:
        return "open"
    return "connecting" if task.hello is None else "lost"


def log_scalar(
    name: str, value: SupportsFloat, step: SupportsIndex | None = None
) -> None:
    """Notes a point of a curve, such as the loss: `ClusterCoordinator.metrics` has it
    under ``scalars``, and so has all that shows a run. The last 1,000 points of each of
    256 names are kept. Costs about a microsecond, and nobody waits for anything.

    Args:
        value: A number, or an array of one; fetch what a step returns first.
        step: Where on the axis it is; left out: one behind the last point.

    Raises:
        RuntimeError: It is called in a step, on a worker, where nobody would see it.
        TypeError: The value is no number, or the step no integer.
        ValueError: The name is empty, or there are too many names.
    """
    if worker_context.get() is not None:
        raise RuntimeError(
            f"zs.log_scalar({name!r}) in a step: what a worker notes nobody sees; "
            "return the value from the step, and log what fetch() gives"
        )
    if not isinstance(name, str) or not name:
        raise ValueError(f"zs.log_scalar: expected a name, got {name!r:.80}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"zs.log_scalar({name!r}): expected a number, got "
            f"{type(value).__name__}; of a RemoteValue, log value.fetch()"
        ) from None
    try:
        at = None if step is None else operator.index(step)
    except TypeError:
        raise TypeError(
            f"zs.log_scalar({name!r}): step={step!r:.80}: expected an integer"
        ) from None
    SCALARS.add(name, number, at)
