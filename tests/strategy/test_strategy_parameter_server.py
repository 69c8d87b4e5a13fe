"""ParameterServerStrategy: construction, placement, creation, what travels."""

import asyncio
import copy
import logging
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
import zstrat.variables as zv
from zstrat import initializers
from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.config import Settings
from zstrat.errors import InvalidArgumentError
from zstrat.program import (
    WorkerContext,
    function,
    get_worker_context,
    run_eager,
    worker_context,
)
from zstrat.strategy import (
    ParameterServerStrategy,
    PerReplica,
    get_strategy,
    in_cross_replica_context,
)

FULL = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"]}


def refuse_to_connect(spec, settings):
    raise AssertionError("connected although an argument is wrong")


@pytest.mark.parametrize(
    ("spec", "task", "words"),
    [
        ({}, (None, None), "ParameterServerStrategy"),
        ({**FULL, "master": ["m:1"]}, (None, None), "ClusterSpec"),
        (FULL, ("boss", 0), "task_type"),
        ({"ps": ["p:1"], "worker": ["w:1"]}, ("chief", 0), "cluster_spec"),
        ({**FULL, "chief": ["c:1", "c:2"]}, (None, None), "'chief'"),
        ({**FULL, "evaluator": ["e:1", "e:2"]}, (None, None), "'evaluator'"),
        (FULL, ("chief", 1), "`task_id`"),
        ({"worker": ["w:1"]}, (None, None), "There must be at least one ps"),
        ({"chief": ["c:1"]}, ("chief", 0), "There must be at least one ps"),
        ({"ps": ["p:1"]}, (None, None), "There must be at least one worker"),
        ({**FULL, "worker": []}, (None, None), "There must be at least one worker"),
        (FULL, ("worker", 1), "ParameterServerStrategy"),
        (FULL, ("ps", 0), "ParameterServerStrategy"),
        # Of several mistakes the one that TF finds first.
        (
            {"worker": ["w:1"], "other": ["o:1"]},
            ("boss", 0),
            r"'worker'.*\['w:1'\].*'other'",
        ),
        ({"worker": ["w:1"]}, ("worker", 5), "`task_id`"),
    ],
)
def test_a_wrong_cluster_is_refused_before_connecting(spec, task, words):
    job, index = task
    resolver = SimpleClusterResolver(ClusterSpec(spec), task_type=job, task_id=index)
    with pytest.raises(ValueError, match=words):
        ParameterServerStrategy(resolver, connect=refuse_to_connect)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[({"prefetch": bad}, "prefetch=") for bad in (-1, 0.5, "1", "auto", [1])],
        *[({"resume": bad}, "resume=") for bad in ("", "n" * 201, 7, True)],
        ({"on_ps_loss": "ignore"}, "on_ps_loss"),
        ({"on_ps_loss": "raise", "ps_wait_timeout": 5}, r"\b5\b"),
        *[
            (
                {"on_ps_loss": "restore", "ps_wait_timeout": bad},
                f"ps_wait_timeout={bad!r}",
            )
            for bad in (0, "5", float("inf"))
        ],
        ({"placement": "size"}, r"'size'.*'round_robin', 'bytes'"),
    ],
)
def test_wrong_arguments_are_refused_before_connecting(options, words):
    resolver = SimpleClusterResolver(ClusterSpec(FULL))
    with pytest.raises(ValueError, match=words):
        ParameterServerStrategy(resolver, connect=refuse_to_connect, **options)


class ClusterOfAStranger:
    resolver = SimpleClusterResolver(ClusterSpec(FULL))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (FULL, r"ClusterResolver.*SimpleClusterResolver"),
        (ClusterOfAStranger(), "ClusterOfAStranger"),
    ],
)
def test_what_is_no_resolver_or_settings_is_refused(make_cluster, given, words):
    for make in (
        ParameterServerStrategy,
        zs.BetweenGraphStrategy,
        zs.MultiWorkerMirroredStrategy,
    ):
        with pytest.raises(TypeError, match=words):
            make(given)
    with pytest.raises(TypeError, match=r"settings=\{\}.*Settings"):
        make_cluster(settings={})


@pytest.mark.parametrize(
    ("said", "environment", "expected"),
    [
        (None, None, 0),
        (1, None, 1),
        (None, "1", 1),
        (0, "1", 0),  # the argument is nearer than the environment
        (1, "0", 1),
        (3, "0", 3),
        (True, "0", 1),
        (0, Settings(insecure=True, prefetch=1), 0),
        (None, Settings(insecure=True), 0),
    ],
)
def test_settings_and_the_spec_reach_the_session(
    make_cluster, monkeypatch, said, environment, expected
):
    monkeypatch.delenv("ZSTRAT_PREFETCH", raising=False)
    given = environment if isinstance(environment, Settings) else None
    if isinstance(environment, str):
        monkeypatch.setenv("ZSTRAT_PREFETCH", environment)
    fake, seen = make_cluster(), []
    strategy = ParameterServerStrategy(
        fake.resolver,
        prefetch=said,
        settings=given,
        connect=lambda *each: seen.append(each) or fake.session,
    )
    ((spec, settings),) = seen
    assert spec == fake.resolver.cluster_spec()
    assert repr(settings.prefetch) == repr(expected)
    assert settings.insecure == (given is not None)
    assert strategy.session is fake.session
    strategy.close()
    assert fake.session.is_closed


