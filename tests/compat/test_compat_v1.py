"""Every name of ``tf.compat.v1.distribute`` is there, and is the one of zstrat."""

import inspect

import pytest

import zstrat as zs
from zstrat.compat.v1 import distribute

NAMES = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name(name):
    assert getattr(distribute, name) is getattr(zs, name)
    assert name in dir(distribute)


@pytest.mark.shows("cluster_resolver")
def test_modules():
    assert zs.compat.v1.distribute is distribute
    resolvers = distribute.cluster_resolver
    for name in (
        "ClusterResolver",
        "GCEClusterResolver",
        "KubernetesClusterResolver",
        "SimpleClusterResolver",
        "SlurmClusterResolver",
        "TFConfigClusterResolver",
        "TPUClusterResolver",
        "UnionResolver",
    ):
        assert getattr(resolvers, name) is getattr(zs.cluster_resolver, name)
        assert name in dir(resolvers)
    for module in (distribute, resolvers, distribute.experimental):
        with pytest.raises(AttributeError, match="'Nothing'"):
            _ = module.Nothing


def test_methods_of_the_class():
    for name in (
        "configure",
        "distribute_datasets_from_function",
        "experimental_distribute_dataset",
        "experimental_make_numpy_dataset",
        "experimental_run",
        "group",
        "make_dataset_iterator",
        "make_input_fn_iterator",
        "unwrap",
        "update_config_proto",
    ):
        assert callable(getattr(distribute.Strategy, name))


@pytest.mark.shows("experimental", "experimental.MultiWorkerMirroredStrategy")
def test_strategies_with_their_arguments_of_old(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    experimental = distribute.experimental
    assert experimental.CentralStorageStrategy is zs.CentralStorageStrategy
    ring = experimental.CollectiveCommunication.RING
    with experimental.MultiWorkerMirroredStrategy(ring) as strategy:
        assert strategy.communication_options.implementation is ring
    hints = experimental.CollectiveHints(bytes_per_pack=3)
    assert hints.bytes_per_pack == 3
    local = experimental.ParameterServerStrategy()
    assert isinstance(local, zs.CentralStorageStrategy)


@pytest.mark.shows("isinstance(strategy, experimental.ParameterServerStrategy)")
def test_what_is_an_object_of_a_class_of_old():
    experimental = distribute.experimental
    local, tpu = zs.CentralStorageStrategy(), zs.TPUStrategy()
    assert isinstance(local, experimental.ParameterServerStrategy)
    assert isinstance(
        tpu, (experimental.TPUStrategy, experimental.ParameterServerStrategy)
    )
    assert not isinstance(tpu, experimental.ParameterServerStrategy)
    assert not isinstance(local, experimental.MultiWorkerMirroredStrategy)
    assert experimental.TPUStrategy.__name__ == "TPUStrategy"
    assert list(inspect.signature(experimental.TPUStrategy).parameters) == [
        "tpu_cluster_resolver",
        "steps_per_run",
        "device_assignment",
    ]


def test_a_tpu_strategy_is_given_its_resolver_and_its_assignment(monkeypatch):
    monkeypatch.setattr(zs, "TPUStrategy", lambda *given: given, raising=False)
    make = distribute.experimental.TPUStrategy
    assert make("resolver", steps_per_run=3, device_assignment="assignment") == (
        "resolver",
        "assignment",
    )
    assert make() == (None, None)


def test_a_cluster_of_programs():
    """Where there is a cluster, its ps have the variables."""
    resolver = zs.cluster_resolver.SimpleClusterResolver(
        zs.ClusterSpec({"worker": ["localhost:1"]}), task_type="worker", task_id=0
    )
    with pytest.raises(ValueError, match="`ps`"):
        distribute.experimental.ParameterServerStrategy(resolver)


def test_an_iterator_of_a_dataset():
    strategy = distribute.OneDeviceStrategy("CPU:0")
    iterator = strategy.make_dataset_iterator(zs.data.Dataset.range(4).batch(2))
    found = strategy.experimental_run(lambda x: x + 1, iterator)
    assert [int(x) for x in found] == [1, 2]

    def input_fn(context):
        assert isinstance(context, zs.InputContext)
        numbers = iter(range(3))
        return lambda: next(numbers)

    calls = strategy.make_input_fn_iterator(input_fn)
    assert int(strategy.experimental_run(lambda x: x + 1, calls)) == 1
    mode = distribute.InputReplicationMode
    strategy.make_input_fn_iterator(input_fn, mode.PER_WORKER)
    with pytest.raises(ValueError, match=r"make_input_fn_iterator.*input_fn"):
        strategy.make_input_fn_iterator(input_fn, mode.PER_REPLICA)
