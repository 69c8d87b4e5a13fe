"""A program on Ray, with what its user types, and what goes wrong."""

import sys
import time

import psutil
import ray
from engine_run import pids, said, went_through

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
