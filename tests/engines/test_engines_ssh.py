"""A fleet behind real ssh servers."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from engines_ask import eventually, pid_of

import zstrat as zs
from zstrat.config import Settings, Timeouts
from zstrat.errors import UnavailableError


def hosts(folder, text, config):
    file = folder / "hosts.toml"
    file.write_text(f'config = "{config}"\n{text}')
    return str(file)


def test_training_goes_on_when_tasks_are_killed(ssh_config, folder):
    file = hosts(folder, "[hosts.node1]\n[hosts.node2]\n", ssh_config)
    with zs.launch.ssh(file, num_ps=1, num_workers=2) as cluster:
        assert [cluster.where(task) for task in cluster.tasks] == [
            "node1",
            "node2",
            "node1",
        ]
        strategy = zs.ParameterServerStrategy(
            cluster.resolver, settings=cluster.settings, on_ps_loss="restore"
        )
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            count = zs.Variable(0)
        manager = zs.CheckpointManager(
            zs.Checkpoint(count=count), str(folder / "saved"), max_to_keep=2
        )

        @zs.function
        def step():
            count.assign_add(1)
            return zs.get_worker_context().worker_index

        def steps(n):
            for _ in range(n):
                coordinator.schedule(step)
            coordinator.join()

        steps(10)
        assert count.numpy() == 10
        for task in ("worker:0", "worker:1"):
            os.kill(pid_of(cluster.log(task)), signal.SIGKILL)
        steps(10)  # nobody is left: whoever is back does them
        assert count.numpy() == 20
        eventually(lambda: all(map(cluster.is_running, cluster.tasks)))
        manager.save()
        os.kill(pid_of(cluster.log("ps:0")), signal.SIGKILL)
        steps(10)
        assert count.numpy() == 30
        assert [cluster.attempt(task) for task in cluster.tasks] == [2, 2, 2]
        pids = [pid_of(cluster.log(task)) for task in cluster.tasks]
        coordinator.shutdown()
        strategy.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_nothing_outlives_a_program_that_is_killed(ssh_config, folder):
    file = hosts(folder, "ps = 1\nworkers = 1\n[hosts.node1]\n", ssh_config)
    program = (
        "import os, signal, sys, zstrat as zs\n"
        "cluster = zs.launch.ssh(sys.argv[1], directory=sys.argv[2])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    logs = folder / "logs"
    words = [sys.executable, "-c", program, file, str(logs)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    for log in logs.glob("*.log"):
        found = re.findall(r"pid (\d+)", log.read_text())
        eventually(lambda pids=found: not any(psutil.pid_exists(int(p)) for p in pids))


def test_a_task_that_hears_nothing_is_ended(ssh_config, folder):
    file = hosts(folder, "[hosts.node1]\n", ssh_config)
    quick = Settings(Timeouts(drain=1.0))
    with zs.launch.ssh(file, num_ps=1, num_workers=0, settings=quick) as cluster:
        eventually(lambda: "ready at" in cluster.log("ps:0"))
        pid = pid_of(cluster.log("ps:0"))
        os.kill(pid, signal.SIGSTOP)
    eventually(lambda: not psutil.pid_exists(pid))


def test_up_and_down(ssh_config, folder):
    file = hosts(folder, "ps = 1\nworkers = 0\n[hosts.node2]\n", ssh_config)
    zstrat = [sys.executable, "-m", "zstrat.cli"]
    up = subprocess.run([*zstrat, "up", "-d", file], check=False)
    assert up.returncode == 0
    cluster = ["--cluster", str(folder / "hosts.up" / "cluster.toml")]
    keys = ["--keys", str(folder / "hosts.up" / "keys")]
    seen = subprocess.check_output([*zstrat, "status", *cluster, *keys], text=True)
    assert "task=ps:0 address=127.0.1.2:" in seen
    again = subprocess.run(
        [*zstrat, "up", file], check=False, capture_output=True, text=True
    )
    assert (again.returncode, "is locked by another" in again.stderr) == (2, True)
    assert subprocess.run([*zstrat, "down", file], check=False).returncode == 0
    assert not (folder / "hosts.up").exists()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("port = 1", "Connection refused"),
        (
            'options = ["HostName=no.such.host.invalid"]\naddress = "127.0.1.2"',
            "no.such.host.invalid",
        ),
        ('user = "nobody-of-that-name"', "Permission denied"),
        ('python = "/nowhere/python"', "there is no /nowhere/python"),
        ('python = "/bin/false"', "exit code 1"),
    ],
)
def test_a_host_that_will_not_do(ssh_config, folder, host, words):
    text = f"ps = 1\nworkers = 1\n[hosts.node1]\n[hosts.node2]\n{host}\n"
    with pytest.raises(UnavailableError, match=words) as caught:
        zs.launch.ssh(hosts(folder, text, ssh_config))
    assert "worker:0 on node2" in str(caught.value)
