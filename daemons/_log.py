"""Log lines that say when, which task, and which life of that task."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class LineFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z I worker:0 1f00c0de message``."""

    def __init__(self, task: str, incarnation: int) -> None:
        super().__init__()
        self._task, self._life = task, life(incarnation)

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname[0]} {self._task} {self._life}"
        return f"{head} {_quiet(record.getMessage() + _trace(self, record))}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line, for collectors."""

    def __init__(self, task: str, incarnation: int) -> None:
        super().__init__()
        self._task, self._life = task, life(incarnation)

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "task": self._task,
            "incarnation": self._life,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace := _trace(self, record):
            entry["traceback"] = trace.strip()
        return json.dumps(entry)


def life(incarnation: int) -> str:
    """An incarnation as people compare it: its first eight hex digits."""
    return f"{incarnation:016x}"[:8]


def start_logging(task: str, incarnation: int, *, as_json: bool) -> None:
    """Sends every record of level INFO and above to standard error."""
    formatter = JsonFormatter if as_json else LineFormatter
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(task, incarnation))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("zstrat").setLevel(logging.INFO)
    logging.captureWarnings(True)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z"


def _quiet(text: str) -> str:
    """The text, which may be a peer's, so that it looks like no other entry and does
    nothing to a terminal: lines behind the first are indented, the rest is escaped."""
    if text.isprintable():
        return text
    lines = text.split("\n")
    return "\n    ".join(
        "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in line)
        for line in lines
    )


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if record.exc_info is None or record.exc_info[0] is None:
        return ""
    return "\n" + formatter.formatException(record.exc_info)
