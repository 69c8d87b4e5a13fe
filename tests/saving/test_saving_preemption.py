"""Programs whose end is announced save, end with 75, and go on from there."""

import os
import signal
import threading

import numpy as np
import pytest

import zstrat as zs
from zstrat.cluster import ClusterSpec, SimpleClusterResolver, free_ports
from zstrat.saving import Checkpoint, CheckpointManager

Handler = zs.PreemptionCheckpointHandler
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def signals():
    before = [signal.getsignal(each) for each in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def kill_at(handler, v, number, run):
    """Runs until the end; announces it within a run, which goes on."""

    def step():
        if handler.total_run_calls == run - 1:
            os.kill(os.getpid(), number)
        v.assign_add(1.0)
        return float(v.numpy())

    while handler.total_run_calls < 9:
        assert handler.run(step) == handler.total_run_calls


@pytest.mark.shows(
    "tf.distribute.experimental.PreemptionCheckpointHandler",
    "PreemptionCheckpointHandler.run",
    "PreemptionCheckpointHandler.total_run_calls",
)
@pytest.mark.parametrize("number", SIGNALS)
def test_the_run_ends_and_the_next_program_goes_on(tmp_path, number):
    v = zs.Variable(np.float32(0))
    handler = Handler(None, Checkpoint(v=v), tmp_path)
    with pytest.raises(SystemExit) as left:
        kill_at(handler, v, number, run=3)
    assert left.value.code == 75
    assert (handler.total_run_calls, v.numpy()) == (3, 3.0)
    again = zs.Variable(np.float32(0))
    with Handler(None, Checkpoint(v=again), tmp_path) as handler:
        assert (handler.total_run_calls, again.numpy()) == (3, 3.0)
        kill_at(handler, again, signal.SIGURG, run=9)  # which announces nothing
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_checkpoint_from_before_there_was_a_handler(tmp_path):
    v = zs.Variable(np.float32(0))
    manager = CheckpointManager(Checkpoint(v=v), tmp_path, 2)
    v.assign(7.0)
    manager.save()
    v.assign(0.0)
    with zs.PreemptionHandler(manager) as handler:
        assert (handler.total_run_calls, v.numpy()) == (0, 7.0)


@pytest.mark.shows(
    "PreemptionCheckpointHandler.watch_preemption_scope",
    "PreemptionCheckpointHandler.save_checkpoint_if_preempted",
    "tf.distribute.experimental.TerminationConfig",
)
def test_what_the_program_says_itself(tmp_path):
    said, ended, saved = [], [], []
    config = zs.TerminationConfig(
        termination_watcher_fn=lambda: bool(said),
        exit_fn=lambda: ended.append(True),
        save_fn=lambda: saved.append(True),
    )
    v, before = zs.Variable(np.float32(0)), signal.getsignal(signal.SIGTERM)
    with Handler(None, Checkpoint(v=v), tmp_path, config) as handler:
        assert signal.getsignal(signal.SIGTERM) is before
        said.append(True)
        with handler.watch_preemption_scope():
            assert not ended
    assert (ended, saved) == ([True], [True])
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="grace_period=-1"):
        zs.TerminationConfig(grace_period=-1)


def test_a_grace_period_is_trained_in(tmp_path):
    """A checkpoint at once, and one more before the end."""
    saved = []
    config = zs.TerminationConfig(
        save_fn=lambda: saved.append(handler.total_run_calls), grace_period=1e6
    )
    with Handler(None, Checkpoint(), tmp_path, config) as handler:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):
            handler.run(lambda: None)
        assert saved == [1]


def test_all_processes_save_after_the_same_run(tmp_path):
    """One is told, another one is the first; both are threads here."""
    cluster = ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]})
    told, left = threading.Event(), {}

    def process(rank):
        v = zs.Variable(np.float32(0))
        config = zs.TerminationConfig(
            termination_watcher_fn=lambda: rank == 1 and told.is_set(),
            exit_fn=lambda: left.update({rank: (handler.total_run_calls, v.numpy())}),
        )
        resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=rank)
        handler = Handler(resolver, Checkpoint(v=v), tmp_path / "all", config)
        with handler:
            while rank not in left:
                if rank == 0 and handler.total_run_calls == 2:
                    told.set()
                handler.run(v.assign_add, 1.0)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left[0] == left[1]
    assert [each.name for each in tmp_path.iterdir()] == ["all"]
    v = zs.Variable(np.float32(0))
    with Handler(None, Checkpoint(v=v), tmp_path / "all") as handler:
        assert (handler.total_run_calls, v.numpy()) == left[0]


def test_signals_are_as_before_if_no_group_forms(tmp_path, monkeypatch):
    before = [signal.getsignal(each) for each in SIGNALS]

    def no_group(*_, **__):
        raise zs.PeerLostError("worker:1", "it was never there")

    monkeypatch.setattr(zs.collectives.Group, "_form_now", no_group)
    cluster = ClusterSpec({"worker": ["127.0.0.1:1", "127.0.0.1:2"]})
    resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=0)
    with pytest.raises(zs.PeerLostError):
        Handler(resolver, Checkpoint(), tmp_path / "all")
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_bad_arguments(tmp_path):
    manager = CheckpointManager(Checkpoint(), tmp_path / "a", 1)
    with pytest.raises(zs.InvalidArgumentError, match="checkpoint_dir"):
        Handler(None, Checkpoint())
    with pytest.raises(zs.InvalidArgumentError, match="checkpoint_dir"):
        Handler(None, manager, tmp_path / "b")
    cluster = SimpleClusterResolver(ClusterSpec({"worker": ["h:1", "h:2"]}))
    with pytest.raises(ValueError, match="PreemptionCheckpointHandler"):
        Handler(cluster, manager)
    errors = []

    def elsewhere():
        try:
            Handler(None, manager)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "termination_watcher_fn" in errors[0]


def test_a_forked_process_is_not_the_program(tmp_path, programs):
    """It ends by SIGTERM, and goes on through what only announces the end."""
    body = """
import os, signal, sys, warnings
import zstrat as zs
from zstrat.saving import Checkpoint
warnings.simplefilter("ignore")  # of jax, about every fork

with zs.PreemptionCheckpointHandler(None, Checkpoint(), sys.argv[1]) as handler:
    if (child := os.fork()) == 0:
        while True:
            signal.pause()
    os.kill(child, signal.SIGUSR1)
    os.kill(child, signal.SIGTERM)
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    handler.save_checkpoint_if_preempted()  # nothing was announced here
"""
    done = programs.run(["-c", body, str(tmp_path)], timeout=60)
    assert done.returncode == 0
