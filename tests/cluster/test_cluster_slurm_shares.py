"""GPUs of Slurm's tasks: who has distributed them, and what a second resolver finds."""

import os

import pytest

from zstrat.cluster import SlurmClusterResolver

TWO_ON_ONE_NODE = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


@pytest.fixture
def task(monkeypatch, tmp_path):
    """Makes this process a task of a node without nvidia-smi."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))

    def task(rank, visible, **variables):
        env = {"SLURM_PROCID": str(rank), **TWO_ON_ONE_NODE, **variables}
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    return task


def found(**options):
    """What a resolver says of this task, and what it leaves it to see."""
    resolver = SlurmClusterResolver(**options)
    return resolver.num_accelerators(), os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(("rank", "share"), [(0, "0,1"), (1, "2,3")])
@pytest.mark.parametrize("options", [{}, {"gpus_per_task": 2}, {"gpus_per_node": 4}])
@pytest.mark.parametrize("slurm", [{}, {"SLURM_GPUS_ON_NODE": "4"}])
def test_all_resolvers_of_a_process_find_the_same_share(
    task,
    rank,
    share,
    options,
    slurm,
):
    task(rank, "0,1,2,3", **slurm)
    for _ in range(3):
        assert found(**options) == ({"GPU": 2}, share)


def test_a_second_resolver_may_deal_otherwise(task):
    task(1, "4,5,6,7")
    assert found() == ({"GPU": 2}, "6,7")
    assert found(gpus_per_task=1) == ({"GPU": 1}, "5")
    assert found(gpus_per_task=0) == ({}, "5")
    assert found(auto_set_gpu=False) == ({"GPU": 2}, "5")
    assert found() == ({"GPU": 2}, "6,7")


def test_a_share_where_no_variable_was_set_before(task):
    task(1, None)
    for _ in range(2):
        assert found(gpus_per_node=4) == ({"GPU": 2}, "2,3")


def test_what_somebody_else_has_set_since_is_what_there_is(task, monkeypatch):
    task(1, "0,1,2,3")
    assert found() == ({"GPU": 2}, "2,3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert found() == ({"GPU": 1}, "7")


@pytest.mark.parametrize(("rank", "devices"), [(0, "0,1"), (1, "2,3")])
@pytest.mark.parametrize("options", [{}, {"gpus_per_task": 2}])
def test_what_slurm_has_dealt_out_stays_as_it_is(task, rank, devices, options):
    task(rank, devices, SLURM_GPUS_ON_NODE="4")
    for _ in range(2):
        assert found(**options) == ({"GPU": 2}, devices)


def test_one_gpu_for_each_task_by_slurm(task):
    """In a container of devices all of them see their own as number 0."""
    task(1, "0", SLURM_GPUS_ON_NODE="2")
    assert found() == ({"GPU": 1}, "0")
    assert found(gpus_per_task=1) == ({"GPU": 1}, "0")


def test_slurm_knows_how_many_there_are_where_none_are_listed(
    task,
):
    task(1, None, SLURM_GPUS_ON_NODE="4")
    assert found() == ({"GPU": 2}, "2,3")


def test_more_than_slurm_has_given(task):
    task(0, "0,1,2,3", SLURM_GPUS_ON_NODE="4")
    words = r"GPUs.*\b2\b.*\b3\b"
    with pytest.raises(RuntimeError, match=words):
        SlurmClusterResolver(gpus_per_task=3)


def test_a_number_of_slurm_that_cannot_be_read(task):
    task(0, "0,1,2,3", SLURM_GPUS_ON_NODE="gpu:4")
    words = r"SLURM_GPUS_ON_NODE.*\b0\b.*'gpu:4'"
    with pytest.raises(ValueError, match=words):
        SlurmClusterResolver()
    assert found(gpus_per_node=4) == ({"GPU": 2}, "0,1")
