"""Two processes, here threads, of two devices each, one of which is given parts of
different shapes: its replicas run in turns, and those of the other as one program. They
do the same collectives, or the board on which they lay their arrays down says so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from in_replicas import context
from ranks import ranks
from tiers import combined

import zstrat as zs

HERE, ALL = 2, 4
A, S = zs.VariableAggregation, zs.VariableSynchronization
WAYS = ["by itself", "in a step"]
ROWS = [n % 2 + 1 if n < HERE else 1 for n in range(ALL)]
PARTS = [np.arange(rows, dtype=np.float32) + n for n, rows in enumerate(ROWS)]
SUMS = [part.sum() for part in PARTS]
TOTAL = float(sum(SUMS))

pytestmark = pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")


@pytest.fixture(params=combined(WAYS[::-1], step=2))
def both(request):
    """What a program returns, in both processes, that is given the parts."""
    way = request.param

    def both(make, times=1):
        def one(strategy, rank):
            parts = strategy.experimental_distribute_values_from_function(
                lambda context: PARTS[context.replica_id_in_sync_group]
            )
            program = make(strategy)
            if way != "by itself":
                program = zs.function(program, eager=way == "eagerly")
            for _ in range(times):
                found = program(parts)
            return jax.tree.map(lambda x: np.asarray(x).tolist(), found)

        return ranks(2, one, HERE)

    return both


def variables(strategy, **aggregations):
    with strategy.scope():
        return [zs.Variable(0.0, aggregation=A[name]) for name in aggregations.values()]


def test_a_step_of_training(both):
    def make(strategy):
        with strategy.scope():
            w = zs.Variable(0.0)
            optimizer = zs.Optimizer(optax.sgd(1.0))

        def replica(x):
            loss, gradient = zs.value_and_grad(lambda w: (w * x).sum())(w)
            optimizer.apply_gradients([(gradient, w)])
            return loss

        def step(parts):
            losses = strategy.run(replica, (parts,))
            both = strategy.reduce("sum", losses), strategy.reduce("mean", losses)
            return *both, w.value() + 0

        return step

    # The second step: w was moved by the sum of all gradients before.
    loss = -TOTAL * TOTAL
    for found in both(make, times=2):
        np.testing.assert_allclose(found, [loss, loss / ALL, -2 * TOTAL], rtol=1e-6)


def test_what_depends_on_a_collective_before_what_does_not(both):
    def make(strategy):
        v, w, u = variables(strategy, v="MEAN", w="SUM", u="ONLY_FIRST_REPLICA")

        def replica(x):
            total = context().all_reduce("sum", x.sum())
            v.assign(total)
            w.assign(x.sum())
            u.assign(x.sum() + total)
            return total, x.sum()

        def step(parts):
            total, mine = strategy.run(replica, (parts,))
            return (
                strategy.reduce("mean", total),
                strategy.reduce("sum", mine),
                *[x.value() for x in (v, w, u)],
            )

        return step

    expected = [TOTAL, TOTAL, TOTAL, TOTAL, SUMS[0] + TOTAL]
    for found in both(make):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("both", ["eagerly"], indirect=True)
def test_an_eager_step(both):
    def make(strategy):
        (v,) = variables(strategy, v="SUM")

        def step(parts):
            strategy.run(lambda x: v.assign_add(x.sum()), (parts,))
            return v.value()

        return step

    assert both(make) == [TOTAL] * 2


@pytest.mark.parametrize("captured", [True, False])
def test_two_functions_in_a_row(both, captured):
    def make(strategy):
        v, w, u = variables(strategy, v="SUM", w="SUM", u="MEAN")

        def first(x):
            v.assign(x.sum())
            return x.sum()

        def step(parts):
            total = strategy.reduce("sum", strategy.run(first, (parts,)))

            def second(x, *given):
                (other,) = given or (total,)
                w.assign(x.sum())
                u.assign(context().all_reduce("mean", x.sum() * other))
                return other + 0, x.max()

            given = (parts,) if captured else (parts, total)
            other, largest = strategy.run(second, given)
            return (
                strategy.reduce("mean", other),
                strategy.reduce("sum", largest),
                *[x.value() for x in (v, w, u)],
            )

        return step

    largest = float(sum(part.max() for part in PARTS))
    expected = [TOTAL, largest, TOTAL, TOTAL, TOTAL * TOTAL / ALL]
    for found in both(make):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_function_that_runs_in_turns_everywhere(both):
    def make(strategy):
        v, w = variables(strategy, v="SUM", w="SUM")

        def replica(x, other):
            context().merge_call(lambda strategy, x: None, (x.sum(),))
            w.assign(x.sum())
            v.assign(context().all_reduce("sum", x.sum() * other) / ALL)
            return x.sum()

        def step(parts):
            total = strategy.reduce("sum", parts, axis=0)
            found = strategy.run(replica, (parts, total))
            return strategy.reduce("sum", found), v.value() + 0, w.value() + 0

        return step

    for found in both(make):
        np.testing.assert_allclose(found, [TOTAL, TOTAL**2, TOTAL], rtol=1e-6)


@pytest.mark.parametrize("both", WAYS, indirect=True)
def test_everything_that_replicas_do_together(both):
    def make(strategy):
        v, w = variables(strategy, v="SUM", w="NONE")
        with strategy.scope():
            count = zs.Variable(
                0, aggregation=A.SUM, synchronization=S.ON_READ, dtype="int32"
            )
            whole = zs.Variable(0, aggregation=A.MEAN)
            table = zs.Variable(np.zeros((3, 1), np.float32), aggregation=A.SUM)

        def replica(x):
            at = jnp.array([1])
            slices = zs.IndexedSlices(x.sum()[None, None], at)
            tree = {"b": x.sum(), "a": slices, "c": jnp.int32(x.size)}
            reduced = context().all_reduce("sum", tree)
            rows = context().all_gather({"x": x[:1], "y": 2 * x[:1]}, 0)
            table.scatter_add(slices)
            count.assign_add(x.size)
            w.assign(x.sum())
            v.assign(x.sum())
            whole.assign(x.size * ALL)
            looked = zs.embedding_lookup(table, at)[0, 0]
            return {
                "sum": reduced["b"] + v.value(),
                "size": reduced["c"],
                "slices": reduced["a"].values.sum(),
                "rows": (rows["x"] + rows["y"]).sum(),
                "own": w.value(),
                "name": "text",
                "variable": v,
                "looked": looked,
            }

        def step(parts):
            found = strategy.run(replica, (parts,))
            assert found.pop("name") == "text"
            found["variable"] = found["variable"].value()
            means = {k: strategy.reduce("mean", x) for k, x in found.items()}
            return {**means, "count": count.value() + 0, "whole": whole.value() + 0}

        return step

    size = sum(ROWS)
    firsts = sum(3 * float(part[0]) for part in PARTS)
    expected = {
        "sum": 2 * TOTAL,
        "size": size,
        "slices": TOTAL,
        "rows": firsts,
        "own": TOTAL / ALL,
        "variable": TOTAL,
        "looked": TOTAL,
        "count": size,
        "whole": size,
    }
    for found in both(make):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_last_batch_of_a_dataset(compiled):
    def program(strategy, rank):
        dataset = zs.data.Dataset.from_tensor_slices(np.arange(52.0, dtype=np.float32))

        def step(batch):
            return strategy.reduce("sum", strategy.run(lambda x: x.sum(), (batch,)))

        step = zs.function(step) if compiled else step
        batches = strategy.experimental_distribute_dataset(dataset.batch(32))
        return [float(step(batch)) for batch in batches]

    expected = [float(sum(range(32))), float(sum(range(32, 52)))]
    assert ranks(2, program, HERE) == [expected] * 2


def test_keys_and_numbers_among_the_arguments(both):
    def make(strategy):
        def replica(x, key, scale):
            return jax.random.bits(key, (), "uint8") * scale + 0 * x.sum()

        def step(parts):
            key = jax.random.fold_in(jax.random.key(1), 2)
            return strategy.reduce("mean", strategy.run(replica, (parts, key, 2)))

        return step

    key = jax.random.fold_in(jax.random.key(1), 2)
    expected = int(jax.random.bits(key, (), "uint8")) * 2 % 256
    assert both(make) == [expected] * 2


def test_texts_run_in_turns():
    def program(strategy, rank):
        texts = strategy.experimental_distribute_values_from_function(
            lambda context: np.array(["a"] * (context.replica_id_in_sync_group + 1))
        )
        found = strategy.run(lambda text: jnp.float32(len(text)), (texts,))
        return float(strategy.reduce("sum", found))

    assert ranks(2, program, HERE) == [sum(range(1, ALL + 1))] * 2
