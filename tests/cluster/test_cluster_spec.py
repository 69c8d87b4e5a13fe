"""ClusterSpec is a value with TensorFlow's answers."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.cluster import ClusterSpec

DENSE = {"worker": ["w0:1", "w1:1"], "ps": ["p0:1"]}


@pytest.mark.shows("ClusterSpec")
def test_answers_about_a_dense_job():
    spec = ClusterSpec(DENSE)
    assert spec.jobs == ["worker", "ps"]
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [0, 1]
    assert spec.task_address("worker", 1) == "w1:1"
    assert spec.job_tasks("worker") == ["w0:1", "w1:1"]
    assert spec.as_dict() == DENSE


def test_answers_about_a_sparse_job():
    spec = ClusterSpec({"worker": {3: "w3:1", 1: "w1:1"}})
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [None, "w1:1", None, "w3:1"]
    assert spec.as_dict() == {"worker": {1: "w1:1", 3: "w3:1"}}


def test_indices_without_a_gap_are_a_list():
    spec = ClusterSpec({"worker": {1: "b:1", 0: "a:1"}, "ps": ("p:1",), "chief": []})
    assert spec.as_dict() == {"worker": ["a:1", "b:1"], "ps": ["p:1"], "chief": {}}
    assert spec.job_tasks("chief") == []


def test_equal_by_contents_and_false_when_empty():
    assert ClusterSpec(DENSE) == ClusterSpec(
        {"ps": ["p0:1"], "worker": DENSE["worker"]}
    )
    assert ClusterSpec(DENSE) == ClusterSpec(ClusterSpec(DENSE))
    assert ClusterSpec({"worker": {"1": "b:1"}}) == ClusterSpec({"worker": {1: "b:1"}})
    assert ClusterSpec(DENSE) != ClusterSpec({})
    assert ClusterSpec(DENSE) != DENSE
    assert ClusterSpec(DENSE)
    assert not ClusterSpec({})


def test_what_it_was_made_of_may_change():
    given = {"worker": ["w0:1"]}
    spec = ClusterSpec(given)
    given["worker"].append("w1:1")
    assert spec.num_tasks("worker") == 1


ADDRESSES = st.lists(st.text(max_size=5), min_size=1, max_size=4)
SPARSE = st.dictionaries(st.integers(0, 9), st.text(max_size=5), max_size=4)


@given(st.dictionaries(st.text(max_size=5), ADDRESSES | SPARSE, max_size=4))
def test_as_dict_rebuilds_it(cluster):
    spec = ClusterSpec(cluster)
    assert ClusterSpec(spec.as_dict()) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (None, r"`cluster`.*NoneType"),
        (["a:1"], "`cluster`"),
        ({"worker": "a:1"}, "'worker'"),
        ({"worker": 3}, "'worker'"),
        ({"worker": [3]}, r"\b3\b.*'worker'.*\b0\b"),
        ({"worker": {"x": "a:1"}}, r"'worker'.*'x'"),
        ({"worker": {-1: "a:1"}}, r"'worker'.*\b1\b"),
        ({3: ["a:1"]}, r"\b3\b"),
    ],
)
def test_other_types_are_type_errors(cluster, words):
    with pytest.raises(TypeError, match=words):
        ClusterSpec(cluster)


def test_unknown_job_and_index():
    spec = ClusterSpec(DENSE)
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(ValueError, match="'chief'"):
            ask("chief")
    with pytest.raises(ValueError, match=r"'chief'.*'worker'"):
        spec.task_address("chief", 0)
    with pytest.raises(ValueError, match=r"\b2\b.*'worker'"):
        spec.task_address("worker", 2)


@pytest.mark.shows("ClusterSpec.as_cluster_def")
def test_a_cluster_def_has_an_index_for_each_address():
    spec = ClusterSpec({"worker": {2: "c:1", 0: "a:1"}, "ps": ["p:1"]})
    made = spec.as_cluster_def()
    assert made == {"worker": {0: "a:1", 2: "c:1"}, "ps": {0: "p:1"}}
    assert ClusterSpec(made) == spec
