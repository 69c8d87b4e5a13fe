"""A cluster of daemons on this machine, behind relays, and what can befall it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time

from chaos_relay import Relay

import zstrat as zs
from zstrat.config import Settings, Timeouts

PATIENCE, RECONNECT = 3.0, 1.0
SETTINGS = Settings(timeouts=Timeouts(patience=PATIENCE, reconnect=RECONNECT))
LONGER = PATIENCE + RECONNECT + 2.0
"""Seconds after which a task that is away has been given up."""
SHORTER = 0.2 * PATIENCE
"""Seconds after which nobody has given up a task, also on a machine that is busy."""


class Cluster:
    """``kinds`` of faults are the methods of this class, by name."""

    def __init__(self, num_ps=2, num_workers=2):
        with contextlib.ExitStack() as stack:
            self.local = stack.enter_context(
                zs.LocalCluster(num_ps, num_workers, lane="tcp", settings=SETTINGS)
            )
            self.relays = {}
            for task in self.local.tasks:
                job, index = task.split(":")
                relay = Relay(self.local.spec.task_address(job, int(index)))
                stack.callback(relay.close)
                self.relays[task] = relay
            self._stack = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stack.close()

    def strategy(self):
        """Of a program that reaches everything through relays, as the workers do."""
        spec = zs.ClusterSpec(
            {
                job: [r.address for task, r in self.relays.items() if job in task]
                for job in ("ps", "worker")
            }
        )
        return zs.ParameterServerStrategy(
            zs.cluster_resolver.SimpleClusterResolver(spec),
            variable_partitioner=zs.partitioners.FixedShardsPartitioner(2),
            settings=SETTINGS,
        )

    def tasks(self, job):
        return [task for task in self.local.tasks if task.startswith(job)]

    # ---- faults; those of a ps leave it whole

    def reset(self, rng):
        """All connections of a task are reset."""
        self.relays[rng.choice(list(self.relays))].cut()

    def resets(self, rng):
        """Some connections of all servers, ten times in a row."""
        for _ in range(10):
            for task in self.tasks("ps"):
                self.relays[task].cut(rng.choice([1, 2, 3]))
            time.sleep(rng.uniform(0.02, 0.15))

    def silence(self, rng):
        """A line to a server is cut for less than anybody's patience."""
        with self.relays[rng.choice(self.tasks("ps"))].held():
            time.sleep(SHORTER)

    def long_silence(self, rng):
        """For longer, and heals."""
        with self.relays[rng.choice(self.tasks("ps"))].held():
            time.sleep(LONGER)

    def worker_silence(self, rng):
        """A line to a worker, for long."""
        with self.relays[rng.choice(self.tasks("worker"))].held():
            time.sleep(LONGER)

    def kill(self, rng):
        """A worker is killed, and started again."""
        task = rng.choice(self.tasks("worker"))
        self.local.kill(task)
        time.sleep(rng.uniform(0.0, 1.0))
        self.local.restart(task)

    def freeze(self, rng):
        """A worker sleeps until it is lost, and wakes up."""
        self._freeze(rng.choice(self.tasks("worker")), LONGER)

    def doze(self, rng):
        """A server sleeps for less than anybody's patience."""
        self._freeze(rng.choice(self.tasks("ps")), SHORTER)

    def sleep(self, rng):
        """A server sleeps for longer, and wakes up with all it held."""
        self._freeze(rng.choice(self.tasks("ps")), LONGER)

    def suspend(self, rng):
        """This program is stopped, as by Ctrl-Z, and goes on."""
        del rng
        me = os.getpid()
        script = f"kill -STOP {me}; sleep {LONGER}; kill -CONT {me}"
        subprocess.run(["sh", "-c", script], check=True)

    def _freeze(self, task, seconds):
        self.local.stop_task(task)
        try:
            time.sleep(seconds)
        finally:
            self.local.continue_task(task)


HARMLESS = ("reset", "resets", "silence", "worker_silence", "kill", "freeze", "doze")
"""Faults of which a program hears nothing."""
TOLD = ("long_silence", "sleep", "suspend")
"""Those after which it may hear that a server is away, but not that it is lost."""
