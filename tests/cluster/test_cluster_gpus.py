"""How tasks of one machine divide the GPUs that they all see."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.cluster import detect, parts_of

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ({VISIBLE: "0,1,2,3"}, ["0,1", "2,3"]),
        ({VISIBLE: "10,9"}, ["9", "10"]),
        ({VISIBLE: "4,5,6"}, ["4", "5"]),
        ({VISIBLE: "GPU-b,GPU-a"}, ["GPU-a", "GPU-b"]),
        ({VISIBLE: "7"}, ["7", "7"]),  # rather one together than none
        ({VISIBLE: ""}, ["", ""]),
        ({VISIBLE: "-1"}, ["", ""]),
        ({VISIBLE: "0,1", "JAX_PLATFORMS": "cpu"}, ["", ""]),
        ({VISIBLE: "0,1", "JAX_PLATFORMS": "cuda,cpu"}, ["0", "1"]),
        ({VISIBLE: "0,1", "JAX_PLATFORMS": ""}, ["0", "1"]),
    ],
)
def test_parts_of_two_tasks(env, parts):
    assert [",".join(part) for part in parts_of(env, 2)] == parts


def test_who_is_alone_keeps_all():
    assert parts_of({VISIBLE: "0,1"}, 1) == [[]]
    assert parts_of({}, 0) == []


def test_gpus_that_the_driver_lists(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert parts_of({}, 2) == [[], []]
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: A'\necho 'GPU 1: B'\n")
    driver.chmod(0o700)
    assert parts_of({}, 2) == [["0"], ["1"]]
    driver.write_text("#!/bin/sh\necho no driver >&2\nexit 9\n")
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES"):
        parts_of({}, 2)


@given(st.integers(1, 16), st.integers(2, 16), st.integers(0, 15))
def test_no_gpu_is_of_two_tasks_where_there_are_enough(gpus, tasks, first):
    """Each sees its list in another order, as under ``dask cuda worker``."""
    shown = [str((first + at) % gpus) for at in range(gpus)]
    parts = parts_of({VISIBLE: ",".join(shown)}, tasks)
    assert parts == parts_of({VISIBLE: ",".join(shown[::-1])}, tasks)
    assert len({len(part) for part in parts}) == 1
    flat = [each for part in parts for each in part]
    assert len(set(flat)) == min(gpus, len(flat))
    assert len(flat) == max(tasks, tasks * (gpus // tasks))


def test_ranks_of_mpi_divide_them(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    for name in ("TF_CONFIG", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    env = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "job1",
        VISIBLE: "0,1,2,3",
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # a second resolver finds the same
        assert (detect().task_id, os.environ[VISIBLE]) == (1, "2,3")
