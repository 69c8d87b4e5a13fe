"""Daemons on machines of their own, whose network is cut; for a program on one more.

The program that makes the machines runs another one on the last of them, which has the
cluster and does the work.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chaos_cluster import LONGER, PATIENCE, RECONNECT, SHORTER

import zstrat as zs
from zstrat.config import Settings, Timeouts
from zstrat.testing import SwitchedNetwork
from zstrat.transport import generate_keys

PORT = 7070
COUNT = 2
"""Parameter servers, and workers."""


class Network:
    """``kinds`` of faults are the methods of this class, by name."""

    def __init__(self, name):
        self._machines = SwitchedNetwork(2 * COUNT + 1, name)
        self._tasks = [f"{job}:{n}" for job in ("ps", "worker") for n in range(COUNT)]
        self._running = {}

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            generate_keys(folder / "keys")
            times = Timeouts(liveness=PATIENCE, reconnect=RECONNECT)
            self._settings = Settings(times, transport="tcp", keys=folder / "keys")
            self._log = stack.enter_context((folder / "log").open("wb"))
            stack.callback(self._end)
            for task in self._tasks:
                self._start(task)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error):
        self._stack.close()

    def strategy(self):
        spec = {
            job: [self._address(task) for task in self.tasks(job)]
            for job in ("ps", "worker")
        }
        return zs.ParameterServerStrategy(
            zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec(spec)),
            variable_partitioner=zs.partitioners.FixedShardsPartitioner(COUNT),
            settings=self._settings,
        )

    def tasks(self, job):
        return [task for task in self._tasks if task.startswith(job)]

    def pulled(self, rng):
        """The cable of a server is out for less than anybody's patience."""
        self._for(SHORTER, self._machines.unplugged, rng.choice(self.tasks("ps")))

    def long_pulled(self, rng):
        """For longer, and is put in again."""
        self._for(LONGER, self._machines.unplugged, rng.choice(self.tasks("ps")))

    def worker_pulled(self, rng):
        """The cable of a worker, for long."""
        self._for(LONGER, self._machines.unplugged, rng.choice(self.tasks("worker")))

    def loss(self, rng):
        """All that a server sends and is sent is lost, for less than anybody's
        patience."""
        self._for(SHORTER, self._machines.lossy, rng.choice(self.tasks("ps")))

    def long_loss(self, rng):
        """For longer, and heals."""
        self._for(LONGER, self._machines.lossy, rng.choice(self.tasks("ps")))

    def worker_loss(self, rng):
        """All that a worker sends and is sent is lost, for long."""
        self._for(LONGER, self._machines.lossy, rng.choice(self.tasks("worker")))

    def mute(self, rng):
        """A server hears and is not heard, for less than anybody's patience."""
        self._for(SHORTER, self._machines.mute, rng.choice(self.tasks("ps")))

    def long_mute(self, rng):
        """For longer, and heals."""
        self._for(LONGER, self._machines.mute, rng.choice(self.tasks("ps")))

    def worker_mute(self, rng):
        """A worker hears and is not heard, for long."""
        self._for(LONGER, self._machines.mute, rng.choice(self.tasks("worker")))

    def kill(self, rng):
        """A worker is killed, and started again."""
        task = rng.choice(self.tasks("worker"))
        self._running[task].kill()
        self._running[task].wait()
        time.sleep(rng.uniform(0.0, 1.0))
        self._start(task)

    def _for(self, seconds, fault, task):
        with fault(self._tasks.index(task)):
            time.sleep(seconds)

    def _address(self, task):
        return f"{self._machines.addresses[self._tasks.index(task)]}:{PORT}"

    def _start(self, task):
        job, index = task.split(":")
        machine = self._machines.names[self._tasks.index(task)]
        command = [sys.executable, "-m", f"zstrat.daemons.{job}", "--index", index]
        command += ["--bind", self._address(task), "--parent", str(os.getpid())]
        told = {
            "ZSTRAT_LIVENESS": str(PATIENCE),
            "ZSTRAT_KEYS": str(self._settings.keys),
            "ZSTRAT_TRANSPORT": "tcp",
            "NPROC": "1",
            "TF_CONFIG": "{}",
        }
        self._running[task] = subprocess.Popen(
            [*self._machines.inside(machine), *command],
            env={**os.environ, **told},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
        )

    def _end(self):
        for process in self._running.values():
            process.kill()
            process.communicate()


HARMLESS = (
    *("pulled", "loss", "mute"),
    *("worker_pulled", "worker_loss", "worker_mute", "kill"),
)
"""Faults of which a program hears nothing."""
TOLD = ("long_pulled", "long_loss", "long_mute")
"""Those after which it may hear that a server is away, but not that it is lost."""
