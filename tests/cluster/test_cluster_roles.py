"""TensorFlow's rules for a cluster and a task in it, with its words: what is valid, how
many tasks train, which number each has, who is the chief, who saves and who loads."""

import pytest

from zstrat.cluster import (
    ClusterSpec,
    id_in_cluster,
    is_chief,
    normalize_cluster_spec,
    should_load_checkpoint,
    should_save_checkpoint,
    should_save_summary,
    task_count,
    validate_cluster_spec,
    worker_count,
)

CHIEFLESS = {"worker": ["w0:1", "w1:1"], "ps": ["p0:1"]}
FULL = {
    "chief": ["c:1"],
    "worker": ["w0:1", "w1:1"],
    "ps": ["p0:1", "p1:1"],
    "evaluator": ["e:1"],
}


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
    validate_cluster_spec({"worker": {3: "w3:1"}}, "worker", 3)


def test_evaluator_may_be_missing_in_the_cluster():
    validate_cluster_spec(CHIEFLESS, "evaluator", 0)
    validate_cluster_spec(CHIEFLESS, "evaluator", 5)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "words"),
    [
        ({"master": ["m:1"]}, None, None, "ClusterSpec"),
        (FULL, "master", 0, "task_type"),
        (CHIEFLESS, "chief", 0, r"`task_type`.*'chief'.*cluster_spec"),
        ({"chief": ["a:1", "b:1"]}, None, None, "'chief'"),
        ({"evaluator": ["a:1", "b:1"]}, None, None, "'evaluator'"),
        ({"worker": {3: "w3:1"}}, "worker", 1, r"`task_id`.*\b1\b.*\[3\]"),
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
    assert not is_chief({"worker": {2: "w:2", 1: "w:1"}}, "worker", 1)


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


@pytest.mark.parametrize(
    ("cluster", "task", "saves", "loads"),
    [
        (FULL, ("chief", 0), True, True),
        (FULL, ("worker", 0), False, True),
        (FULL, ("evaluator", 0), True, True),
        (FULL, ("ps", 0), False, False),
        (CHIEFLESS, ("worker", 0), True, True),
        (CHIEFLESS, ("worker", 1), False, True),
    ],
)
def test_who_saves_and_loads(cluster, task, saves, loads):
    assert should_save_summary(cluster, *task) is saves
    assert should_save_checkpoint(cluster, *task) is saves
    assert should_load_checkpoint(cluster, *task) is loads


@pytest.mark.parametrize(
    "ask", [should_save_summary, should_save_checkpoint, should_load_checkpoint]
)
def test_a_task_that_cannot_be(ask):
    with pytest.raises(ValueError, match=r"`task_id`.*\b2\b"):
        ask(CHIEFLESS, "worker", 2)
