"""Examples of the page of ParameterServerStrategy, with their numbers, over a cluster
without processes; what other tests show is not here."""

import json
import weakref

import numpy as np
import pytest

import zstrat as zs
from zstrat.config import Settings
from zstrat.experimental.partitioners import FixedShardsPartitioner, MinSizePartitioner


class Dense(zs.Module):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.w = zs.Variable(
            np.random.default_rng(0).normal(size=(100, 10)).astype(np.float32), name="w"
        )

    def __call__(self, x):
        return x * self.w


@pytest.mark.shows("ParameterServerStrategy(variable_partitioner=)")
@pytest.mark.shows("tf.Module", "Module.variables", "tf.convert_to_tensor")
def test_a_dense_layer_in_two_parts(make_cluster):
    strategy = make_cluster(
        ps=2, variable_partitioner=FixedShardsPartitioner(num_shards=2)
    ).strategy
    with strategy.scope():
        dense = Dense()
    assert len(dense.variables) == 2
    assert isinstance(dense.variables[0], zs.Variable)
    assert isinstance(dense.variables[1], zs.Variable)
    assert dense.variables[0].name == "w/part_0"
    assert dense.variables[1].name == "w/part_1"
    whole = np.random.default_rng(0).normal(size=(100, 10)).astype(np.float32)
    np.testing.assert_array_equal(dense(2.0), 2.0 * whole)


@pytest.mark.shows("tf.distribute.experimental.partitioners.MinSizePartitioner")
def test_at_least_256k_in_a_part_and_a_part_on_a_ps_at_most(make_cluster):
    num_ps = 3
    strategy = make_cluster(
        ps=num_ps,
        variable_partitioner=MinSizePartitioner(
            min_shard_bytes=256 << 10, max_shards=num_ps
        ),
    ).strategy
    quarter = np.zeros(64 << 10, np.float32)  # 256 KiB
    with strategy.scope():
        small = zs.Variable(quarter)
        medium = zs.Variable(np.concatenate([quarter] * 2))
        large = zs.Variable(np.concatenate([quarter] * 16))
    assert type(small) is zs.Variable
    assert [part.shape for part in medium.variables] == [(64 << 10,)] * 2
    assert len({part.spec.ps for part in large.variables}) == len(large) == num_ps


def test_names_of_the_experimental_module_are_those_of_the_top():
    for name in (
        "CentralStorageStrategy",
        "CommunicationImplementation",
        "CommunicationOptions",
        "MultiWorkerMirroredStrategy",
        "ParameterServerStrategy",
        "TPUStrategy",
        "ValueContext",
    ):
        assert getattr(zs.experimental, name) is getattr(zs, name)


@pytest.mark.shows("ParameterServerStrategy.cluster_resolver")
def test_the_resolver_tells_what_this_task_is(make_cluster, monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG",
        """{
          "cluster": {
            "chief": ["localhost:12344"],
            "worker": ["localhost:12345", "localhost:23456"],
            "ps": ["localhost:34567"]
          },
          "task": {"type": "chief", "index": 0}
        }""",
    )
    resolver = zs.cluster_resolver.TFConfigClusterResolver()
    fake = make_cluster(ps=1, workers=2)
    strategy = zs.ParameterServerStrategy(
        resolver, connect=lambda spec, settings: fake.session
    )
    assert strategy.cluster_resolver is resolver
    assert strategy.cluster_resolver.task_type == "chief"
    assert strategy.cluster_resolver.cluster_spec().num_tasks("worker") == 2


@pytest.mark.shows("tf.GradientTape")
def test_gradients_of_parts_and_of_the_whole(make_cluster):
    """TF has them of the parts alone."""
    strategy = make_cluster(
        ps=2, variable_partitioner=FixedShardsPartitioner(2)
    ).strategy
    with strategy.scope():
        w = zs.Variable([1.0, 2.0, 3.0, 4.0])

    def loss(w):
        return (w**2).sum()

    value, gradient = zs.value_and_grad(loss)(w)
    assert float(value) == 30.0
    np.testing.assert_array_equal(np.asarray(gradient), [2.0, 4.0, 6.0, 8.0])
    first, second = w.variables
    value, gradients = zs.value_and_grad(lambda parts: loss(parts[0]) + loss(parts[1]))(
        [first, second]
    )
    assert float(value) == 30.0
    assert [np.asarray(each).tolist() for each in gradients] == [[2.0, 4.0], [6.0, 8.0]]


def test_a_strategy_takes_what_a_launcher_returns(make_cluster, monkeypatch):
    """And keeps it, as its tasks end with it."""
    fake, connected = make_cluster(ps=1, workers=2), []

    class Running:
        resolver = fake.resolver
        settings = Settings(insecure=True)

    def connect(spec, settings):
        connected.append((spec.num_tasks("worker"), settings))
        return fake.session

    running = Running()
    kept = weakref.ref(running)
    strategy = zs.ParameterServerStrategy(running, connect=connect)
    other = Settings(transport="tcp")
    zs.ParameterServerStrategy(running, settings=other, connect=connect)
    assert connected == [(2, Running.settings), (2, other)]
    assert strategy.cluster_resolver is fake.resolver
    del running
    assert kept() is not None
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": fake.resolver.cluster_spec().as_dict()})
    )
    zs.ParameterServerStrategy(connect=connect)
    assert connected[-1][0] == 2
    monkeypatch.delenv("TF_CONFIG")
    with pytest.raises(ValueError, match="TF_CONFIG"):
        zs.ParameterServerStrategy(connect=connect)
