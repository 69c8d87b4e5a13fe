"""What every test gets: a quiet JAX, repeatable examples, and a look for leftovers."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
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
gc.set_threshold(100_000, 50, 100)

# A shell tells what it runs in the background to ignore Ctrl-C, and the programs that
# tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, print_blob=True
)
hypothesis.settings.load_profile("repeatable")


pytest_plugins = ["parts"]


SLOWEST = (
    "test_system_going_on_copies.py",  # waits a minute for what may still come
    "test_examples_digits.py",
    "test_system_tables.py",
    "test_optax_quick.py",
    "test_system_collectives_faults.py",
    "test_examples_shared.py",
    "test_examples_together.py",
    "test_system_faults.py",
    "test_system_printing.py",
    "test_strategy_multi_worker_processes.py",
    "test_testing_simulation.py",
    "test_program_embedding.py",
    "test_architecture.py",
    "test_collectives_hosts.py",
    "test_launch_local.py",
    "test_examples_devices.py",
    "test_examples_word2vec.py",
    "test_examples_notebook.py",
    "test_optax_docs.py",
    "test_system_restores.py",
    "test_program_table_gradients.py",
    "test_cli.py",
    "test_ps_engine.py",
    "test_system_turnover.py",
    "test_system_moves.py",
    "test_system_cuts.py",
    "test_system_collectives_network.py",
    "test_ps_operands.py",
    "test_ps_rows.py",
    "test_system_checkpoints_faults.py",
    "test_system_going_on.py",
    "test_system_mirrored.py",
    "test_optax_handle.py",
    "test_system_training.py",
    "test_system_collectives.py",
    "test_system_network.py",
    "test_system_checkpoints.py",
    "test_system_zombies.py",
    "test_chaos_short.py",
    "test_collectives_progress.py",
    "test_collectives_onehost.py",
    "test_strategy_local_new_steps.py",
    "test_strategy_local_variables.py",
    "test_strategy_local_ranks_uneven.py",
    "test_daemons_life.py",
    "test_streams.py",
    "test_system_forks.py",
    "test_strategy_local_integer_rows.py",
    "test_strategy_local_examples.py",
    "test_collectives_faults_shm.py",
    "test_strategy_on_read_integer_means.py",
    "test_coordinator_exit.py",
    "test_transport_close.py",
    "test_transport_loss.py",
    "test_strategy_multi_worker.py",
    "test_packaging.py",
    "test_page_browser.py",
    "test_testing_clusters.py",
    "test_parts.py",
)
"""Files of some eight seconds or more: none begins when the others have ended."""

WHOLE = {"accelerator", "attack", "chaos", "examples", "optax", "system"}
"""Folders of tests of the whole: clusters, faults, programs of users."""


@pytest.hookimpl(tryfirst=True)  # pytest selects by marks in this hook, too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first, all others in the order of the folders. `make test-fast`
    leaves out what is marked here."""
    places = {name: place for place, name in enumerate(SLOWEST)}
    for item in items:
        if item.path.name in places or item.path.parent.name in WHOLE:
            item.add_marker("slow")
    items.sort(key=lambda item: places.get(item.path.name, len(SLOWEST)))


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


@pytest.fixture(autouse=True, scope="module")
def only_what_is_new_is_searched_for_garbage():
    """A process of many tests holds a million objects of jax: a collection looks at all
    of them again, a second each time, unless they are set aside file by file."""
    gc.collect()
    gc.freeze()


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