@pytest.mark.parametrize(
    ("workers", "prefetch", "age"), [(4, 4, 19), (2, 2, 5), (4, 1, None), (1, 4, None)]
)
def test_a_prefetch_that_makes_gradients_old_is_warned_about(
    make_cluster, caplog, workers, prefetch, age
):
    with caplog.at_level(logging.WARNING):
        make_cluster(workers=workers, prefetch=prefetch)
    # Of prefetch + 1 steps of each worker between a pull and its push.
    assert [f" {age} updates old" in text for text in caplog.messages] == (
        [] if age is None else [True]
    )


@pytest.mark.shows("ParameterServerStrategy.extended")
@pytest.mark.shows("ParameterServerStrategy.num_replicas_in_sync")
def test_the_face_of_the_strategy(make_cluster):
    fake = make_cluster(ps=3, workers=5)
    strategy = fake.strategy
    assert strategy.cluster_resolver is fake.resolver
    assert strategy.num_replicas_in_sync == 1
    assert strategy.variable_partitioner is None
    assert strategy.extended.worker_devices == ("/device:CPU:0",)
    assert strategy.extended.parameter_devices == tuple(
        f"/job:ps/task:{i}" for i in range(3)
    )
    assert strategy.extended.experimental_require_static_shapes is False
    assert "3 ps, 5 workers" in repr(strategy)
    with pytest.raises(RuntimeError):
        copy.copy(strategy)
    assert copy.deepcopy(strategy) is strategy


@pytest.mark.shows("ParameterServerStrategy.scope", "Variable.device")
def test_variables_go_round_the_ps_in_order_of_creation(make_cluster):
    strategy = make_cluster(ps=3).strategy
    v1 = zv.Variable(0.0)
    with strategy.scope():
        v2, v3, v4, v5 = (zv.Variable(float(i)) for i in range(4))
    assert v1.device == "/job:localhost/replica:0/task:0/device:CPU:0"
    assert [v.device for v in (v2, v3, v4, v5)] == [
        f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in (0, 1, 2, 0)
    ]
    with strategy.scope():
        assert zv.Variable(0.0).spec.ps == 1
    assert [strategy.extended.variable_created_in_scope(v) for v in (v1, v2)] == [
        False,
        True,
    ]
    assert strategy.extended.value_container(v2) is v2


def test_a_tree_is_created_in_one_request(cluster):
    with cluster.strategy.scope():
        tree = zv.create_variables(
            {"a": np.float32([1, 1, 1]), "b": [1.0, 2.0]}, name="net"
        )
    assert cluster.session.requests == ["create"]
    assert [v.spec.ps for v in jax.tree.leaves(tree)] == [0, 1, 0]
    assert {spec.name for spec in cluster.session.specs.values()} == {
        "net/a",
        "net/b/0",
        "net/b/1",
    }


@pytest.mark.shows("StrategyExtended.colocate_vars_with")
def test_colocation_does_not_move_the_others(make_cluster):
    strategy = make_cluster(ps=3).strategy
    with strategy.scope():
        first, second = zv.Variable(0.0), zv.Variable(0.0)
        with strategy.extended.colocate_vars_with(second):
            beside = [zv.Variable(0.0) for _ in range(4)]
        third = zv.Variable(0.0)
    assert {v.spec.ps for v in beside} == {second.spec.ps} == {1}
    assert (first.spec.ps, third.spec.ps) == (0, 2)


def test_colocation_needs_the_scope_and_its_own_variables(make_cluster):
    strategy, other = make_cluster().strategy, make_cluster().strategy
    with other.scope():
        foreign = zv.Variable(0.0)
    with pytest.raises(RuntimeError, match=r"strategy\.scope.*colocate_vars_with\(\)"):
        strategy.extended.colocate_vars_with(foreign)
    with strategy.scope():
        for variable in (foreign, zv.unbound(foreign.spec)):
            with pytest.raises(ValueError, match=r"`colocate_vars_with`.*'Variable'"):
                strategy.extended.colocate_vars_with(variable)


