"""What each launcher puts into the environment, and the cluster that it means."""

import json
import os
import socket

import pytest

from zstrat.cluster import (
    ClusterSpec,
    TFConfigClusterResolver,
    detect,
    launch_in,
    launched_together,
    resolver_of,
)

LAUNCHERS = ("OMPI", "PM", "SLURM", "TF_CONFIG", "JAX", "NUM_PROC", "JOB_", "SKYPILOT")

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-n1-4711@1",
}
TRAIN_JOB = {
    "JAX_COORDINATOR_ADDRESS": "run-node-0-0.run:1234",
    "JAX_NUM_PROCESSES": "3",
    "JAX_PROCESS_ID": "2",
}
JAX_JOB = {
    "COORDINATOR_ADDRESS": "run-worker-0",
    "COORDINATOR_PORT": "6666",
    "NUM_PROCESSES": "2",
    "PROCESS_ID": "0",
}
SKY = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_TASK_ID": "sky-2026-1",
}
INDEXED = {"JOB_COMPLETION_INDEX": "1", "NUM_PROCESSES": "3"}
POD = "run-1.pods.default.svc.cluster.local"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)


def hosts(env, host=""):
    """The rank, and the hosts of all; their ports have to be fit for the purpose."""
    launch = launch_in(env, host)
    assert launch is not None
    assert launch.addresses is not None
    for address in launch.addresses:
        assert 1024 < int(address.rpartition(":")[2]) < 32_768
    return launch.rank, [each.rpartition(":")[0] for each in launch.addresses]


def test_kubeflow_for_jax():
    names = [f"run-node-0-{rank}.run" for rank in range(3)]
    assert hosts(TRAIN_JOB) == (2, names)
    assert hosts(JAX_JOB) == (0, ["run-worker-0", "run-worker-1"])
    ours = launch_in(TRAIN_JOB)
    assert ours is not None
    assert ours.addresses is not None
    assert "run-node-0-0.run:1234" not in ours.addresses  # that is jax's own


def test_processes_of_one_host():
    assert hosts(OPEN_MPI) == (1, ["127.0.0.1"] * 2)
    local = {**TRAIN_JOB, "JAX_COORDINATOR_ADDRESS": "localhost:1234"}
    assert launch_in(local).addresses[2] == "localhost:1237"
    other = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-n1-4712@1"}
    first, second = launch_in(OPEN_MPI), launch_in(other)
    assert first.addresses != second.addresses


def test_nodes_of_skypilot():
    assert hosts(SKY) == (1, ["10.0.0.1", "10.0.0.2"])


def test_pods_of_an_indexed_job_and_of_a_job_set():
    rest = "pods.default.svc.cluster.local"
    assert hosts(INDEXED, POD) == (1, [f"run-{each}.{rest}" for each in range(3)])
    set_of_jobs = "run-workers-0-1.run.default.svc.cluster.local"
    assert hosts(INDEXED, set_of_jobs)[1][2].startswith("run-workers-0-2.run.")


def test_whoever_knows_the_addresses_goes_before_who_does_not():
    """Processes of an MPIJob: MPI does not say where the others are."""
    far = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert launch_in(far).addresses is None
    assert hosts({**far, **SKY})[1] == ["10.0.0.1", "10.0.0.2"]


def test_srun_goes_before_the_mpi_that_it_speaks():
    mpi = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "PMI_JOBID": "7.0"}
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    for started, by in (
        ({**mpi, **step}, "SLURM_STEP_NUM_TASKS"),
        ({**OPEN_MPI, **step, "SLURM_PROCID": "0"}, "OMPI_COMM_WORLD_SIZE"),
    ):
        launch = launch_in(started)
        assert launch is not None
        assert launch.size_variable == by


@pytest.mark.parametrize(
    ("env", "host", "words"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "", "OMPI_COMM_WORLD_SIZE="),
        ({**OPEN_MPI, "PMIX_NAMESPACE": ""}, "", "OMPI_COMM_WORLD_SIZE="),
        ({**TRAIN_JOB, "JAX_COORDINATOR_ADDRESS": "10.0.0.7:1"}, "", r"\b0\b"),
        ({**TRAIN_JOB, "JAX_COORDINATOR_ADDRESS": "run"}, "", "JAX_NUM_PROCESSES="),
        ({"JOB_COMPLETION_INDEX": "0"}, POD, "NUM_PROCESSES"),
        (INDEXED, "run-1", "`subdomain`"),
        ({**SKY, "SKYPILOT_NODE_IPS": "10.0.0.1"}, "", r"\b1\b.*\b2\b"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "", "OMPI_COMM_WORLD_SIZE="),
        ({**SKY, "SKYPILOT_NODE_RANK": "x"}, "", "SKYPILOT_NODE_RANK"),
        ({**INDEXED, "JOB_COMPLETION_INDEX": "3"}, POD, "NUM_PROCESSES=3"),
    ],
)
def test_several_that_cannot_find_each_other(env, host, words):
    with pytest.raises(ValueError, match=words):
        resolver_of(launch_in(env, host))


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"NUM_PROCESSES": "4"},  # anybody's
        {"JOB_COMPLETION_INDEX": "0", "NUM_PROCESSES": "1"},
        {**SKY, "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_one_alone(env):
    assert launch_in(env) is None
    assert launched_together(env) is None


def test_the_environment_of_this_process(monkeypatch):
    assert isinstance(detect(), TFConfigClusterResolver)
    assert detect().cluster_spec() == ClusterSpec({})
    for name, value in INDEXED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "getfqdn", lambda: POD)
    found = detect({"ps": 1, "worker": 2})
    assert (found.task_type, found.task_id) == ("worker", 0)
    assert found.cluster_spec().num_tasks("ps") == 1
    with pytest.raises(ValueError, match="2 tasks, but 3 processes were"):
        detect({"worker": 2})
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["h:1"]}}')
    assert detect().cluster_spec() == ClusterSpec({"worker": ["h:1"]})
    with pytest.raises(ValueError, match=r"TF_CONFIG.*'worker'.*\b1\b"):
        detect({"ps": 1, "worker": 2})
    monkeypatch.delenv("TF_CONFIG")
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    with pytest.raises(ValueError, match=r"jobs=.*'worker'.*TF_CONFIG"):
        detect({"ps": 1, "worker": 2})


@pytest.mark.parametrize(
    ("task", "ps"),
    [
        ({"type": "worker", "index": 4}, {"ps": ["p0:1", "p1:1"]}),
        ({"type": "ps", "index": 1}, {"ps": {1: "p1:1"}}),
    ],
)
def test_sparse_cluster_of_kubeflow(monkeypatch, task, ps):
    worker = {"worker": {"4": "w4:1"}} if task["type"] == "worker" else {}
    named = ["p0:1", "p1:1"] if worker else ["p1:1"]
    config = {"sparseCluster": {**worker, "ps": named}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    known = {**({"worker": {4: "w4:1"}} if worker else {}), **ps}
    assert TFConfigClusterResolver().cluster_spec() == ClusterSpec(known)
