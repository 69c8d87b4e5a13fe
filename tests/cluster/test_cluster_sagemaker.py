"""The hosts of a SageMaker job, as its training toolkit tells them."""

import pytest

from zstrat.cluster import SageMakerClusterResolver


@pytest.fixture(autouse=True)
def job(monkeypatch):
    monkeypatch.setenv("SM_HOSTS", '["algo-2","algo-1","algo-3"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    monkeypatch.setenv("SM_NUM_GPUS", "8")


def test_every_host_is_a_worker():
    resolver = SageMakerClusterResolver()
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["algo-1:2223", "algo-2:2223", "algo-3:2223"]
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "algo-2:2223"
    assert resolver.master("worker", 2, "grpc") == "grpc://algo-3:2223"
    assert resolver.environment == ""
    assert resolver.rpc_layer is None
    with pytest.raises(ValueError, match="'ps'"):
        resolver.master("ps", 0)


def test_arguments_and_setters_go_before_the_environment():
    resolver = SageMakerClusterResolver(
        port=99, task_type="chief", task_id=0, rpc_layer="tcp", environment="aws"
    )
    assert (resolver.task_type, resolver.task_id) == ("chief", 0)
    assert resolver.environment == "aws"
    resolver.task_type, resolver.task_id = "worker", 2
    assert resolver.master() == "tcp://algo-3:99"
    resolver.task_type = resolver.task_id = None
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)


def test_one_host_needs_no_master(monkeypatch):
    monkeypatch.setenv("SM_HOSTS", '["algo-2"]')
    assert SageMakerClusterResolver().master() == ""


def test_gpus(monkeypatch):
    resolver = SageMakerClusterResolver()
    assert resolver.num_accelerators() == {"GPU": 8}
    monkeypatch.setenv("SM_NUM_GPUS", "0")
    assert resolver.num_accelerators() == {}
    monkeypatch.setenv("SM_NUM_GPUS", "many")
    with pytest.raises(ValueError, match=r"SM_NUM_GPUS.*'many'"):
        resolver.num_accelerators()
    monkeypatch.delenv("SM_NUM_GPUS")
    assert resolver.num_accelerators() == {}


@pytest.mark.parametrize("name", ["SM_HOSTS", "SM_CURRENT_HOST"])
def test_outside_of_sagemaker(monkeypatch, name):
    monkeypatch.delenv(name)
    resolver = SageMakerClusterResolver()
    with pytest.raises(RuntimeError, match=f"Not a SageMaker environment: {name} is"):
        _ = resolver.task_id


@pytest.mark.parametrize("hosts", ["algo-1", "{}", "[]", "[1]", '"algo-1"'])
def test_hosts_that_are_no_list(monkeypatch, hosts):
    monkeypatch.setenv("SM_HOSTS", hosts)
    with pytest.raises(ValueError, match=r"SM_HOSTS.*JSON"):
        SageMakerClusterResolver().cluster_spec()


def test_a_host_that_is_not_listed(monkeypatch):
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-9")
    with pytest.raises(ValueError, match=r"SM_CURRENT_HOST.*'algo-9'"):
        _ = SageMakerClusterResolver().task_id
