"""Tables in parts against real daemons: training, and initial values."""

import functools
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest

import zstrat as zs

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]


ROWS, DIM, BATCH, STEPS = 10, 4, 8, 6


@pytest.fixture
def coordinator(world):
    return world.coordinator


@pytest.fixture
def scope(world):
    return world.scope


def start():
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    return {"words": normal(ROWS, DIM), "contexts": normal(ROWS + 3, DIM)}


PARENTS = np.array([[3], [7], [9], [0], [0], [2], [8], [8], [1], [4]], np.int32)


def batches():
    """Each touches rows of all parts, some of them several times."""
    random = np.random.default_rng(1)
    for _ in range(STEPS):
        ids = random.integers(ROWS, size=BATCH)
        ids[:4] = 0, ROWS - 1, ROWS // 2, 0
        contexts = random.integers(ROWS + 3, size=BATCH)
        contexts[-4:] = ROWS + 2, 6, 0, 6
        yield {
            "ids": ids.astype(np.int32),
            "contexts": contexts,
            "y": random.normal(size=BATCH).astype(np.float32),
        }


def by_hand(values, batch):
    """Loss and rows of gradients, by the rules of the calculus."""
    ids, near = batch["ids"], batch["contexts"]
    above = PARENTS[ids][:, 0]
    words, contexts = values["words"], values["contexts"]
    center, context, up = words[ids], contexts[near], words[above]
    error = (center * context).sum(-1) + up.sum(-1) - batch["y"]
    push = (2 * error / BATCH)[:, None]
    grads = {name: np.zeros_like(value) for name, value in values.items()}
    np.add.at(grads["words"], ids, push * context)
    np.add.at(grads["words"], above, np.broadcast_to(push, up.shape))
    np.add.at(grads["contexts"], near, push * center)
    touched = {"words": np.union1d(ids, above), "contexts": np.unique(near)}
    return np.mean(error**2), grads, touched


def plain(rule):
    """The same training with optax, on the rows that a step touches alone."""
    values = {n: v.astype(np.float64) for n, v in start().items()}
    shared = rule.init(np.zeros(()))
    states = {n: rule.init(v) for n, v in values.items()}
    losses = []
    for batch in batches():
        loss, grads, touched = by_hand(values, batch)
        losses.append(loss)
        for name, rows in touched.items():
            some = functools.partial(jax.tree.map, lambda s, r=rows: np.asarray(s)[r])
            state = jax.tree.map(
                lambda s, r=rows: np.asarray(s)[r] if np.ndim(s) else s, states[name]
            )
            value, grad = some(values[name]), some(grads[name])
            moves, moved = rule.update(grad, state, value)
            values[name] = np.array(values[name])
            values[name][rows] = value + np.asarray(moves)
            states[name] = jax.tree.map(
                lambda old, new, r=rows: over(old, r, new), states[name], moved
            )
    assert jax.tree.structure(shared) == jax.tree.structure(states["words"])
    return values, losses


def over(old, rows, new):
    if not np.ndim(old):
        return new
    whole = np.array(old)
    whole[rows] = new
    return whole


def loss_fn(words, contexts, links, batch):
    center = zs.embedding_lookup(words, batch["ids"])
    context = zs.embedding_lookup(contexts, batch["contexts"])
    above = zs.embedding_lookup(links, batch["ids"])[:, 0]  # one level more
    up = zs.embedding_lookup(words, above)
    error = (center * context).sum(-1) + up.sum(-1) - batch["y"]
    return jnp.mean(error**2)


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        (optax.sgd(0.1), 3),
        (optax.adagrad(0.1), 3),
        (optax.adam(0.05), 3),
        (optax.adam(0.05), 1),
    ],
    ids=["sgd", "adagrad", "adam", "adam-whole"],
)
def test_training_one_step_at_a_time_is_that_of_optax(coordinator, scope, rule, parts):
    with scope(parts):
        words, contexts = (zs.Variable(v, name=n) for n, v in start().items())
        links = zs.Variable(PARENTS, name="links", trainable=False)
        optimizer = zs.Optimizer(rule)

    @zs.function
    def step(batch):
        grad = zs.value_and_grad(loss_fn, (0, 1))
        loss, grads = grad(words, contexts, links, batch)
        optimizer.apply_gradients(grads, (words, contexts))
        return loss

    losses = []
    for batch in batches():
        losses.append(coordinator.schedule(step, args=(batch,)))
        coordinator.join()
    expected, expected_losses = plain(rule)
    got = [float(loss.fetch()) for loss in losses]
    np.testing.assert_allclose(got, expected_losses, rtol=1e-4)
    np.testing.assert_allclose(words.numpy(), expected["words"], atol=2e-5)
    np.testing.assert_allclose(contexts.numpy(), expected["contexts"], atol=2e-5)
    assert step.trace_count == 1


