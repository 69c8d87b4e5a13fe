"""A program on Dask, with what its user types; a worker of Dask is killed, too."""

import os
import signal
import subprocess
import sys
import time

import distributed
import psutil
from engine_run import Heard, said, used, went_through

import zstrat as zs


def daemons():
    """In a worker of Dask: its process, and what it has started."""
    ps = ["ps", "-o", "args=", "--ppid", str(os.getpid())]
    return os.getpid(), subprocess.run(ps, capture_output=True, text=True).stdout


def main():
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
            seconds, pids = went_through(cluster, began)
            again = Heard("worker:0", "was lost with its worker of Dask")
            killed = time.monotonic()
            for pid, children in client.run(daemons).values():
                if "launched worker --index 0" in children:
                    os.kill(pid, signal.SIGKILL)
            again.wait()
            strategy = zs.ParameterServerStrategy(
                cluster.resolver, settings=cluster.settings
            )

            @zs.function
            def step():
                return zs.get_worker_context().worker_index

            used(zs.ClusterCoordinator(strategy), step, 0)
            seconds["dask_worker_back"] = time.monotonic() - killed
            strategy.close()
        assert not any(psutil.pid_exists(pid) for pid in pids.values())
        assert client.submit(sum, [1, 2]).result() == 3
    said(seconds=seconds)


if __name__ == "__main__":
    sys.exit(main())
