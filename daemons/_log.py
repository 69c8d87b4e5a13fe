"""Log lines with the time, the task and the incarnation of the task."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime


class LineFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z I worker:0 1f00c0de message``."""

    def __init__(self, task: str, incarnation: int) -> None:
        super().__init__()
        self._task, self._incarnation = task, short(incarnation)

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname[0]} {self._task} {self._incarnation}"
        return f"{head} {_escaped(record.getMessage() + _traceback(self, record))}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line, for log collectors."""

    def __init__(self, task: str, incarnation: int) -> None:
        super().__init__()
        self._task, self._incarnation = task, short(incarnation)

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "task": self._task,
            "incarnation": self._incarnation,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if traceback := _traceback(self, record):
            entry["traceback"] = traceback.strip()
        return json.dumps(entry)


def short(incarnation: int) -> str:
    """The first eight hex digits of an incarnation, enough for people to compare."""
    return f"{incarnation:016x}"[:8]


def start_logging(task: str, incarnation: int, *, as_json: bool) -> None:
    """Logs to standard error: zstrat from level INFO, other libraries from WARNING."""
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


def _escaped(text: str) -> str:
    """Escapes control characters and indents all lines but the first: text from a peer
    cannot forge a log entry or control the terminal."""
    if text.isprintable():
        return text
    lines = text.split("\n")
    return "\n    ".join(
        "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in line)
        for line in lines
    )


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if record.exc_info is None or record.exc_info[0] is None:
        return ""
    return "\n" + formatter.formatException(record.exc_info)
