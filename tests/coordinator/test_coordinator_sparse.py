"""Clusters that leave task indices out: workers keep theirs, ps must be complete."""

import pytest

import zstrat.program as zs
from zstrat.cluster import ClusterSpec
from zstrat.coordinator import connect_session


@zs.function
def add(a, b):
    return a + b


def test_workers_keep_their_task_indices(make_world):
    world = make_world(workers=2)
    addresses = {5: "worker0:1", 2: "worker1:1"}
    world.spec = ClusterSpec({"ps": ["ps0:1"], "worker": addresses})
    made, make_link = {}, world.make_link

    def noted(address, **events):
        made[address] = (events["name"], events["expect"])
        return make_link(address, **events)

    world.make_link = noted
    coordinator = world.coordinator(closures_in_flight=1)
    assert made == {
        "ps0:1": ("/job:ps/task:0", ("ps", 0)),
        "worker0:1": ("/job:worker/task:5", ("worker", 5)),
        "worker1:1": ("/job:worker/task:2", ("worker", 2)),
    }
    results = [coordinator.schedule(add, args=(n, 1)) for n in range(6)]
    coordinator.join()
    assert coordinator.fetch(results) == [1, 2, 3, 4, 5, 6]
    assert set(coordinator.metrics()["workers"]) == {
        "/job:worker/task:2",
        "/job:worker/task:5",
    }


def test_parameter_servers_have_no_gaps(world):
    spec = ClusterSpec({"ps": {1: "ps0:1"}, "worker": ["worker0:1"]})
    with pytest.raises(ValueError, match=r"\[1\].* without gaps"):
        connect_session(spec, world.connect().settings, make_link=None)
