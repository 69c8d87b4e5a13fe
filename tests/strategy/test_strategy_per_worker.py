"""``per_worker_variable=True``: a value of its own on each worker."""

import contextlib

import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.errors import NotFoundError
from zstrat.program import WorkerContext, load, prepare, worker_context
from zstrat.wire import UpdateOp


@contextlib.contextmanager
def on_worker(index, attempt=1):
    before = worker_context.set(WorkerContext(index, 2, attempt))
    try:
        yield
    finally:
        worker_context.reset(before)


def created(cluster, value=0.0, **given):
    with cluster.strategy.scope():
        return zs.Variable(value, name="seen", per_worker_variable=True, **given)


@pytest.mark.shows("tf.Variable(per_worker_variable=)")
def test_each_worker_reads_and_updates_its_own(cluster):
    seen = created(cluster, np.float32(1.0))
    together = []
    with cluster.strategy.scope():
        total = zs.Variable(0.0, name="total")

    @zs.function
    def step(n):
        together.append(zs.get_worker_context().worker_index)
        seen.assign_add(n)
        total.assign_add(n)
        return seen.value(), seen * 2, seen.shape

    assert step.plan((np.float32(0),)).out_specs[0].shape == ()
    here = [cluster.ship(step), cluster.ship(step)]  # a process each
    for index, n in ((0, 2), (1, 5), (0, 3)):
        with on_worker(index):
            found = cluster.run(here[index], np.float32(n))
            assert found[1] == 2 * found[0]
            assert found[2] == ()
    assert [float(value) for value in seen.read_all()] == [6, 6]
    assert float(total.numpy()) == 10
    with on_worker(1, attempt=2):  # what worker 0 was lost with
        assert cluster.run(here[0], np.float32(1))[0] == 7
    assert [float(value) for value in seen.read_all()] == [6, 7]


def test_it_is_made_for_all_workers_at_once(cluster):
    calls = []

    def initial():
        calls.append(len(calls))
        return np.full(3, len(calls), np.int32)

    before = len(cluster.session.requests)
    seen = created(cluster, initial)
    assert cluster.session.requests[before:] == ["create"]
    assert [value.tolist() for value in seen.read_all()] == [[1] * 3, [2] * 3]
    assert (seen.name, seen.shape, seen.dtype) == ("seen", (3,), np.int32)
    assert not seen.trainable
    assert seen.distribute_strategy is cluster.strategy
    assert repr(seen) == (
        "<zstrat.PerWorkerVariable 'seen' shape=(3,) dtype=int32 workers=2>"
    )


def test_rows_of_it(cluster):
    seen = created(cluster, np.zeros((4, 2), np.float32))

    @zs.function
    def step(ids):
        rows = seen.sparse_read(ids)
        seen.scatter_add(zs.IndexedSlices(rows + 1, ids))

    with on_worker(1):
        plan = prepare(cluster.ship(step), (np.array([3, 0]),), {}).plan
    assert [spec.name for spec in plan.specs] == ["seen/worker_1"]
    assert plan.updates[0].op is UpdateOp.SCATTER_ADD
    assert plan.has_lookups


def test_where_there_is_no_worker_it_says_so(cluster):
    seen = created(cluster, np.zeros((1, 1)), dtype="float32")
    words = r"'seen'.*read_all\(\)"
    for wrong in (
        seen.numpy,
        seen.value,
        lambda: seen.assign(np.ones((1, 1))),
        lambda: seen.scatter_add(
            zs.IndexedSlices(np.ones((1, 1), "f"), np.zeros(1, int))
        ),
        lambda: zs.function(lambda v: v.value())(seen),
    ):
        with pytest.raises(RuntimeError, match=words):
            wrong()
    with pytest.raises(RuntimeError, match="worker_0"):
        zs.function(seen.value)()
    with pytest.raises(RuntimeError, match="worker_0"):
        zs.function(lambda: [seen.assign(np.ones((1, 1)))][1:])()
    with pytest.raises(RuntimeError, match="read_all"):
        zs.function(lambda: seen.read_all())()


@pytest.mark.parametrize("make", [None, zs.OneDeviceStrategy])
def test_only_a_coordinator_has_workers(make):
    scope = contextlib.nullcontext() if make is None else make("CPU:0").scope()
    with scope, pytest.raises(ValueError, match=r"zs\.ParameterSer"):
        zs.Variable(1.0, per_worker_variable=True)


def test_no_optimizer_moves_it(cluster):
    seen = created(cluster)
    with cluster.strategy.scope():
        optimizer = zs.Optimizer(optax.sgd(0.1))

    @zs.function
    def step():
        optimizer.apply_gradients([(np.float32(1.0), seen)])

    words = "'seen'"
    with on_worker(0), pytest.raises(ValueError, match=words):
        cluster.run(cluster.ship(step))
    with pytest.raises(ValueError, match=words):
        zs.Optimizer(optax.sgd(0.1), params=[seen])


def test_another_session_knows_it_not(cluster, make_cluster):
    seen = created(cluster)
    step = zs.function(lambda: seen.value())
    with pytest.raises(NotFoundError, match="worker_0"):
        make_cluster().strategy.require_known(step.plan())
    assert load(cluster.ship(step).code).plan().reads[0].name == "seen/worker_0"
