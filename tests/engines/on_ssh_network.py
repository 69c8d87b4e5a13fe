"""A program on hosts with addresses of their own, in the network namespace of the test:
what it says of hosts that will not do, and of one that it loses."""

import subprocess
import sys
import time
from pathlib import Path

from engine_run import Heard, said, used

import zstrat as zs


def refused(file):
    """What is said, and after how many seconds."""
    began = time.monotonic()
    try:
        zs.launch.ssh(file)
    except zs.ZstratError as error:
        words = type(error).__name__, str(error)
        return [*words, time.monotonic() - began]
    return ["", "it was taken", 0.0]


def loses(file, link):
    """The line to node2, which has worker:0, is down until that is noticed. Returns
    how many steps were done meanwhile, and seconds."""
    with zs.launch.ssh(file) as cluster:
        strategy = zs.ParameterServerStrategy(
            cluster.resolver, settings=cluster.settings
        )
        with strategy.scope():
            count = zs.Variable(0, name="count")

        @zs.function
        def step():
            count.assign_add(1)
            return zs.get_worker_context().worker_index

        coordinator = zs.ClusterCoordinator(strategy)
        for index in (0, 1):
            used(coordinator, step, index)
        lost = Heard("worker:0", "ssh lost node2")
        back = Heard("/job:worker/task:0", "is back")
        before, began = int(count.numpy()), time.monotonic()
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
        for _ in range(20):
            coordinator.schedule(step)
        coordinator.join()
        done = int(count.numpy()) - before
        went_on = time.monotonic() - began
        lost.wait()
        subprocess.run(["ip", "link", "set", link, "up"], check=True)
        back.wait()
        used(coordinator, step, 0)
        strategy.close()
    return done, {"went_on": went_on, "back": time.monotonic() - began}


def main():
    folder = Path(sys.argv[1])
    found = {each: refused(folder / f"{each}.toml") for each in ("hole", "versions")}
    done, seconds = loses(folder / "hosts.toml", sys.argv[2])
    said(**found, done=done, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main())
