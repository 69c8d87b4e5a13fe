"""A program on a Ray of several nodes, of which one is lost: first there is room for
what ran there elsewhere, then there is none, and then there is room again."""

import logging
import sys

import ray
from engine_run import Heard, said, used
from ray.cluster_utils import Cluster

import zstrat as zs


def where_am_i():
    return zs.get_worker_context().worker_index


def main():
    nodes = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False},
    )
    ray.init(address=nodes.address, log_to_driver=False)
    second = nodes.add_node(num_cpus=1, resources={"far": 1})
    third = nodes.add_node(num_cpus=1, resources={"far": 1})
    nodes.wait_for_nodes()
    logging.getLogger("zstrat").setLevel(logging.INFO)
    with zs.launch.ray(1, 2, worker_resources={"far": 0.6}) as cluster:
        strategy = zs.ParameterServerStrategy(cluster)
        coordinator = zs.ClusterCoordinator(strategy)
        step = zs.function(where_am_i)
        for index in (0, 1):
            used(coordinator, step, index)
        lost = Heard("was lost with its actor")
        no_room = Heard("Ray has no free resources for worker:")
        back = Heard("/job:worker/task:", "is back")
        nodes.remove_node(second, allow_graceful=False)
        lost.wait()
        no_room.wait()
        coordinator.schedule(step).fetch()  # training goes on with the other one
        nodes.add_node(num_cpus=1, resources={"far": 1})
        back.wait()
        for index in (0, 1):
            used(coordinator, step, index)
        strategy.close()
    said(done=True)
    ray.shutdown()
    nodes.remove_node(third)
    nodes.shutdown()


if __name__ == "__main__":
    sys.exit(main())