def test_initial_values(cluster):
    with cluster.strategy.scope():
        with pytest.raises(ValueError, match="initial_value"):
            zv.Variable(None, name="empty")
        assert zv.Variable(lambda: 3).numpy() == 3
        zeros = zv.Variable(initializers.zeros, shape=(2, 2))
        assert zeros.numpy().shape == (2, 2)
        with pytest.raises(ValueError, match="VariableAggregation"):
            zv.Variable(1.0, aggregation=1)
    assert zeros.spec.ps == 1, "a variable that was refused takes no turn"


def test_reads_and_updates_outside_of_steps_go_to_the_ps(cluster):
    with cluster.strategy.scope():
        x = zv.Variable([1.0, 2.0], name="x")
    x.assign_add([1.0, 1.0])
    x.scatter_update(zv.IndexedSlices(np.zeros((1,)), [0]))
    np.testing.assert_array_equal(x.numpy(), [0.0, 3.0])
    np.testing.assert_array_equal(cluster.session.values[x.spec.key], [0.0, 3.0])
    np.testing.assert_array_equal(x * 2, [0.0, 6.0])
    before = list(cluster.session.requests)
    with pytest.raises(ValueError, match="shape mismatch"):
        x.assign(1.0)
    assert cluster.session.requests == before


def test_optimizers_of_the_scope_run_on_the_ps(cluster):
    with cluster.strategy.scope():
        x = zv.Variable([1.0, 2.0])
        first = zv.Optimizer(optax.sgd(0.5), name="sgd")
        second = zv.Optimizer(optax.adam(0.1))
    assert second.id == first.id + 1
    first.apply_gradients([jnp.ones(2)], [x])
    np.testing.assert_array_equal(x.numpy(), [0.5, 1.5])
    asyncio.run(first.apply_gradients_async([(np.float32([1, 0]), x)]))
    np.testing.assert_array_equal(x.numpy(), [0.0, 1.5])
    cluster.session.refuse = "looks at all variables at once"
    with (
        cluster.strategy.scope(),
        pytest.raises(InvalidArgumentError, match="clip: looks at all variables"),
    ):
        zv.Optimizer(optax.clip_by_global_norm(1.0), name="clip")
    outside = zv.Optimizer(optax.sgd(0.5))
    with pytest.raises(ValueError, match=r"'Variable'.*'Optimizer'.*strategy\.scope"):
        outside.apply_gradients([jnp.ones(2)], [x])


@pytest.mark.parametrize("parts", [None, [], [0, 1], [1], [1, 2], "1", 3, [2, 1, 1]])
def test_a_partitioner_must_return_parts_per_axis(make_cluster, parts):
    strategy = make_cluster(variable_partitioner=lambda shape, dtype: parts).strategy
    with strategy.scope():
        with pytest.raises(ValueError, match="variable_partitioner"):
            zv.Variable(np.zeros((4, 2)))


def test_a_shipped_step_finds_its_variables_strategy_and_optimizer(cluster):
    strategy = cluster.strategy
    with strategy.scope():
        w = zv.Variable(np.float32([1.0, -1.0]), name="w")
        count = zv.Variable(0, name="count")
        optimizer = zv.Optimizer(optax.sgd(0.1))

    @function
    def step(x):
        def replica_fn(x):
            loss, gradient = jax.value_and_grad(lambda w: ((w - x) ** 2).sum())(
                w.value()
            )
            optimizer.apply_gradients([(gradient, w)])
            count.assign_add(1)
            return loss

        return strategy.reduce("mean", strategy.run(replica_fn, args=(x,)), axis=None)

    plan = step.plan((np.float32([2.0, 2.0]),))
    assert {spec.name for spec in plan.reads} == {"w"}
    shipped = cluster.ship(step)
    loss = cluster.run(shipped, np.float32([2.0, 2.0]))
    assert loss == 10.0
    np.testing.assert_allclose(w.numpy(), [1.2, -0.4], rtol=1e-6)
    cluster.run(shipped, np.float32([2.0, 2.0]))
    assert count.numpy() == 2


@pytest.mark.parametrize("eager", [False, True])
def test_a_shipped_step_is_in_the_scope_of_its_strategy(make_cluster, eager):
    cluster = make_cluster(devices=2)
    strategy = cluster.strategy

    def inner(x):
        assert get_strategy().extended.parameter_devices
        return x.sum()

    @function(eager=eager)
    def step(x):
        here = get_strategy()
        assert in_cross_replica_context()
        assert not here.is_default
        # As a captured strategy, so in its own scope.
        assert strategy is here
        parts = here.run(inner, (x,))
        return here.num_replicas_in_sync, here.reduce("sum", parts, axis=None)

    there = cluster.ship(step.within(strategy))
    x = np.float32([1, 2])
    if eager:
        leaves = run_eager(there, (x,), {}).leaves
        assert leaves == [6.0]
    else:
        assert cluster.run(there, x) == (2, 6.0)
    assert get_strategy().is_default
    assert (there.name, there.eager) == (step.name, eager)


