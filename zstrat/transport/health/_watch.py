"""Watches the newest run of this process, and sends its state to open web pages.

Law of the file: an open page costs the run nothing. The run is asked at most once a
second, however many pages are open. Its loop only answers that it turns; its numbers
are collected and become JSON on the thread of the HTTP server, once for all pages, and
less often if that takes long. A page that reads slowly misses frames; one that does not
read is dropped.

Watching starts with the first page and ends with the HTTP server, so that later pages
show the history, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from zstrat.telemetry import TaskReport, held_up, report

from ._register import REGISTER

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from zstrat.wire import PlainTree

    from ._register import RegisterEntry

HISTORY: Final = 720
"""Most rows of the history. When there are so many, each two rows become one, so that
the history always covers the whole run: first second by second, after a day every few
minutes."""

Metrics = dict[str, "PlainTree"]
Rows = list["PlainTree"]


@dataclass(frozen=True, slots=True)
class RunLook:
    """What one look at this process found: the state of its newest run.

    Args:
        run: Number of the run in this process; 0: there is no run now.
        name: Name of the task that runs it, such as "chief:0".
        metrics: Metrics as of `ClusterCoordinator.metrics`; None if the run did not
            answer.
        state: "runs", "waits" or "hangs"; ``words`` says why it waits or hangs.
    """

    run: int = 0
    name: str = ""
    metrics: Metrics | None = None
    state: str = "runs"
    words: str = ""


@dataclass
class RunHistory:
    """The history of a run: rows ``[seconds, steps/s, bytes/s into ps, bytes/s out of
    ps, memory]``."""

    rows: Rows = field(default_factory=list)
    _each: int = 1
    """The number of looks that each row is the mean of."""
    _open: list[list[float]] = field(default_factory=list)

    def add(self, row: list[float]) -> bool:
        """Adds the row of one look. Returns False if earlier rows have changed, too."""
        self._open.append(row)
        if len(self._open) < self._each:
            return True
        self.rows.append([*_mean(self._open)])
        self._open = []
        if len(self.rows) < HISTORY:
            return True
        # Half the points at half the resolution: the page has to draw all of it again.
        pairs = zip(self.rows[::2], self.rows[1::2], strict=True)
        self.rows = [[*_mean(pair)] for pair in pairs]  # type: ignore[arg-type]
        self._each *= 2
        return False


class RunPicture:
    """The data that pages show of the newest run, kept when the run has ended.

    Args:
        process: A name that no other process has, so that a page that reconnects knows
            whether it sees the same run.
    """

    def __init__(self, process: str) -> None:
        self.number = 0
        """Number of the last frame; 0: there was no look yet."""
        self._process = process
        self._run, self._began = 0, 0.0
        self._about: Metrics = {}
        self._metrics: Metrics = {}
        self._held_up: Rows = []
        self._history = RunHistory()
        self._states: dict[str, tuple[str, float]] = {}
        self._grown: dict[str, PlainTree] = {}
        self._only_grew = False

    def see(self, look: RunLook, now: float) -> None:
        """Updates the picture with a look at time ``now``, in seconds of any monotonic
        clock."""
        is_another = look.run not in (0, self._run)
        if is_another:
            self._begin(look, now)
        self.number += 1
        # Run 0, none: the last picture of the run that has ended stays.
        metrics = look.metrics if look.run == self._run else None
        self._about = {
            "run": f"{self._process}.{self._run}",
            "name": look.name or self._about.get("name", ""),
            "state": self._state(look),
            "words": look.words,
            "seconds": _at(metrics, now - self._began)
            if metrics
            else self._about.get("seconds", 0.0),
        }
        if metrics:
            self._held_up = [{**each} for each in held_up(metrics)]
        self._only_grew, self._grown = True, {"history": [], "scalars": {}, "logs": []}
        if metrics:
            self._store(metrics, _at(metrics, now - self._began))
        self._only_grew &= not is_another

    def frame(self, after: int) -> str:
        """Returns, as JSON, the frame for a page whose last frame had the number
        ``after`` (0: it had none): the changes if it missed no frame, else the whole
        picture."""
        # A page that left out a frame lacks what that one added, and gets the whole.
        only_new = self._only_grew and after == self.number - 1 and after > 0
        metrics, history = self._metrics, self._history.rows
        if only_new:
            both = ("scalars", "logs")
            grown = {name: self._grown[name] for name in both if name in metrics}
            metrics = {**metrics, **grown}
            history = self._grown["history"]  # type: ignore[assignment]
        since: PlainTree = {name: at for name, (_, at) in self._states.items()}
        about = {"kind": "change" if only_new else "whole", **self._about}
        about |= {"held_up": self._held_up, "since": since}
        return as_json({**about, "metrics": metrics, "history": history})

    def _begin(self, look: RunLook, now: float) -> None:
        """Drops all data of the previous run, as another run has begun."""
        self._run, self._began, self._metrics, self._held_up = look.run, now, {}, []
        self._history, self._states, self._about = RunHistory(), {}, {}

    def _state(self, look: RunLook) -> str:
        if not self._run:
            return "none"
        if look.run != self._run:
            return "ended"
        return look.state

    def _store(self, metrics: Metrics, seconds: float) -> None:
        before, self._metrics = self._metrics, metrics
        rows = len(self._history.rows)
        self._only_grew = self._history.add([seconds, *_sums(metrics)])
        scalars, old = _dict(metrics, "scalars"), _dict(before, "scalars")
        self._grown = {
            "history": self._history.rows[rows:],
            "scalars": {
                # By step and time: a value may be NaN, which equals nothing.
                name: added(_list(old, name), _list(scalars, name), columns=2)
                for name in scalars
            },
            "logs": added(_list(before, "logs"), _list(metrics, "logs")),
        }
        self._states = {
            name: self._seen_since(name, str(_dict(tasks, name).get("state")), seconds)
            for tasks in (_dict(metrics, "tasks"),)
            for name in tasks
        }

    def _seen_since(self, name: str, state: str, seconds: float) -> tuple[str, float]:
        known = self._states.get(name)
        return known if known and known[0] == state else (state, seconds)


def added(before: Rows, now: Rows, columns: int | None = None) -> Rows:
    """Returns the rows of ``now`` that came after the rows ``before``; the oldest of
    ``before`` may be missing in ``now``. Two rows are the same if their first
    ``columns`` are equal; None: if all are."""
    old, new = ([_cut(row, columns) for row in rows] for rows in (before, now))
    for common in range(min(len(old), len(new)), 0, -1):
        # The first row decides almost always.
        if old[-common] == new[0] and old[-common:] == new[:common]:
            return now[common:]
    return now


def _cut(row: PlainTree, columns: int | None) -> PlainTree:
    return row[:columns] if isinstance(row, list) else row


_PIECES: Final = 3
"""Levels of a frame that are encoded key by key. During one call of json no other
thread of this process runs, and a call for a thousand tasks takes long."""


def as_json(value: PlainTree, pieces: int = _PIECES) -> str:
    """Formats a value as JSON in ASCII, in one line, with texts for numbers that JSON
    does not have."""
    if pieces and isinstance(value, dict):
        members = [
            f"{json.dumps(str(key))}:{as_json(each, pieces - 1)}"
            for key, each in value.items()
        ]
        return f"{{{','.join(members)}}}"
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: PlainTree) -> PlainTree:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


def _at(metrics: Metrics, otherwise: float) -> float:
    """Returns seconds since the run began, by the run's own clock if ``metrics`` has
    its time, else ``otherwise``."""
    return _number(metrics, "seconds") or otherwise


def _sums(metrics: Metrics) -> list[float]:
    tasks = _dict(metrics, "tasks")
    servers = [_dict(tasks, name) for name in tasks if name.startswith("ps:")]
    return [
        _number(metrics, "steps_per_s"),
        sum(_number(each, "bytes_in_per_s") for each in servers),
        sum(_number(each, "bytes_out_per_s") for each in servers),
        sum(_number(_dict(tasks, name), "memory") for name in tasks),
    ]


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _dict(values: Metrics, name: str) -> Metrics:
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _list(values: Metrics, name: str) -> Rows:
    value = values.get(name)
    return value if isinstance(value, list) else []


def _number(values: Metrics, name: str) -> float:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


VIEWERS: Final = 16
"""Most pages that may be open at a time. Each keeps one of the 64 connections, of which
the rest are for probes."""
EVERY: Final = 1.0
"""Seconds between two looks at the run."""
_SHARE: Final = 50
"""Seconds that pass until the next look for each second of a core that looks and pages
took."""
_SLOWEST: Final = 30.0
_PARTING: Final = 2.0
"""Seconds that pages have to take the message that this process ends."""

PROGRAMS: Final = ("chief:", "program:", "observer:")
"""Prefixes of the tasks that see a whole run; other tasks see only themselves."""

log = logging.getLogger("zstrat.transport.health")


class RunWatch:
    """Looks at the newest run of this process, for all open pages. Used on one loop.

    Args:
        timeout: Seconds after which a loop that does not turn is reported as hanging.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._picture = RunPicture(secrets.token_hex(8))
        self._frames: dict[bool, bytes] = {}
        """The encoded frames of the picture's present number: True: the changes, False:
        the whole picture."""
        self._looking: asyncio.Task[None] | None = None
        self._seen: asyncio.Future[None] | None = None
        """Done with the next look. Pages wait for it."""
        self._shown: RegisterEntry | None = None
        self._run = 0
        self._is_over = False
        self._viewers = 0
        self._deserted: asyncio.Future[None] | None = None
        """Done when the last page was notified that this process ends. `end` waits for
        it."""

    @property
    def is_full(self) -> bool:
        return self._viewers >= VIEWERS

    def begin(self) -> None:
        """Looks at the run repeatedly from now on. Idempotent. Call it on the loop."""
        if self._looking is None:
            loop = asyncio.get_running_loop()
            self._seen = loop.create_future()
            self._looking = loop.create_task(self._look_on(), name="look at the run")

    async def end(self) -> None:
        """Notifies all open pages that this process ends, and waits a moment until they
        took the notice."""
        self._is_over = True
        if self._looking is not None:
            self._looking.cancel()
        if self._seen is not None and not self._seen.done():
            self._seen.set_result(None)
        if self._viewers:
            self._deserted = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PARTING):
                    await self._deserted

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events for one page: a whole frame, and then frames with
        the changes, each as soon as the client took the one before; at the end of this
        process the event "end".

        Cancellation, and closing the generator: the page stops being a viewer.
        """
        self.begin()
        self._viewers += 1
        try:
            # So soon a browser tries again when the connection breaks.
            yield b"retry: 2000\n\n"
            last = 0
            while not self._is_over:
                if self._picture.number == last and self._seen is not None:
                    # Shared by all pages: one that closes must not cancel it for the
                    # others.
                    await asyncio.shield(self._seen)
                if self._picture.number != last:
                    event = self._event(last)
                    last = self._picture.number
                    yield event
            yield b"event: end\ndata: {}\n\n"
        finally:
            self._viewers -= 1
            # Done if the page leaves later than `end` waits, which cancels it then.
            deserted = self._deserted
            if deserted is not None and not self._viewers and not deserted.done():
                deserted.set_result(None)

    def _event(self, after: int) -> bytes:
        is_next = 0 < after == self._picture.number - 1
        # Two kinds of frames serve any number of pages.
        if is_next not in self._frames:
            frame = self._picture.frame(after if is_next else 0)
            self._frames[is_next] = f"data: {frame}\n\n".encode("ascii")
        return self._frames[is_next]

    async def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        used = time.thread_time()
        while True:
            began = loop.time()
            self._picture.see(await self._look(), began)
            # Encoded with the first page that asks: none if nobody looks.
            self._frames = {}
            seen, self._seen = self._seen, loop.create_future()
            if seen is not None and not seen.done():
                seen.set_result(None)
            # All work of the thread since the last look, sending to pages included.
            spent, used = time.thread_time() - used, time.thread_time()
            every = min(max(EVERY, _SHARE * spent), _SLOWEST)
            await asyncio.sleep(began + every - loop.time())

    async def _look(self) -> RunLook:
        present = REGISTER.present()
        if not present:
            return RunLook()
        programs = [each for each in present if each.name.startswith(PROGRAMS)]
        was_program = self._shown is not None and self._shown.name.startswith(PROGRAMS)
        if was_program and not programs:
            return RunLook()  # it has ended, although tasks of it may be here yet
        # The newest: a program may open one session after the other.
        shown = (programs or present)[-1]
        if shown is not self._shown:
            self._shown, self._run = shown, self._run + 1
        return await self._asked(shown, self._run)

    async def _asked(self, entry: RegisterEntry, run: int) -> RunLook:
        try:
            return self._seen_in(entry, run, await entry.statistics(self._timeout))
        except TimeoutError:
            words = f"its event loop has not turned for {self._timeout:g} s"
            return RunLook(run, entry.name, state="hangs", words=words)
        except Exception:  # a defect of ours: to the log, and the page says that
            if entry.is_over:  # its loop was closed meanwhile
                return RunLook()
            log.exception("asking %s for its numbers", entry.name)
            words = "an internal error: see the log of this process"
            return RunLook(run, entry.name, state="hangs", words=words)

    def _seen_in(
        self, entry: RegisterEntry, run: int, values: Mapping[str, PlainTree]
    ) -> RunLook:
        metrics = values.get("coordinator")
        if isinstance(metrics, dict):
            return RunLook(run, entry.name, metrics)
        if not entry.name.startswith(PROGRAMS):
            return RunLook(run, entry.name, _of_task(entry.name, values))
        words = "it has no ClusterCoordinator yet, so there are no steps to show"
        return RunLook(run, entry.name, state="waits", words=words)


def _of_task(name: str, values: Mapping[str, PlainTree]) -> Metrics:
    """Returns the metrics of a run for a process that sees only one task of the run."""
    about = values.get("task")
    known = about if isinstance(about, dict) else {}
    task = TaskReport("open", str(known.get("address", "")), "", values)
    uptime = known.get("uptime")
    return {"seconds": uptime, **report({name: task})}
