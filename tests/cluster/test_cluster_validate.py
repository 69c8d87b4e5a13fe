"""TensorFlow's rules for a cluster and a task in it, with its words."""

import pytest

from zstrat.cluster import (
    ClusterSpec,
    id_in_cluster,
    is_chief,
    normalize_cluster_spec,
    task_count,
    validate_cluster_spec,
    worker_count,
)

FULL = {
    "chief": ["c:1"],
    "worker": ["w0:1", "w1:1"],
    "ps": ["p0:1", "p1:1"],
    "evaluator": ["e:1"],
}
CHIEFLESS = {"worker": ["w0:1", "w1:1"], "ps": ["p0:1"]}


@pytest.mark.parametrize("make", [dict, ClusterSpec])
def test_dictionaries_and_specs_are_normalized(make):
    assert normalize_cluster_spec(make(FULL)) == ClusterSpec(FULL)


@pytest.mark.parametrize("other", [None, [], "w:1", 3])
def test_nothing_else_is(other):
    with pytest.raises(ValueError, match="cluster_spec"):
        normalize_cluster_spec(other)


@pytest.mark.parametrize(
    ("task_type", "task_id"),
    [
        ("chief", 0),
        ("chief", None),
        ("worker", 1),
        ("ps", 0),
        ("evaluator", 0),
        (None, None),
        (None, 7),
    ],
)
def test_tasks_of_the_cluster_are_fine(task_type, task_id):
    validate_cluster_spec(FULL, task_type, task_id)


def test_evaluator_may_be_missing_in_the_cluster():
    validate_cluster_spec(CHIEFLESS, "evaluator", 0)
    validate_cluster_spec(CHIEFLESS, "evaluator", 5)


def test_sparse_job_is_checked_by_its_indices():
    sparse = {"worker": {3: "w3:1"}}
    validate_cluster_spec(sparse, "worker", 3)
    with pytest.raises(ValueError, match=r"`task_id`.*\b1\b.*\[3\]"):
        validate_cluster_spec(sparse, "worker", 1)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "words"),
    [
        ({"master": ["m:1"]}, None, None, "ClusterSpec"),
        (FULL, "master", 0, "task_type"),
        (CHIEFLESS, "chief", 0, r"`task_type`.*'chief'.*cluster_spec"),
        ({"chief": ["a:1", "b:1"]}, None, None, "'chief'"),
        ({"evaluator": ["a:1", "b:1"]}, None, None, "'evaluator'"),
        (FULL, "worker", 2, r"`task_id`.*\b2\b"),
        (FULL, "chief", 1, r"`task_id`.*\b1\b"),
        (FULL, "worker", -1, r"`task_id`.*\b1\b"),
        (FULL, "worker", None, r"`task_id`.*\b2\b"),
        ({"worker": []}, "worker", None, r"`task_id`.*\b0\b"),
        (None, None, None, "cluster_spec"),
    ],
)
def test_mistakes_in_tensorflows_words(cluster, task_type, task_id, words):
    with pytest.raises(ValueError, match=words):
        validate_cluster_spec(cluster, task_type, task_id)


def test_the_first_mistake_in_tensorflows_order_is_reported():
    cluster = {"master": ["m:1"], "chief": ["a:1", "b:1"]}
    with pytest.raises(ValueError, match=r"'chief'.*'worker'.*'master'"):
        validate_cluster_spec(cluster, "nobody", 9)
    del cluster["master"]
    with pytest.raises(ValueError, match=r"'chief'.*'worker'"):
        validate_cluster_spec(cluster, "nobody", 9)
    with pytest.raises(ValueError, match=r"'worker'.*cluster_spec.*\['chief'\]"):
        validate_cluster_spec(cluster, "worker", 9)
    with pytest.raises(ValueError, match="'chief'"):
        validate_cluster_spec(cluster, "chief", 9)


def test_counts():
    assert task_count(FULL, "ps") == 2
    assert task_count(CHIEFLESS, "chief") == 0
    assert worker_count(FULL, "worker") == worker_count(FULL, "chief") == 3
    assert worker_count(FULL, "evaluator") == 1
    assert worker_count(CHIEFLESS, "worker") == 2
    with pytest.raises(ValueError, match=r"`task_type`.*'ps'"):
        worker_count(FULL, "ps")


def test_ids():
    assert id_in_cluster(FULL, "chief", 0) == 0
    assert [id_in_cluster(FULL, "worker", index) for index in (0, 1)] == [1, 2]
    assert [id_in_cluster(CHIEFLESS, "worker", index) for index in (0, 1)] == [0, 1]
    assert id_in_cluster(FULL, "evaluator", 0) == 0
    with pytest.raises(ValueError, match=r"task_type.*'ps'"):
        id_in_cluster(FULL, "ps", 0)
    with pytest.raises(ValueError, match="`task_id`"):
        id_in_cluster(FULL, "worker", 2)


def test_chief():
    assert is_chief(FULL, "chief", 0)
    assert is_chief(FULL, "evaluator", 0)
    assert not is_chief(FULL, "worker", 0)
    assert is_chief(CHIEFLESS, "worker", 0)
    assert not is_chief(CHIEFLESS, "worker", 1)
    assert not is_chief(CHIEFLESS, "ps", 0)
