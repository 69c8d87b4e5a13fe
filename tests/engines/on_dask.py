"""A program on Dask, with what its user types: a worker of Dask is killed, which its
nanny starts again, and then a machine of Dask goes and does not come back."""

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import distributed
import psutil
from engine_run import Heard, said, used, went_through

import zstrat as zs

GPUS = {"127.0.1.1": "0,1", "127.0.1.2": "2,3"}
"""Of two machines, as far as addresses go. Nobody computes on them here."""


def daemons():
    """In a worker of Dask: its process, and what it has started."""
    ps = ["ps", "-o", "args=", "--ppid", str(os.getpid())]
    return os.getpid(), subprocess.run(ps, capture_output=True, text=True).stdout


def kill_beside(client, words):
    """Ends the process of the worker of Dask that has started such a daemon."""
    for pid, children in client.run(daemons).values():
        if words in children:
            os.kill(pid, signal.SIGKILL)


def where_am_i():
    return zs.get_worker_context().worker_index


def with_nannies():
    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address=None,
        ) as dask,
        distributed.Client(dask) as client,
    ):
        began = time.monotonic()
        with zs.launch.dask(client, num_ps=1, num_workers=2) as cluster:
            seconds, started = went_through(cluster, began)
            again = Heard("worker:0", "was lost with its Dask worker")
            killed = time.monotonic()
            kill_beside(client, "launched worker --index 0")
            again.wait()
            strategy = zs.ParameterServerStrategy(cluster)
            used(zs.ClusterCoordinator(strategy), zs.function(where_am_i), 0)
            seconds["dask_worker_back"] = time.monotonic() - killed
            strategy.close()
        assert not any(psutil.pid_exists(pid) for pid in started.values())
        assert client.submit(sum, [1, 2]).result() == 3
    return seconds


def moved():
    """A machine goes for good: its task goes to the other one, at an address there,
    and has a GPU together with the worker that is there. The strategy follows."""
    with (
        tempfile.TemporaryFile("w+") as log,
        distributed.LocalCluster(
            n_workers=0, host="127.0.0.1", dashboard_address=None
        ) as dask,
    ):
        workers = {
            host: subprocess.Popen(
                [
                    *(sys.executable, "-m", "distributed.cli.dask_worker"),
                    *(dask.scheduler_address, "--host", host, "--no-nanny"),
                    *("--nthreads", "1", "--no-dashboard"),
                ],
                env={
                    **os.environ,
                    "CUDA_VISIBLE_DEVICES": gpus,
                    "JAX_PLATFORMS": "",
                },
                stderr=log,
            )
            for host, gpus in GPUS.items()
        }
        try:
            with distributed.Client(dask) as client:
                client.wait_for_workers(2, timeout=60)
                found = moves(client, workers)
                log.seek(0)
                words = r"worker (\d) of (\d) on this host uses GPU (.*)"
                return {**found, "gpus": re.findall(words, log.read())}
        finally:
            for each in workers.values():
                each.terminate()
                each.wait()


def moves(client, workers):
    logging.getLogger("zstrat").setLevel(logging.INFO)
    with zs.launch.dask(client, num_ps=1, num_workers=2) as cluster:
        homes = {task: cluster.where(task) for task in cluster.tasks}
        stays = homes["ps:0"]
        (gone,) = GPUS.keys() - {stays}
        (moving,) = (t for t, at in homes.items() if at == gone and t != "ps:0")
        index = int(moving[-1])
        strategy = zs.ParameterServerStrategy(cluster)
        coordinator = zs.ClusterCoordinator(strategy)
        step = zs.function(where_am_i)
        for each in range(2):
            used(coordinator, step, each)
        back = Heard(f"/job:worker/task:{index}", "in the session")
        began = time.monotonic()
        workers[gone].kill()
        back.wait()
        used(coordinator, step, index)
        seconds = time.monotonic() - began
        address = cluster.spec.task_address("worker", index)
        strategy.close()
        return {
            "seconds": seconds,
            "moved": [gone, address.rpartition(":")[0]],
            "expected": [gone, stays],
            "there": GPUS[stays].split(","),
        }


def main():
    seconds = with_nannies()
    said(seconds=seconds, moved=moved())


if __name__ == "__main__":
    sys.exit(main())
