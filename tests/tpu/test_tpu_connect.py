"""Which tasks of a cluster are processes of jax."""

import jax
import pytest

import zstrat as zs
from zstrat.cluster import TPUClusterResolver


def tpu(addresses, **options):
    return TPUClusterResolver(
        addresses,
        coordinator_name="coordinator",
        coordinator_address="10.1.1.1:99",
        **options,
    )


def test_the_coordinator_of_a_tpu_is_no_process_of_jax():
    assert zs.experimental_connect_to_cluster(tpu("grpc://10.0.0.1:8470")) is None
    named = tpu("grpc://10.0.0.1:8470", job_name="tpu_worker")
    assert zs.experimental_connect_to_cluster(named) is None
    assert zs.experimental_connect_to_cluster(TPUClusterResolver("local")) is None


def test_all_hosts_of_a_tpu_are(monkeypatch):
    two = tpu("grpc://10.0.0.1:8470,grpc://10.0.0.2:8470")
    words = r"\b2\b.*\b1\b.*num_processes=2"
    with pytest.raises(RuntimeError, match=words):
        zs.experimental_connect_to_cluster(two)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert zs.experimental_connect_to_cluster(two) is None


def test_every_task_of_a_spec_is():
    spec = tpu("grpc://10.0.0.1:8470").cluster_spec()
    with pytest.raises(
        RuntimeError, match="the cluster has 2 tasks, but this jax job has 1 process"
    ):
        zs.experimental_connect_to_cluster(spec)
