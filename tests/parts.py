"""Which tests run with how many devices of the CPU, all in one session of pytest.

A process of jax keeps the number of devices that it began with. The files of `EIGHT`
are for processes with eight, all others for processes with one. Where pytest-xdist runs
tests of both, it gets one more worker, with eight devices, that collects and runs these
files alone; the others collect the rest. Without xdist, a process runs one part: these
files if they alone are named, else the others.

Tests of Keras are among them so that one process imports it: to collect a file is to
import it, and the others all collect the same files.
"""

import os
from pathlib import Path

import pytest

EIGHT = ("test_strategy_local_", "test_integrations_keras")
"""How the names of files begin that are for eight devices."""
NAMES = "".join(f"{name}*, " for name in EIGHT)
FOLDERS = [Path(__file__).parent / name for name in ("strategy", "integrations")]
"""Where they are."""
VARIABLE = "JAX_NUM_CPU_DEVICES"
WORKER = f"popen//env:{VARIABLE}=8"
"""A worker with eight devices, in the words of xdist."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if hasattr(config, "workerinput"):
        _configure_worker(config)
    elif os.environ.get(VARIABLE) == "8":
        pass  # somebody asks for eight devices everywhere, and gets every file
    elif config.getoption("tx", None) and not config.option.collectonly:
        _configure_controller(config)
    else:
        _configure_alone(config)


def _configure_worker(config):
    part = config.workerinput.get("part")
    if part != "eight":
        config.args[:] = _from_a_start_of_its_own(config)
    if part is not None:
        config.args[:] = [arg for arg in config.args if _has_some(part, arg, config)]
        config.pluginmanager.register(OnePart(part))


def _configure_controller(config):
    if all(map(_is_for_eight, config.args)):
        config.option.tx = [WORKER] * len(config.option.tx)
    elif any(_has_some("eight", arg, config) for arg in config.args):
        config.option.tx = [*config.option.tx, WORKER]
        config.pluginmanager.register(BothParts())


def _from_a_start_of_its_own(config):
    """The arguments of pytest, for a worker that begins elsewhere than the others.

    Each collects all tests. In a new checkout none of their files is compiled, which
    takes half a minute of the processor: each worker compiles some of them, and finds
    what the others have compiled. `conftest.py` sorts what they collect."""
    inner = [each for arg in config.args for each in _within(arg, config)]
    number = int(config.workerinput["workerid"].removeprefix("gw"))
    first = number * len(inner) // config.workerinput["workercount"]
    return inner[first:] + inner[:first]


def _within(argument, config):
    """The folders and files of tests in a folder, for an argument of pytest."""
    folder = config.invocation_params.dir / argument
    if not folder.is_dir():
        return [argument]
    paths = [*folder.glob("[a-z]*/"), *folder.glob("test_*.py")]
    return [str(path) for path in sorted(paths)]


def _configure_alone(config):
    named = [_is_for_eight(arg) for arg in config.args]
    if all(named):
        import jax

        os.environ[VARIABLE] = "8"  # for the processes that tests start
        jax.config.update("jax_num_cpu_devices", 8)
    elif any(named):
        raise pytest.UsageError(
            f"{NAMES}need a process with eight devices, other files one with one: "
            "name them in a call of their own, or have several processes (-n 2)"
        )
    elif any(_has_some("eight", arg, config) for arg in config.args):
        config.pluginmanager.register(OnePart("one"))


def _is_for_eight(argument):
    """Whether an argument of pytest is such a file, or a test of one."""
    return Path(str(argument).split("::")[0]).name.startswith(EIGHT)


def _has_some(part, argument, config):
    """Whether there may be tests of this part at an argument of pytest."""
    if part == "one":
        return not _is_for_eight(argument)
    return _is_for_eight(argument) or _is_above(config.invocation_params.dir / argument)


def _is_above(path):
    path = path.resolve()
    return any(path in (folder, *folder.parents) for folder in FOLDERS)


class OnePart:
    """What a process collects that runs tests of one part."""

    def __init__(self, part):
        self._part = part
        self._left_out = set()

    def pytest_ignore_collect(self, collection_path):
        if collection_path.is_dir():
            ignored = self._part == "eight" and not _is_above(collection_path)
        else:
            ignored = _is_for_eight(collection_path) != (self._part == "eight")
            if ignored and self._part == "one":
                self._left_out.add(collection_path)
        return ignored or None

    def pytest_terminal_summary(self, terminalreporter):
        if self._left_out:
            terminalreporter.write_line(
                f"left out: {len(self._left_out)} files {NAMES}for eight devices; "
                "name them alone, or have several processes (-n 2)"
            )


class BothParts:
    """Tells each worker of its part, and gives it the tests of that part."""

    def pytest_sessionstart(self, session):
        self._session = session

    def pytest_configure_node(self, node):
        is_eight = node.gateway.spec.env.get(VARIABLE) == "8"
        node.workerinput["part"] = "eight" if is_eight else "one"

    @pytest.hookimpl(tryfirst=True)
    def pytest_xdist_make_scheduler(self, config, log):
        make = config.pluginmanager.getplugin("dsession").pytest_xdist_make_scheduler
        parts = {part: make(config, log) for part in ("one", "eight")}
        parts["eight"].numnodes = 1
        parts["one"].numnodes -= 1
        return PartScheduling(parts, self._session)


class PartScheduling:
    """A scheduler of xdist for each part, behind the face of one."""

    def __init__(self, parts, session):
        self._parts = parts
        self._session = session
        self._collected = {}

    @property
    def nodes(self):
        return [node for part in self._parts.values() for node in part.nodes]

    @property
    def collection_is_completed(self):
        return all(part.collection_is_completed for part in self._parts.values())

    @property
    def tests_finished(self):
        return all(part.tests_finished for part in self._parts.values())

    @property
    def has_pending(self):
        return any(part.has_pending for part in self._parts.values())

    def add_node(self, node):
        self._of(node).add_node(node)

    def add_node_collection(self, node, collection):
        self._collected[node.workerinput["part"]] = len(collection)
        self._of(node).add_node_collection(node, collection)

    def mark_test_complete(self, node, item_index, duration=0):
        self._of(node).mark_test_complete(node, item_index, duration)

    def mark_test_pending(self, item):
        part = "eight" if _is_for_eight(item) else "one"
        self._parts[part].mark_test_pending(item)

    def remove_pending_tests_from_node(self, node, indices):
        self._of(node).remove_pending_tests_from_node(node, indices)

    def remove_node(self, node):
        return self._of(node).remove_node(node)

    def schedule(self):
        # xdist takes one worker's tests for those of the session.
        self._session.testscollected = sum(self._collected.values())
        for part in self._parts.values():
            part.schedule()

    def _of(self, node):
        return self._parts[node.workerinput["part"]]
