"""What every test gets: a quiet JAX, repeatable examples, and a look for leftovers."""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import re
import resource
import shutil
import signal
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from zstrat.testing import leak_check

# Before anything imports jax, and inherited by the daemons that tests start: one XLA
# thread per process, or the processes of a test fight for the cores of a small machine.
# Programs run once or twice here: making their machine code fast costs more than it
# saves, and they compute the same but for the last bit. Without emitters of fusions and
# in one piece, a program is compiled in a third of the processor time. That is asked of
# a known XLA alone: one that does not know a flag ends the process.
_FASTER = (
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    if version("jaxlib").startswith("0.10.")
    else ""
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0" + _FASTER,
)

# Few collections of garbage in programs that tests start (`started/sitecustomize.py`),
# and in the processes of tests, which begin one with each file (see below).
_STARTED = str(Path(__file__).parent / "started")
_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if _STARTED not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join([_STARTED, *filter(None, _PATHS)])
sys.path.append(_STARTED)
gc.set_threshold(100_000, 50, 100)

GROWTH = 3 * 2**29
"""Bytes by which a process of tests may grow until it drops compiled programs."""

_most_memory = GROWTH

# A shell tells what it runs in the background to ignore Ctrl-C, and the programs that
# tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` tries the first examples of those that `make test-thorough` tries.
for _profile, _examples in (("some", 40), ("all", 100)):
    hypothesis.settings.register_profile(
        _profile,
        derandomize=True,
        deadline=None,
        print_blob=True,
        max_examples=_examples,
    )
hypothesis.settings.load_profile("some")


pytest_plugins = ["parts"]


DURATIONS = Path(__file__).parent / "durations.txt"
"""Files of tests that take some seconds, and how many; `make durations` writes it."""
SECONDS = {
    name: int(seconds)
    for seconds, name in map(str.split, DURATIONS.read_text().splitlines())
}
SLOW = 8
"""Seconds of a file that begins early: none begins when the others have ended."""

WHOLE = {"accelerator", "attack", "chaos", "examples", "optax", "system"}
"""Folders of tests of the whole: clusters, faults, programs of users."""


class Durations:
    """Writes down how long each file took."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = Path(report.nodeid.split("::")[0]).name
        self._seconds[name] += report.duration

    def pytest_sessionfinish(self) -> None:
        rows = [(round(n), name) for name, n in self._seconds.items() if n >= 2]
        rows.sort(key=lambda row: (-row[0], row[1]))
        DURATIONS.write_text("".join(f"{n} {name}\n" for n, name in rows))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    if not re.search(r"\bnot\b.*\bthorough\b", config.option.markexpr):
        hypothesis.settings.load_profile("all")
    if config.option.record_durations and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


@pytest.hookimpl(tryfirst=True)  # pytest selects by marks in this hook, too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, all others in the order of the folders, in whichever
    order they were collected. `make test-fast` leaves out what is marked here."""
    slow = {name for name, each in SECONDS.items() if each >= SLOW}
    for item in items:
        if item.path.name in slow or item.path.parent.name in WHOLE:
            item.add_marker("slow")
    items.sort(key=lambda item: (-SECONDS.get(item.path.name, 0), item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than cores: tests of processes wait for them much of the time."""
    del config
    return min(4, 1 + len(os.sched_getaffinity(0)))


class HastyLoop:
    """The running loop, but the first timer that fires comes half a millisecond early,
    as those of uvloop, which rounds to milliseconds, do now and then. Its clock stands
    still from then until a timer is set again: no delay of the machine hides it."""

    def __init__(self) -> None:
        self.came: float | None = None
        """What the timer that came early was set for."""
        self.again: float | None = None
        """What the next one was set for."""
        self._stands_at: float | None = None

    def get_running_loop(self) -> HastyLoop:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)

    def time(self) -> float:
        now = asyncio.get_running_loop().time()
        return now if self._stands_at is None else self._stands_at

    def call_at(self, when: float, callback: Any, *args: Any) -> asyncio.TimerHandle:
        def come() -> None:
            if self.came is None:
                self.came, self._stands_at = when, when - 0.0005
            callback(*args)

        if self._stands_at is not None:
            self.again, self._stands_at = when, None
        return asyncio.get_running_loop().call_at(when, come)


@pytest.fixture(scope="session")
def daemons():
    """Two parameter servers and two workers for one program after another, of all files
    that this process runs: no test kills or freezes one of them."""
    import zstrat as zs  # most processes need none

    with zs.LocalCluster(num_ps=2, num_workers=2) as local:
        yield local


@pytest.fixture(scope="session")
def programs():
    """For tests that start programs by `programs.py`."""
    import programs  # most processes need none

    with programs.serving():
        yield programs


@pytest.fixture
def hasty() -> HastyLoop:
    return HastyLoop()


@pytest.fixture(autouse=True, scope="session")
def programs_are_made_in_less_time():
    lowering = importlib.import_module("lowering")
    lowering.share_contexts()
    lowering.share_programs()


@pytest.fixture(autouse=True, scope="module")
def only_what_is_new_is_searched_for_garbage():
    """A process of many tests holds a million objects of jax: a collection looks at all
    of them again, a second each time, unless they are set aside file by file.

    Programs that jax has compiled stay, in gigabytes, until they are dropped here, now
    and then: to compile them again costs more than to keep them for some files."""
    global _most_memory
    jax = sys.modules.get("jax")
    is_full = jax is not None and _memory() > _most_memory
    if is_full:
        gc.unfreeze()
        jax.clear_caches()
        importlib.import_module("lowering").compiled.clear()
    gc.collect()
    gc.freeze()
    if is_full:
        _most_memory = _memory() + GROWTH


def _memory() -> int:
    """Returns the bytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize()


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Fixtures of a wider scope are set up before this one, and keep what they hold."""
    with leak_check():
        yield


class LogsSeen(logging.Handler):
    """Finds where clusters of this process kept the logs of tasks that were killed."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: set[Path] = set()

    def emit(self, record: logging.LogRecord) -> None:
        kept = [Path(arg) for arg in record.args or () if isinstance(arg, Path)]
        self.folders |= {p.parent for p in kept if p.parent.match("zstrat-logs-*")}


@pytest.fixture(autouse=True, scope="session")
def kept_logs_are_removed():
    """They outlive their cluster by design, and no test needs them after its end."""
    seen = LogsSeen()
    logging.getLogger("zstrat.launch").addHandler(seen)
    yield
    logging.getLogger("zstrat.launch").removeHandler(seen)
    for folder in seen.folders:
        shutil.rmtree(folder)
