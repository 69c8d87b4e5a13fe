"""A round of all workers is one step of optax on the mean of their gradients, to the
last bit the same on any number of servers."""

import jax
import numpy as np
import optax
import pytest

import zstrat as zs

pytestmark = pytest.mark.processes

SERVERS, WORKERS, ROUNDS = 5, 3, 4
STEPS = WORKERS * ROUNDS
SHAPES = {"dense": (4, 3), "parts": (10, 2), "table": (12, 2)}
RECIPES = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "adagrad": lambda: optax.adagrad(0.1),
    # It needs the norm of the merged gradients, of all servers.
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
}


@pytest.fixture(scope="module")
def cluster():
    env = {"JAX_ENABLE_X64": "1"}
    with zs.LocalCluster(SERVERS, WORKERS, env=env) as running:
        yield running


def first_of(cluster, servers):
    """The resolver of a program that knows so many servers of the cluster."""
    jobs = cluster.spec.as_dict()
    spec = zs.ClusterSpec({"ps": jobs["ps"][:servers], "worker": jobs["worker"]})
    return zs.cluster_resolver.SimpleClusterResolver(spec)


class Data:
    """First values, and for each step its targets and rows."""

    def __init__(self, recipes):
        rng = np.random.default_rng(0)
        self.start = {
            recipe: {k: rng.normal(size=s) for k, s in SHAPES.items()}
            for recipe in recipes
        }
        self.targets = [
            {
                "dense": rng.normal(size=SHAPES["dense"]),
                "parts": rng.normal(size=SHAPES["parts"]),
                "table": rng.normal(size=(4, 2)),
                "ids": rng.integers(0, 12, 4).astype(np.int32),
            }
            for _ in range(STEPS)
        ]


def trained(strategy, data):
    """The values of all variables at the end, by recipe, and what the members of each
    round were given."""
    with strategy.scope():
        params = {
            recipe: {k: zs.Variable(v) for k, v in values.items()}
            for recipe, values in data.start.items()
        }
        optimizers = {
            recipe: zs.Optimizer(
                RECIPES[recipe](),
                params=params[recipe],
                rounds=zs.Rounds(workers=WORKERS),
            )
            for recipe in params
        }
        rounds = zs.Variable(np.zeros(()))
        counting = zs.Optimizer(optax.sgd(1.0), rounds=zs.Rounds(workers=WORKERS))
        # What has no rounds moves with each step, beside what has.
        alone, added = (zs.Variable(np.zeros(())) for _ in range(2))
        asynchronous = zs.Optimizer(optax.sgd(1.0))
    coordinator = zs.ClusterCoordinator(strategy)

    @zs.function
    def step(given):
        for recipe, mine in params.items():
            rows = zs.embedding_lookup(mine["table"], given["ids"]) - given["table"]
            slices = zs.IndexedSlices(rows, given["ids"], mine["table"].shape)
            grads = {k: mine[k].value() - given[k] for k in ("dense", "parts")}
            optimizers[recipe].apply_gradients({**grads, "table": slices}, mine)
        read = rounds.value()
        counting.apply_gradients([(0 * read - 1, rounds)])
        asynchronous.apply_gradients([(0 * read - 1, alone)])
        added.assign_add(0 * read + 1)
        return read

    values = [coordinator.schedule(step, args=(given,)) for given in data.targets]
    coordinator.join()
    assert (alone.numpy(), added.numpy(), rounds.numpy()) == (STEPS, STEPS, ROUNDS)
    metrics = coordinator.metrics()["rounds"]
    assert [each["closed"] for each in metrics.values()] == [ROUNDS] * (1 + len(params))
    read = [int(value.fetch()) for value in values]
    members = [
        [given for given, n in zip(data.targets, read, strict=True) if n == number]
        for number in range(ROUNDS)
    ]
    found = {
        recipe: {k: v.numpy() for k, v in mine.items()}
        for recipe, mine in params.items()
    }
    return found, members


def expected(transformation, params, rounds):
    """What optax makes of the means of the rounds' gradients, each the targets of its
    steps. Of the table, and of what belongs to its rows, it sees the rows that a round
    names."""
    state = transformation.init(params)
    update = jax.jit(transformation.update)
    table = SHAPES["table"]
    for members in rounds:
        rows = np.unique(np.concatenate([each["ids"] for each in members]))
        seen = {**params, "table": params["table"][rows]}
        sums = jax.tree.map(np.zeros_like, seen)
        for each in members:
            for name in ("dense", "parts"):
                sums[name] = sums[name] + (params[name] - each[name])
            gradient = params["table"][each["ids"]] - each["table"]
            np.add.at(sums["table"], np.searchsorted(rows, each["ids"]), gradient)
        mean = {name: total / len(members) for name, total in sums.items()}

        def of_rows(leaf, rows=rows):
            return leaf[rows] if np.shape(leaf) == table else leaf

        moved, less = update(mean, jax.tree.map(of_rows, state), seen)
        now = jax.tree.map(np.asarray, optax.apply_updates(seen, moved))

        def whole(before, after, rows=rows):
            if np.shape(before) != table:
                return after
            copied = np.array(before)
            copied[rows] = after
            return copied

        state = jax.tree.map(whole, state, less)
        params = {**now, "table": whole(params["table"], now["table"])}
    return params


@pytest.mark.parametrize(
    ("recipes", "counts"),
    [
        (("momentum", "clipped"), (1, 3)),
        *[
            pytest.param(recipes, (1, 2, SERVERS), marks=pytest.mark.thorough)
            for recipes in [("momentum", "clipped"), ("sgd", "adam", "adagrad")]
        ],
    ],
    ids=str,
)
def test_rounds_are_steps_of_optax_on_any_number_of_servers(cluster, recipes, counts):
    data, found = Data(recipes), {}
    with jax.enable_x64(True):
        for servers in counts:
            with zs.ParameterServerStrategy(
                first_of(cluster, servers),
                variable_partitioner=lambda shape, dtype, servers=servers: [
                    servers if shape and shape[0] >= 10 else 1,
                    *[1] * (len(shape) - 1),
                ],
            ) as strategy:
                found[servers] = trained(strategy, data)
        for each, rounds in found.values():
            assert [len(members) for members in rounds] == [WORKERS] * ROUNDS
            # Which step is in which round depends on who was quick.
            is_alike = _steps_of(rounds) == _steps_of(found[1][1])
            for recipe in recipes:
                want = expected(RECIPES[recipe](), data.start[recipe], rounds)
                for name, value in want.items():
                    got = each[recipe][name]
                    assert got.dtype == np.float64
                    if is_alike:
                        np.testing.assert_array_equal(got, found[1][0][recipe][name])
                    # Alone, and beside other leaves, XLA computes powers of adam and
                    # the factor of clipping differently.
                    close_to = 1e-14 if recipe in ("adam", "clipped") else 0
                    np.testing.assert_allclose(got, value, close_to, err_msg=recipe)


def _steps_of(rounds):
    return [[id(given) for given in members] for members in rounds]
