"""Jobs of which some tasks are missing, or all."""

import pytest

from zstrat.cluster import (
    ClusterSpec,
    SimpleClusterResolver,
    UnionResolver,
    worker_count,
)


@pytest.mark.parametrize(
    ("cluster", "job", "count"),
    [
        ({"worker": {1: "b:1"}, "ps": ["p:1"]}, "worker", 1),
        ({"worker": {2: "b:1", 5: "c:1"}, "chief": ["c:1"]}, "worker", 3),
        ({"worker": {2: "b:1", 5: "c:1"}, "chief": ["c:1"]}, "chief", 3),
        ({"worker": ["a:1"], "evaluator": {1: "e:1"}}, "evaluator", 1),
        ({"worker": ["a:1"]}, "evaluator", 0),
    ],
)
def test_workers_are_counted_where_task_0_is_missing(cluster, job, count):
    assert worker_count(cluster, job) == count
    assert worker_count(ClusterSpec(cluster), job) == count


def test_what_is_no_job_to_count_is_still_refused():
    sparse = {"worker": {1: "b:1"}, "ps": {1: "p:1"}}
    with pytest.raises(ValueError, match=r"`task_type`.*'ps'"):
        worker_count(sparse, "ps")
    with pytest.raises(ValueError, match=r"`task_type`.*'chief'"):
        worker_count(sparse, "chief")
    with pytest.raises(ValueError, match="task_type"):
        worker_count(sparse, "painter")
    with pytest.raises(ValueError, match="cluster_spec"):
        worker_count(["a:1"], "worker")


def union_of(*tasks):
    return (
        UnionResolver(
            *(SimpleClusterResolver(ClusterSpec({"worker": each})) for each in tasks)
        )
        .cluster_spec()
        .as_dict()
    )


@pytest.mark.parametrize("nothing", [[], {}])
def test_a_part_without_tasks_adds_nothing_to_a_union(nothing):
    parts = [["a:1"], ["b:1"]]
    for place in range(3):
        with_it = [*parts[:place], nothing, *parts[place:]]
        assert union_of(*with_it) == {"worker": ["a:1", "b:1"]}
    sparse = {"worker": {0: "a:1", 3: "d:1"}}
    assert union_of(["a:1"], nothing, {3: "d:1"}) == sparse
    assert union_of(nothing) == union_of(nothing, []) == {"worker": {}}