@pytest.mark.parametrize("in_step", [True, False], ids=["in a step", "outside"])
def test_all_parts_count_the_steps_of_an_optimizer(coordinator, scope, in_step):
    """Adam's correction of its bias, and schedules, follow the number of steps: it is
    the same for a part in which a step has no row."""
    touched = [[0, 1], [1, 1], [], [0, 9], [9, 8], [0, 7]]
    random = np.random.default_rng(0)
    gradients = [random.normal(size=(len(ids), 2)).astype("f4") for ids in touched]
    schedule = optax.exponential_decay(0.3, 1, 0.5)
    rule = optax.adam(schedule)

    value, state = np.zeros((10, 2)), rule.init(np.zeros((10, 2)))
    for ids, gradient in zip(touched, gradients, strict=True):
        dense = np.zeros((10, 2), "f4")
        np.add.at(dense, np.array(ids, int), gradient)
        moves, new = rule.update(dense, state, value)
        rows = np.unique(np.array(ids, int))
        value[rows] += np.asarray(moves)[rows]
        state = jax.tree.map(
            lambda a, b, r=rows: over(a, r, np.asarray(b)[r]) if np.ndim(b) else b,
            state,
            new,
        )

    got = {}
    for parts in (1, 4):
        with scope(parts):
            table = zs.Variable(np.zeros((10, 2), "f4"), name="table")
            optimizer = zs.Optimizer(rule)

        @zs.function
        def step(ids, gradient, table=table, optimizer=optimizer):
            rows = zs.IndexedSlices(gradient, ids, (10, 2))
            optimizer.apply_gradients([(rows, table)])

        for ids, gradient in zip(touched, gradients, strict=True):
            at = np.array(ids, "i4")
            if in_step:
                coordinator.schedule(step, args=(at, gradient))
                coordinator.join()
            else:
                rows = zs.IndexedSlices(gradient, at, (10, 2))
                optimizer.apply_gradients([(rows, table)])
        got[parts] = table.numpy()
    np.testing.assert_allclose(got[1], value, atol=1e-5)
    np.testing.assert_allclose(got[4], value, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seeded_initializer_gives_the_same_table_for_any_number_of_parts(
    scope, dtype
):
    shape = (3001, 33)
    made = []
    for parts in (1, 2, 3):
        with scope(parts):
            table = zs.Variable(
                zs.initializers.normal(0.5, seed=7),
                shape=shape,
                dtype=dtype,
                name="table",
            )
        assert len(table.components) == parts
        made.append(table.numpy())
    assert made[0].shape == shape
    assert abs(float(made[0].astype("f8").std()) - 0.5) < 0.01
    for other in made[1:]:
        np.testing.assert_array_equal(other, made[0])
    here = zs.Variable(zs.initializers.normal(0.5, seed=7), shape=shape, dtype=dtype)
    np.testing.assert_array_equal(here.numpy(), made[0])  # made without any cluster


_LARGE = """
    import resource, sys
    import numpy as np, optax
    import zstrat as zs

    MIB = 1024

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    local = zs.LocalCluster(num_ps=2, num_workers=1)
    strategy = zs.ParameterServerStrategy(
        local.resolver,
        variable_partitioner=zs.partitioners.MinSizePartitioner(256 << 10, 2),
    )
    coordinator = zs.ClusterCoordinator(strategy)

    def trained(rows):
        with strategy.scope():
            table = zs.Variable(
                zs.initializers.uniform(seed=1), shape=(rows, 64), dtype="float32"
            )
            optimizer = zs.Optimizer(optax.adagrad(0.1))

        @zs.function
        def step(ids):
            def loss(table):
                return (zs.embedding_lookup(table, ids) ** 2).sum()

            loss, gradient = zs.value_and_grad(loss)(table)
            optimizer.apply_gradients([(gradient, table)])
            return loss

        ids = np.random.default_rng(0).integers(rows, size=(5, 4096))
        for some in ids:
            coordinator.schedule(step, args=(some,))
        coordinator.join()
        assert len(table.components) == 2
        assert table[rows - 1].shape == (64,)
        checkpoint = zs.Checkpoint(table=table, optimizer=optimizer)
        path = checkpoint.save(f"{sys.argv[1]}/{rows}")
        checkpoint.restore(path)
        strategy.delete_variables(table.components)

    trained(5000)
    before = peak()
    trained(120_000)
    print((peak() - before) // MIB)
    strategy.close()
    local.stop()
"""


def test_a_large_table_is_never_on_the_coordinator(tmp_path):
    done = programs.run(
        ["-c", textwrap.dedent(_LARGE), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    assert grown < 24, f"{grown} MiB more for a table of 29 MiB"
