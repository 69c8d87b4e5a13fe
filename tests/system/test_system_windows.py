"""Windows of local steps on a real cluster, against the same loop in optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.checkpoint import Manifest
from zstrat.coordinator import ClusterSession
from zstrat.launch import LocalCluster
from zstrat.wire import ReadSnapshot

pytestmark = pytest.mark.processes

WORKERS = 2
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), NESTEROV)
MODEL = {"b": np.zeros(3, np.float32), "w": np.ones((4, 3), np.float32)}


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(2, WORKERS) as running:
        yield running


@pytest.fixture
def strategy(cluster):
    with zs.ParameterServerStrategy(cluster.resolver) as made:
        yield made


def loss_of(params, x):
    return jnp.mean((x @ params["w"] + params["b"][None] - 1.0) ** 2)


def batch_of(worker, number):
    return np.random.default_rng([worker, number]).normal(size=(8, 4)).astype("f")


def dataset_of(context):
    number = 0
    while True:
        yield batch_of(context.input_pipeline_id, number)
        number += 1


@zs.function(eager=True)
def place():
    return zs.coordinator.experimental_get_current_worker_index()


def wait_for_workers(coordinator):
    """Else one worker may make the windows of another that is not there yet."""
    there = set()
    while len(there) < WORKERS:
        asked = [coordinator.schedule(place) for _ in range(2 * WORKERS)]
        there.update(coordinator.fetch(asked))


@pytest.mark.parametrize(("overlap", "outer"), [(0, NESTEROV), (1, CLIPPED)])
def test_windows_are_diloco_with_state_that_stays_on_the_worker(
    strategy, overlap, outer, tmp_path
):
    every, rounds, inner = 5, 4, optax.adam(0.05)
    with strategy.scope():
        params = zs.create_variables(MODEL)
        optimizer = zs.LocalOptimizer(
            inner,
            outer,
            every=every,
            overlap=overlap,
            name="local",
            wire=zs.Wire(push="int4", pull="bfloat16"),  # not in shared memory
        )
    coordinator = zs.ClusterCoordinator(strategy)

    def step(iterator):
        loss, grads = zs.value_and_grad(loss_of)(params, next(iterator))
        optimizer.apply_gradients(grads, params)
        return loss

    window = optimizer.window(step)
    iterator = iter(coordinator.create_per_worker_dataset(dataset_of))
    values = [
        coordinator.schedule(window, args=(iterator,)) for _ in range(WORKERS * rounds)
    ]
    coordinator.join()
    assert {value.fetch().shape for value in values} == {(every,)}
    assert coordinator.metrics()["rounds"]["local"]["closed"] == rounds

    theta = jax.tree.map(jnp.asarray, MODEL)
    copies, states = [theta] * WORKERS, [inner.init(theta)] * WORKERS
    bases, state = [theta] * WORKERS, outer.init(theta)
    gradients = jax.jit(jax.grad(loss_of))
    for number in range(rounds * every):
        if number >= every and number % every == overlap:
            copies, bases = [theta] * WORKERS, [theta] * WORKERS
        for m in range(WORKERS):
            grads = gradients(copies[m], batch_of(m, number))
            moved, states[m] = inner.update(grads, states[m], copies[m])
            copies[m] = optax.apply_updates(copies[m], moved)
        if number % every == every - 1:
            deltas = [
                jax.tree.map(jnp.subtract, *pair)
                for pair in zip(bases, copies, strict=True)
            ]
            mean = jax.tree.map(lambda *each: sum(each) / WORKERS, *deltas)
            moved, state = outer.update(mean, state, theta)
            theta = optax.apply_updates(theta, moved)
    for name, value in theta.items():
        found = params[name].numpy()
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)

    # What the servers keep of it is saved and comes back.
    saved = zs.Checkpoint(params=params, optimizer=optimizer)
    path = saved.save(tmp_path / "c")
    momentum = optimizer.outer.state
    params["b"].assign(np.full(3, 9.0, np.float32))
    saved.restore(path)
    np.testing.assert_allclose(params["b"].numpy(), theta["b"], rtol=1e-4, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, momentum, optimizer.outer.state)


def test_windows_pull_the_rows_of_a_sharded_table_that_they_look_up(cluster):
    every, rounds, height = 3, 2, 11
    begin = np.arange(2.0 * height, dtype=np.float32).reshape(height, 2)
    parts = zs.partitioners.FixedShardsPartitioner(2)
    strategy = zs.ParameterServerStrategy(cluster.resolver, variable_partitioner=parts)
    with strategy:
        with strategy.scope():
            table = zs.Variable(begin)
            optimizer = zs.LocalOptimizer(
                optax.sgd(0.5),
                optax.sgd(1.0),
                every=every,
                rounds=zs.Rounds(workers=WORKERS),
            )
        coordinator = zs.ClusterCoordinator(strategy)

        def ids_of(worker, number):
            return np.random.default_rng([worker, number]).integers(height, size=2)

        def dataset(context):
            batches = [ids_of(context.input_pipeline_id, n) for n in range(64)]
            return zs.data.Dataset.from_tensor_slices(np.stack(batches))

        def step(iterator):
            ids = next(iterator)
            loss = lambda table: jnp.sum(zs.embedding_lookup(table, ids) ** 2) / 2  # noqa: E731
            optimizer.apply_gradients(zs.grad(loss)(table), table)

        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        for _ in range(WORKERS * rounds):
            coordinator.schedule(optimizer.window(step), args=(iterator,))
        coordinator.join()
        assert table.components[0].shape[0] < height
        wanted = begin.astype(np.float64)
        for turn in range(rounds):
            copies = [wanted.copy() for _ in range(WORKERS)]
            for worker, copy in enumerate(copies):
                for number in range(turn * every, (turn + 1) * every):
                    ids = ids_of(worker, number)
                    np.subtract.at(copy, ids, 0.5 * copy[ids])
            wanted = sum(copies) / WORKERS
        np.testing.assert_allclose(table.numpy(), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("fragments", "faults"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.thorough),
        pytest.param(1, 25, marks=[pytest.mark.thorough, pytest.mark.timeout(600)]),
    ],
)
def test_workers_are_killed_and_frozen_amid_windows(fragments, faults):
    """Each step moves by -1 and rounds are sums, so values count the steps that have
    been contributed: each window once."""
    every, windows = 4, 20 + 20 * faults
    with LocalCluster(1, WORKERS) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            w, v = (zs.Variable(np.zeros(2, np.float32)) for _ in range(2))
            optimizer = zs.LocalOptimizer(
                optax.sgd(1.0),
                optax.sgd(1.0),
                every=every,
                fragments=fragments,
                # What is late counts, too; with fragments it would be of another one.
                rounds=zs.Rounds(
                    merge="sum", late="next" if fragments == 1 else "drop"
                ),
            )
        coordinator = zs.ClusterCoordinator(strategy)

        def step():
            ones = [1.0 + 0.0 * x.value() for x in (w, v)]
            optimizer.apply_gradients(ones, [w, v])
            return ones[0][0]

        window = optimizer.window(step)
        values = [coordinator.schedule(window) for _ in range(windows)]
        for number in range(faults):
            task = f"worker:{(number + 1) % WORKERS}"
            values[20 * number + 10].fetch()
            if number % 5 == 4:
                cluster.stop_task(task)
                values[20 * number + 20].fetch()
                cluster.continue_task(task)
            else:
                cluster.kill(task)
                values[20 * number + 20].fetch()
                cluster.restart(task)
        coordinator.join()
        made = {len(value.fetch()) for value in values}
        assert made == {every // fragments}
        if fragments == 1:
            assert w.numpy().tolist() == v.numpy().tolist() == [-every * windows] * 2
        else:  # steps since the last exchange of a fragment are on the workers still
            for x in (w, v):
                assert 0 < -x.numpy()[0] <= every // fragments * windows
        strategy.close()


@pytest.mark.parametrize("is_back", [False, True])
def test_a_worker_is_lost_while_its_windows_are_saved(tmp_path, monkeypatch, is_back):
    """The checkpoint is written again, with what the workers then have."""
    with (
        LocalCluster(1, WORKERS) as cluster,
        zs.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        with strategy.scope():
            w = zs.Variable(np.zeros(2, np.float32))
            local = zs.LocalOptimizer(optax.adam(1.0), optax.sgd(1.0), every=2)
        coordinator = zs.ClusterCoordinator(strategy)
        ask, asked = ClusterSession.ask_worker, []

        async def ask_one_that_is_lost(self, worker, message, *fields):
            if message is ReadSnapshot:
                asked.append(worker)
                if asked.count(1) == 1 == worker:
                    if is_back:  # a new process: it knows nothing of the snapshot
                        fields = (0, *fields[1:])
                    else:
                        cluster.kill("worker:1")
            return await ask(self, worker, message, *fields)

        monkeypatch.setattr(ClusterSession, "ask_worker", ask_one_that_is_lost)

        def step():
            local.apply_gradients(1.0 + 0.0 * w.value(), w)

        window = local.window(step)

        def train():
            for _ in range(3 * WORKERS):
                coordinator.schedule(window)
            coordinator.join()

        wait_for_workers(coordinator)
        train()
        saved = zs.Checkpoint(w=w, local=local)
        path = saved.save(tmp_path / "c")
        value = w.numpy()
        tensors = Manifest.of(path).tensors
        assert sum("/begun" in name for name in tensors) == 1 + is_back
        train()
        saved.restore(path)
        np.testing.assert_array_equal(w.numpy(), value)
        train()


def test_each_worker_has_several_devices():
    with LocalCluster(1, 1, worker_devices=2) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            w = zs.Variable(np.zeros(2, np.float32))
            optimizer = zs.LocalOptimizer(optax.sgd(0.5), optax.sgd(1.0), every=3)
        coordinator = zs.ClusterCoordinator(strategy)

        def step(iterator):
            def replica(x):
                loss = lambda w: jnp.mean((w - x) ** 2) / 4  # noqa: E731
                value, grads = zs.value_and_grad(loss)(w)
                optimizer.apply_gradients([(grads, w)])
                return value

            values = strategy.run(replica, args=(next(iterator),))
            return strategy.reduce("mean", values, axis=None)

        def dataset():
            while True:
                yield np.arange(8, dtype=np.float32).reshape(4, 2)

        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        window = optimizer.window(step)
        losses = coordinator.schedule(window, args=(iterator,)).fetch()
        coordinator.join()
        wanted, x = np.zeros(2), np.arange(8).reshape(4, 2)
        for loss in losses:
            assert loss == pytest.approx(np.mean((wanted - x) ** 2) / 4, rel=1e-5)
            # The sum over both replicas of the gradients of their means.
            halves = [np.mean(wanted - half, axis=0) / 4 for half in (x[:2], x[2:])]
            wanted = wanted - 0.5 * sum(halves)
        np.testing.assert_allclose(w.numpy(), wanted, rtol=1e-5)
        strategy.close()


@pytest.mark.parametrize("is_same_program", [False, True])
def test_a_restored_program_goes_on_as_if_nothing_had_been_since(
    cluster, tmp_path, is_same_program
):
    """With the moments, the copies and the fragments of the cut, and in another program
    with its place in schedules: values are equal to the last bit."""

    def rates(count):
        return 0.1 / (1.0 + jnp.asarray(count * (not is_same_program), jnp.float32))

    def data(context):
        batches = [batch_of(context.input_pipeline_id, n) for n in range(16)]
        return zs.data.Dataset.from_tensor_slices(np.stack(batches))

    def program(then, restored=None):
        """Runs ``then`` with what trains, saves, and tells the values."""
        with zs.ParameterServerStrategy(cluster.resolver) as strategy:
            with strategy.scope():
                params = zs.create_variables(MODEL)
                local = zs.LocalOptimizer(
                    optax.adam(rates),
                    NESTEROV,
                    every=4,
                    fragments=2,
                    overlap=1,
                    mix=0.5,
                    rounds=zs.Rounds(workers=WORKERS),
                )
            coordinator = zs.ClusterCoordinator(strategy)
            iterator = iter(coordinator.create_per_worker_dataset(data))
            wait_for_workers(coordinator)
            saved = zs.Checkpoint(params=params, local=local, iterator=iterator)
            if restored is not None:
                saved.restore(restored).assert_consumed()

            def step(iterator):
                loss, grads = zs.value_and_grad(loss_of)(params, next(iterator))
                local.apply_gradients(grads, params)
                return loss

            window = local.window(step)

            def train(count):
                for _ in range(count * WORKERS):
                    coordinator.schedule(window, args=(iterator,))
                coordinator.join()

            path = then(train, saved)
            return path, {name: x.numpy() for name, x in params.items()}

    def begins(train, saved):
        train(3)
        path = saved.write(tmp_path / "c")
        train(2)
        if is_same_program:
            saved.restore(path)
            train(3)
        return path

    def goes_on(train, saved):
        train(3)

    _, wanted = program(lambda train, saved: train(6))
    path, found = program(begins)
    if not is_same_program:
        _, found = program(goes_on, path)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)
