"""A cluster of daemons on this machine, behind relays, and what can befall it."""

import os
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import zstrat as zs
from zstrat.config import Settings, Timeouts
from zstrat.testing import DaemonCluster

PATIENCE, RECONNECT = 3.0, 1.0
SETTINGS = Settings(timeouts=Timeouts(liveness=PATIENCE, reconnect=RECONNECT))
LONGER = PATIENCE + RECONNECT + 2.0
"""Seconds after which a task that is away has been given up."""
SHORTER = 0.2 * PATIENCE
"""Seconds after which nobody has given up a task, also on a machine that is busy."""


class Cluster:
    """``kinds`` of faults are the methods of this class, by name.

    Args:
        replicas: Of its strategies; with 1 those faults may come that empty a server.
    """

    def __init__(self, num_ps=2, num_workers=2, replicas=0):
        self._replicas = replicas
        self._state = tempfile.TemporaryDirectory()
        settings = replace(SETTINGS, state=Path(self._state.name))
        self._made = DaemonCluster(num_ps, num_workers, settings=settings)

    def __enter__(self):
        self._made.__enter__()
        self.local = self._made.local
        return self

    def __exit__(self, *error):
        self._made.__exit__(*error)
        self._state.cleanup()

    def strategy(self):
        """Of a program that reaches everything through relays, as the workers do."""
        return zs.ParameterServerStrategy(
            self._made.resolver,
            variable_partitioner=zs.partitioners.FixedShardsPartitioner(2),
            settings=SETTINGS,
            replicas=self._replicas,
        )

    def tasks(self, job):
        return [task for task in self._made.tasks if task.startswith(job)]

    def reset(self, rng):
        """All connections of a task are reset."""
        self._made.reset(rng.choice(self._made.tasks))

    def resets(self, rng):
        """Some connections of all servers, ten times in a row."""
        for _ in range(10):
            for task in self.tasks("ps"):
                self._made.relay(task).reset(rng.choice([1, 2, 3]))
            time.sleep(rng.uniform(0.02, 0.15))

    def silence(self, rng):
        """A line to a server is cut for less than anybody's patience."""
        with self._made.blackholed(rng.choice(self.tasks("ps"))):
            time.sleep(SHORTER)

    def long_silence(self, rng):
        """For longer, and heals."""
        with self._made.blackholed(rng.choice(self.tasks("ps"))):
            time.sleep(LONGER)

    def worker_silence(self, rng):
        """A line to a worker, for long."""
        with self._made.blackholed(rng.choice(self.tasks("worker"))):
            time.sleep(LONGER)

    def kill(self, rng):
        """A worker is killed, and started again."""
        task = rng.choice(self.tasks("worker"))
        with self._made.killed(task):
            time.sleep(rng.uniform(0.0, 1.0))

    def freeze(self, rng):
        """A worker sleeps until it is lost, and wakes up."""
        self._freeze(rng.choice(self.tasks("worker")), LONGER)

    def doze(self, rng):
        """A server sleeps for less than anybody's patience."""
        self._freeze(rng.choice(self.tasks("ps")), SHORTER)

    def sleep(self, rng):
        """A server sleeps for longer, and wakes up with all it held."""
        self._freeze(rng.choice(self.tasks("ps")), LONGER)

    def retire(self, rng):
        """A server is told to stop, and another process goes on for it."""
        task = rng.choice(self.tasks("ps"))
        assert self.local.terminate(task) == 0
        self.local.restart(task)

    def kill_ps(self, rng):
        """A server is killed, and is started again, empty."""
        with self._made.killed(rng.choice(self.tasks("ps"))):
            time.sleep(rng.uniform(0.0, LONGER))

    def stop_ps(self, rng):
        """A server is told to end, and is started again, empty: another one has what
        it held."""
        task = rng.choice(self.tasks("ps"))
        os.kill(self.local.pid(task), signal.SIGTERM)
        time.sleep(rng.uniform(0.5, LONGER))
        self.local.restart(task)

    def suspend(self, rng):
        """This program is stopped, as by Ctrl-Z, and goes on."""
        del rng
        me = os.getpid()
        script = f"kill -STOP {me}; sleep {LONGER}; kill -CONT {me}"
        subprocess.run(["sh", "-c", script], check=True)

    def _freeze(self, task, seconds):
        with self._made.frozen(task):
            time.sleep(seconds)


HARMLESS = (
    "reset",
    "resets",
    "silence",
    "worker_silence",
    "kill",
    "freeze",
    "doze",
    "retire",
)
"""Faults of which a program hears nothing."""
TOLD = ("long_silence", "sleep", "suspend")
"""Those after which it may hear that a server is away, but not that it is lost."""
SURVIVED = ("kill_ps", "stop_ps", "sleep", "long_silence", "reset", "kill", "freeze")
"""Faults of which nothing is heard if servers have second copies."""
