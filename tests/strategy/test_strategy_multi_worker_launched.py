"""Processes without TF_CONFIG that somebody started as several."""

import os

import pytest

import zstrat as zs
from zstrat.cluster import (
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    free_ports,
    launched_together,
)
from zstrat.compat.v1 import distribute as v1

NAMES = ("OMPI_", "PMI", "SLURM_", "TF_CONFIG", "JAX_", "NUM_PROC", "JOB_", "SKYPILOT")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith(NAMES)]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_one_with_tf_config_does_not_train_alone(monkeypatch, name):
    monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match=rf": {name}=2\. Give no resolver"):
        zs.MultiWorkerMirroredStrategy(TFConfigClusterResolver())


MAKE = [
    zs.MultiWorkerMirroredStrategy,
    zs.BetweenGraphStrategy,
    zs.collectives.Group,
    v1.experimental.MultiWorkerMirroredStrategy,
    v1.experimental.ParameterServerStrategy,
]


@pytest.mark.parametrize("make", MAKE)
def test_those_that_cannot_find_each_other_do_not_train_alone(monkeypatch, make):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "1")
    with pytest.raises(ValueError, match=r"PMI_SIZE=2.*PMI_RANK=1"):
        make()


def test_dynamic_workers_do_not_train_alone(monkeypatch):
    task = '"task": {"type": "worker", "index": 1}'
    sparse = '{"sparseCluster": {"worker": {"1": "h:1"}, "ps": ["p:1"]}'
    monkeypatch.setenv("TF_CONFIG", f"{sparse}, {task}}}")
    with pytest.raises(ValueError, match="DynamicWorker"):
        zs.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "8"},  # of the allocation
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"JOB_COMPLETION_INDEX": "0", "NUM_PROCESSES": "1"},
    ],
)
def test_one_that_was_started_alone_does(monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert launched_together(env) is None
    assert zs.MultiWorkerMirroredStrategy().num_replicas_in_sync == 1


def test_one_that_tf_config_makes_alone_is(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
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


TRAINS = """
import sys, jax, numpy as np
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import zstrat as zs
strategy = zs.MultiWorkerMirroredStrategy()
total = strategy.run(lambda: zs.get_replica_context().all_reduce("sum", np.float32(1)))
print(strategy.num_replicas_in_sync, total, type(strategy.cluster_resolver).__name__)
"""


def test_processes_that_jax_has_brought_together_train_together(programs):
    (port,) = free_ports(1)
    started = [
        programs.Program(
            ["-c", TRAINS, f"127.0.0.1:{port}", str(rank)],
            stdout=programs.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [each.communicate(timeout=100)[0].splitlines()[-1] for each in started]
    assert said == ["2 2.0 SimpleClusterResolver"] * 2


class _Formed(Exception):
    """Instead of a group."""


def test_tasks_of_a_step_of_slurm_form_a_group(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x2)")
    monkeypatch.setenv("SLURM_PROCID", "1")

    def group(resolver, options):
        assert isinstance(resolver, SlurmClusterResolver)
        raise _Formed(resolver.cluster_spec().num_tasks("worker"), resolver.task_id)

    with pytest.raises(_Formed, match=r"\(2, 1\)"):
        zs.MultiWorkerMirroredStrategy(group=group)
