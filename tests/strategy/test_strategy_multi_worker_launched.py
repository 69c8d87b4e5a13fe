"""A process without TF_CONFIG that somebody started as one of several."""

import re
import subprocess
import sys

import pytest

import zstrat as zs
from zstrat.cluster import (
    SimpleClusterResolver,
    TFConfigClusterResolver,
    free_ports,
    launched_together,
)
from zstrat.compat.v1 import distribute as v1

NAMES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "TF_CONFIG")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        zs.MultiWorkerMirroredStrategy,
        lambda: zs.MultiWorkerMirroredStrategy(TFConfigClusterResolver()),
        v1.experimental.MultiWorkerMirroredStrategy,
    ],
)
def test_it_does_not_train_alone(monkeypatch, make, name, rank):
    monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match=rf": {name}=2\. Say") as refused:
        make()
    words = str(refused.value)
    assert "MultiWorkerMirroredStrategy(zs.cluster_resolver.SlurmCl" in words
    assert f"task_id=int(os.environ['{rank}'])" in words


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "8"},  # of the allocation
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_SIZE": "many"},
    ],
)
def test_one_that_was_started_alone_does(monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert launched_together(env) is None
    assert zs.MultiWorkerMirroredStrategy().num_replicas_in_sync == 1


def test_one_that_is_told_to_be_alone_is(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    alone = SimpleClusterResolver(zs.cluster_resolver.ClusterSpec({}))
    assert zs.MultiWorkerMirroredStrategy(alone).num_replicas_in_sync == 1
    monkeypatch.setenv("TF_CONFIG", "{}")
    assert zs.MultiWorkerMirroredStrategy().num_replicas_in_sync == 1


def test_what_started_the_program_counts():
    """Open MPI starts one daemon on each node by srun, and they start the rest."""
    env = {"OMPI_COMM_WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}
    assert launched_together(env) == (
        "OMPI_COMM_WORLD_SIZE",
        8,
        "OMPI_COMM_WORLD_RANK",
    )


JOINED = """
import sys, jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import zstrat as zs
try:
    zs.MultiWorkerMirroredStrategy()
except ValueError as error:
    print(error)
"""


def test_processes_that_jax_has_brought_together_do_not_train_alone():
    (port,) = free_ports(1)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", JOINED, f"127.0.0.1:{port}", str(rank)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=100)[0] for process in started]
    words = re.compile(
        r"jax\.distributed\.initialize has brought 2 .*task_id=jax\.process_index\(\)"
    )
    assert all(map(words.search, said)), said
