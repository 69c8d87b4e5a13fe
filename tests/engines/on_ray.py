"""A program on Ray, with what its user types, and what goes wrong."""

import gc
import os
import signal
import sys
import time

import psutil
import ray
from engine_run import Heard, pids, said, used, went_through
from ray.actor import ActorHandle

import zstrat as zs


def rooms(cpus):
    """Whether Ray has so many processors free, within a minute."""
    deadline = time.monotonic() + 60
    ready = [ray.util.placement_group([{"CPU": 1}]) for _ in range(cpus)]
    free = all(group.wait(max(0.0, deadline - time.monotonic())) for group in ready)
    for group in ready:
        ray.util.remove_placement_group(group)
    return free


def gpus():
    """What Ray has given to two workers, of GPUs that it believes to have."""
    with zs.launch.ray(num_workers=2, worker_resources={"GPU": 1}) as cluster:
        started = pids(cluster)
        return sorted(
            psutil.Process(started[f"worker:{n}"]).environ()["CUDA_VISIBLE_DEVICES"]
            for n in range(2)
        )


def loses_an_actor(cluster):
    """Its process is killed; the worker that was beside it is used again. Returns how
    long that took, in seconds."""
    daemon = psutil.Process(pids(cluster)["worker:0"])
    (actor,) = (each for each in daemon.parents() if "RayHost" in each.name())
    again, began = Heard("worker:0", "was lost with its actor"), time.monotonic()
    os.kill(actor.pid, signal.SIGKILL)
    again.wait()
    strategy = zs.ParameterServerStrategy(cluster)
    step = zs.function(lambda: zs.get_worker_context().worker_index)
    used(zs.ClusterCoordinator(strategy), step, 0)
    strategy.close()
    return time.monotonic() - began


def kills_an_actor(cluster):
    """As whoever has a handle may; the worker comes back."""
    handles = [each for each in gc.get_objects() if isinstance(each, ActorHandle)]
    address = cluster.spec.task_address("worker", 1)
    found = {ray.get(each.address.remote()): each for each in handles}
    again = Heard("worker:1", "was lost with its actor", "ray.kill")
    ray.kill(found[address])
    again.wait()
    del handles, found
    strategy = zs.ParameterServerStrategy(cluster)
    step = zs.function(lambda: zs.get_worker_context().worker_index)
    used(zs.ClusterCoordinator(strategy), step, 1)
    strategy.close()


def main():
    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
    began = time.monotonic()
    with zs.launch.ray(num_ps=1, num_workers=(1, 16)) as cluster:
        assert cluster.tasks == ("ps:0", "worker:0", "worker:1", "worker:2")
        try:
            zs.launch.ray(num_ps=1, num_workers=1, wait=1.0)
        except zs.UnavailableError as error:
            words = str(error)
        seconds, started = went_through(cluster, began)
        seconds["actor_back"] = loses_an_actor(cluster)
        kills_an_actor(cluster)
    assert not any(psutil.pid_exists(pid) for pid in started.values())
    assert rooms(4)
    try:
        zs.launch.ray(worker_resources={"GPU": 3}, wait=5.0)
    except zs.UnavailableError as error:
        lacking = str(error)
    said(seconds=seconds, full=words, lacking=lacking, gpus=gpus())
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