def test_a_step_in_scope_that_cannot_be_shipped_says_the_same(cluster):
    lock = threading.Lock()
    step = function(lambda: lock)
    with pytest.raises(TypeError, match="'lock'") as plain:
        step.code  # noqa: B018
    with pytest.raises(TypeError) as scoped:
        step.within(cluster.strategy).code  # noqa: B018
    assert str(scoped.value) == str(plain.value)


def test_a_pickled_strategy_has_the_same_face_on_a_worker(make_cluster):
    strategy = make_cluster(ps=3, devices=1).strategy
    there = pickle.loads(pickle.dumps(strategy))
    assert pickle.loads(pickle.dumps(strategy)) is there
    assert pickle.loads(pickle.dumps(there)) is there
    assert there.num_replicas_in_sync == 1
    assert there.extended.worker_devices == strategy.extended.worker_devices
    assert there.extended.parameter_devices == strategy.extended.parameter_devices
    assert there.cluster_resolver is None
    assert there.run(lambda x: x + 1, args=(1,)) == 2
    with there.scope():
        local = zv.Variable(1.0)
        assert local.spec.ps == zv.LOCAL
        with pytest.raises(ValueError, match="colocate_vars_with"):
            there.extended.colocate_vars_with(local)
    assert not there.extended.variable_created_in_scope(local)
    assert "on a worker" in repr(there)


def test_use_outside_of_scheduled_functions_is_allowed_and_warned_about(
    cluster, caplog
):
    strategy = cluster.strategy
    with caplog.at_level(logging.WARNING):
        assert strategy.run(lambda: 3) == 3
        assert strategy.reduce("sum", 4, axis=None) == 4
    assert len(caplog.messages) == 2
    assert all("ClusterCoordinator.schedule" in text for text in caplog.messages)
    caplog.clear()
    token = worker_context.set(WorkerContext(1, 2))
    try:
        assert strategy.run(lambda: get_worker_context().worker_index) == 1
    finally:
        worker_context.reset(token)

    @function
    def step(x):
        return strategy.run(lambda x: x + 1, args=(x,))

    assert step(np.float32(1)) == 2
    assert not caplog.messages


def test_per_replica_values_can_be_passed_to_one_replica(cluster):
    strategy = cluster.strategy
    given = strategy.experimental_distribute_values_from_function(
        lambda context: {"id": context.replica_id_in_sync_group}
    )
    assert isinstance(given["id"], PerReplica)
    assert strategy.run(lambda x, y: (x, y), (given,), {"y": [given]}) == (
        {"id": 0},
        [{"id": 0}],
    )


def test_variables_are_deleted_on_request_and_not_before(cluster):
    with cluster.strategy.scope():
        tree = zv.create_variables({"a": np.float32([0, 0]), "b": [np.float32([1])]})
        other = zv.Variable(5.0)
    cluster.strategy.delete_variables({**tree, "again": tree["a"], "x": 1.0})
    assert list(cluster.session.values) == [other.spec.key]
    assert cluster.session.requests.count("delete") == 1
    cluster.strategy.delete_variables({})
    assert cluster.session.requests.count("delete") == 1
    del other
    assert len(cluster.session.values) == 1


def test_only_own_variables_are_deleted(cluster):
    with cluster.strategy.scope():
        mine = zv.Variable(1.0)
    with pytest.raises(ValueError, match="'stranger'"):
        cluster.strategy.delete_variables([mine, zv.Variable(2.0, name="stranger")])
    assert len(cluster.session.values) == 1


def test_a_step_in_this_process_reads_all_its_variables_at_once(cluster):
    with cluster.strategy.scope():
        on_ps = [zv.Variable(np.float32(i)) for i in range(5)]
    here = zv.Variable(np.float32(10))

    @function
    def step():
        return sum(v.value() for v in (*on_ps[:2], here, *on_ps[2:]))

    cluster.session.requests.clear()
    assert float(step()) == 20
    assert cluster.session.requests == ["read"]


def test_a_handle_from_elsewhere_does_not_know_its_strategy(cluster):
    with cluster.strategy.scope():
        v = zv.Variable(1.0, name="v")
    assert v.distribute_strategy is cluster.strategy
    with pytest.raises(RuntimeError, match=r"'v'.*get_strat"):
        _ = pickle.loads(pickle.dumps(v)).distribute_strategy


@pytest.mark.shows("tf.distribute.coordinator")
def test_names_of_the_coordinators_module():
    coordinator = zs.coordinator
    assert coordinator.ClusterCoordinator is zs.ClusterCoordinator
    assert coordinator.PerWorkerValue is zs.PerWorkerValues
    assert coordinator.RemoteValue is zs.RemoteValue
    token = worker_context.set(WorkerContext(1, 2))
    try:
        assert coordinator.experimental_get_current_worker_index() == 1
    finally:
        worker_context.reset(token)
