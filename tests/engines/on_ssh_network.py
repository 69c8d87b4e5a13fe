"""A program on hosts with addresses of their own, in the network namespace of the test:
what it says of hosts that will not do, and of one that it loses."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
from engine_run import Heard, said, used
from engines_ask import pid_of

import zstrat as zs
from zstrat.config import Settings, Timeouts


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
        strategy = zs.ParameterServerStrategy(cluster)
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


def stays_cut(file, link):
    """The line to node2 goes down for good: seconds until nothing of ours is there."""
    settings = Settings(Timeouts(launcher=10.0))
    with zs.launch.ssh(file, settings=settings) as cluster:
        strategy = zs.ParameterServerStrategy(cluster)
        coordinator = zs.ClusterCoordinator(strategy)
        step = zs.function(lambda: zs.get_worker_context().worker_index)
        for index in (0, 1):
            used(coordinator, step, index)
        daemon = psutil.Process(int(pid_of(cluster.log("worker:0"))))
        began = time.monotonic()
        subprocess.run(["ip", "link", "set", link, "down"], check=True)
        daemon.wait(120)
        ended = time.monotonic() - began
        assert coordinator.schedule(step).fetch() == 1, "training goes on"
        strategy.close()
    subprocess.run(["ip", "link", "set", link, "up"], check=True)
    return ended


def main():
    folder = Path(sys.argv[1])
    found = {each: refused(folder / f"{each}.toml") for each in ("hole", "versions")}
    done, seconds = loses(folder / "hosts.toml", sys.argv[2])
    seconds["launcher"] = stays_cut(folder / "hosts.toml", sys.argv[2])
    said(**found, done=done, seconds=seconds)


if __name__ == "__main__":
    sys.exit(main())
