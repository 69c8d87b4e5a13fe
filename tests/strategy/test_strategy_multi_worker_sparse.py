"""One process of a cluster saves, also where worker 0 is missing."""

import pytest
from ranks import Board, Threads

import zstrat as zs
from zstrat.cluster import ClusterSpec, SimpleClusterResolver


def duties(cluster, job, index):
    """Whether the task saves checkpoints, and whether it saves summaries."""
    resolver = SimpleClusterResolver(ClusterSpec(cluster), task_type=job, task_id=index)
    strategy = zs.MultiWorkerMirroredStrategy(
        resolver, group=lambda *_: Threads(Board(1), 0)
    )
    return strategy.extended.should_checkpoint, strategy.extended.should_save_summary


SPECS = [
    {"worker": {1: "a:1", 2: "b:1"}},
    {"worker": {0: "a:1", 2: "b:1"}},
    {"worker": {4: "a:1"}},
    {"chief": ["c:1"], "worker": {0: "a:1", 3: "b:1"}},
    {"chief": ["c:1"]},
]


@pytest.mark.parametrize("cluster", SPECS)
def test_the_first_one_that_is_there_saves_alone(cluster):
    tasks = [("chief", 0)] if "chief" in cluster else []
    tasks += [("worker", index) for index in sorted(cluster.get("worker", ()))]
    found = [duties(cluster, *task) for task in tasks]
    assert found == [(True, True)] + [(False, False)] * (len(tasks) - 1)


@pytest.mark.parametrize("cluster", SPECS)
def test_so_does_an_evaluator(cluster):
    everybody = {**cluster, "evaluator": ["e:1"]}
    assert duties(everybody, "evaluator", 0) == (True, True)
