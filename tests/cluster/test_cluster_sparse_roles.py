"""Roles in a cluster that has no task of some index."""

import pytest

from zstrat.cluster import (
    id_in_cluster,
    is_chief,
    should_save_checkpoint,
    should_save_summary,
    worker_count,
)

SPARSE = [
    {"ps": ["p:1"], "worker": {1: "w:1"}},
    {"ps": ["p:1"], "chief": ["c:1"], "worker": {3: "w:3"}},
    {"worker": {0: "w:0", 2: "w:2"}},
    {"chief": ["c:1"], "worker": {1: "w:1", 5: "w:5", 9: "w:9"}},
    {"worker": {2: "w:2", 1: "w:1"}},
]


@pytest.mark.parametrize("cluster", SPARSE)
def test_the_tasks_that_are_there_are_numbered_without_gaps(cluster):
    tasks = [("chief", 0)] if "chief" in cluster else []
    tasks += [("worker", index) for index in sorted(cluster["worker"])]
    numbers = [id_in_cluster(cluster, job, index) for job, index in tasks]
    assert numbers == list(range(worker_count(cluster, "worker")))


def test_a_task_that_is_not_there_has_no_number():
    with pytest.raises(ValueError, match=r"`task_id`.*\b1\b"):
        id_in_cluster({"worker": {0: "w:0", 2: "w:2"}}, "worker", 1)


@pytest.mark.parametrize("cluster", SPARSE)
@pytest.mark.parametrize("saves", [should_save_checkpoint, should_save_summary])
def test_one_of_those_that_train_saves(cluster, saves):
    tasks = [("chief", 0)] if "chief" in cluster else []
    tasks += [("worker", index) for index in sorted(cluster["worker"])]
    assert [saves(cluster, *task) for task in tasks] == [True] + [False] * (
        len(tasks) - 1
    )


def test_the_chief_is_tensorflows():
    assert not is_chief({"worker": {2: "w:2", 1: "w:1"}}, "worker", 1)
