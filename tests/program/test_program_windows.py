"""Windows of a `LocalOptimizer`, against the same loop in optax; no daemons."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from window_rig import Servers, Worker, local_optimizer, variables_like

import zstrat as zs
from zstrat.errors import OutOfRangeError
from zstrat.wire import UpdateOp

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
RNG = np.random.default_rng(0)
MODEL = {
    "w": RNG.normal(size=(4, 5)).astype("f"),
    "b": np.zeros(5, np.float32),
    "v": RNG.normal(size=(5, 2)).astype("f"),
}


@pytest.fixture(autouse=True)
def dtypes_of_optax():
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def batches_of(workers, steps):
    x = RNG.normal(size=(workers, steps, 8, 4)).astype("f")
    y = RNG.normal(size=(workers, steps, 8, 2)).astype("f")
    return x, y


def training(values, inner, outer, workers, data, **options):
    """Workers with a window of the model above, and their iterators."""
    variables = variables_like(values)
    optimizer = local_optimizer(inner, outer, **options)

    def step(iterator):
        x, y = next(iterator)
        loss, grads = zs.value_and_grad(loss_of)(variables, x, y)
        optimizer.apply_gradients(grads, variables)
        return loss

    window, servers = optimizer.window(step), Servers(values, outer)
    x, y = data
    iterators = [
        zs.StepIterator(list(zip(x[m], y[m], strict=True))) for m in range(workers)
    ]
    there = [Worker(window, servers) for _ in range(workers)]
    return servers, list(zip(there, iterators, strict=True))


def of_ones(values, inner, outer=None, result=None, **options):
    """A window whose gradients are ones: a step moves each value by the rate. Returns
    the window, the servers, and a worker."""
    variables = variables_like(values)
    optimizer = local_optimizer(
        inner, optax.sgd(1.0) if outer is None else outer, **options
    )

    def step():
        before = {name: x.value() for name, x in variables.items()}
        ones = {name: 1.0 + 0.0 * x for name, x in before.items()}
        optimizer.apply_gradients(ones, variables)
        return None if result is None else result(before, variables)

    window, servers = optimizer.window(step), Servers(values, outer or optax.sgd(1.0))
    return window, servers, Worker(window, servers)


def close(found, wanted):
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-5)


def test_windows_of_several_workers_are_diloco():
    workers, every = 2, 5
    data = x, y = batches_of(workers, 4 * every)
    inner = optax.adam(0.02)
    servers, there = training(MODEL, inner, NESTEROV, workers, data, every=every)
    params = jax.tree.map(jnp.asarray, MODEL)
    states, state = [inner.init(params)] * workers, NESTEROV.init(params)
    gradients = jax.jit(jax.value_and_grad(loss_of))
    for first in range(0, 4 * every, every):
        deltas = []
        for m, (worker, iterator) in enumerate(there):
            copy, losses = params, []
            for n in range(first, first + every):
                loss, grads = gradients(copy, x[m, n], y[m, n])
                moved, states[m] = inner.update(grads, states[m], copy)
                copy = optax.apply_updates(copy, moved)
                losses.append(loss)
            np.testing.assert_allclose(worker.run(iterator), losses, rtol=1e-4)
            deltas.append(jax.tree.map(jnp.subtract, params, copy))
        servers.close()
        mean = jax.tree.map(lambda *each: sum(each) / workers, *deltas)
        moved, state = NESTEROV.update(mean, state, params)
        params = optax.apply_updates(params, moved)
        close(servers.now(), params)


def test_a_global_norm_of_the_inner_optimizer_is_that_of_the_worker():
    """Also with fragments: a step moves all of the worker's copy."""
    inner = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.5))
    data = x, y = batches_of(1, 6)
    servers, ((worker, iterator),) = training(
        MODEL, inner, optax.sgd(1.0), 1, data, every=6, fragments=3
    )
    params = jax.tree.map(jnp.asarray, MODEL)
    state, wanted = inner.init(params), {}
    for n in range(6):
        grads = jax.grad(loss_of)(params, x[0, n], y[0, n])
        moved, state = inner.update(grads, state, params)
        params = optax.apply_updates(params, moved)
        if n % 2:  # the largest fragment first
            wanted |= {name: params[name] for name in [("w", "v", "b")[n // 2]]}
            worker.run(iterator)
            servers.close()
    close(servers.now(), wanted)


def test_one_worker_and_a_plain_exchange_are_training_without_an_exchange():
    """To the last bit: Δ is exact where a step moves a value by less than a half."""
    rng = np.random.default_rng(3)
    values = {
        name: (1.0 + rng.random(x.shape)).astype("f") for name, x in MODEL.items()
    }
    inner, data = optax.adam(1e-3), batches_of(1, 20)
    servers, ((worker, iterator),) = training(
        values, inner, optax.sgd(1.0), 1, data, every=5
    )
    variables = {name: zs.Variable(x) for name, x in values.items()}
    optimizer = zs.Optimizer(inner)

    @zs.function
    def step(x, y):
        _, grads = zs.value_and_grad(loss_of)(variables, x, y)
        optimizer.apply_gradients(grads, variables)

    for x, y in zip(data[0][0], data[1][0], strict=True):
        step(x, y)
    for _ in range(4):
        worker.run(iterator)
        servers.close()
    for name, value in servers.now().items():
        np.testing.assert_array_equal(value, variables[name].numpy())


def test_windows_of_one_step_are_synchronous_rounds():
    workers = 3
    data = x, y = batches_of(workers, 2)
    rate, outer = optax.sgd(0.5), optax.sgd(1.0)
    servers, there = training(MODEL, rate, outer, workers, data, every=1)
    params = jax.tree.map(jnp.asarray, MODEL)
    for n in range(2):
        for worker, iterator in there:
            worker.run(iterator)
        servers.close()
        found = [jax.grad(loss_of)(params, x[m, n], y[m, n]) for m in range(workers)]
        params = jax.tree.map(lambda p, *g: p - 0.5 * sum(g) / workers, params, *found)
        close(servers.now(), params)


def streamed(data, inner, workers, every, fragments, overlap, mix, rounds):
    """The same loop in optax: returns the values after each exchange."""
    x, y = data
    names = [["w"], ["v"], ["b"]] if fragments == 3 else [list(MODEL)]
    params = jax.tree.map(jnp.asarray, MODEL)
    copies = [dict(params) for _ in range(workers)]
    bases = [dict(params) for _ in range(workers)]
    states = [inner.init(params)] * workers
    outer = {name: NESTEROV.init(value) for name, value in params.items()}
    gradients = jax.jit(jax.grad(loss_of))
    waiting, after, step = {}, [], 0

    def merge(now):
        for name in waiting.pop(now, ()):
            for copy, base in zip(copies, bases, strict=True):
                copy[name] = mix * copy[name] + (1 - mix) * params[name]
                base[name] = params[name]

    while len(after) < rounds:
        merge(step)
        for m in range(workers):
            grads = gradients(copies[m], x[m, step], y[m, step])
            moved, states[m] = inner.update(grads, states[m], copies[m])
            copies[m] = optax.apply_updates(copies[m], moved)
        step += 1
        turn, number = divmod(len(after), fragments)
        if step == turn * every + (number + 1) * every // fragments:
            merge(step)
            for name in names[number]:
                deltas = [b[name] - c[name] for b, c in zip(bases, copies, strict=True)]
                moved, outer[name] = NESTEROV.update(
                    sum(deltas) / workers, outer[name], params[name]
                )
                params[name] = optax.apply_updates(params[name], moved)
            waiting[step + overlap] = names[number]
            after.append(dict(params))
    return after


@pytest.mark.parametrize(
    ("every", "fragments", "overlap", "mix"),
    [
        (5, 3, 1, 0.5),
        pytest.param(5, 3, 0, 0.0, marks=pytest.mark.thorough),
        pytest.param(5, 3, 0, 0.5, marks=pytest.mark.thorough),
        pytest.param(5, 3, 1, 0.0, marks=pytest.mark.thorough),
        pytest.param(9, 3, 2, 0.0, marks=pytest.mark.thorough),
        pytest.param(9, 3, 2, 0.5, marks=pytest.mark.thorough),
        pytest.param(5, 1, 2, 0.0, marks=pytest.mark.thorough),
        pytest.param(5, 1, 2, 0.5, marks=pytest.mark.thorough),
    ],
)
def test_fragments_with_overlap_are_streaming_diloco(every, fragments, overlap, mix):
    workers, rounds, inner = 4, 20, optax.adam(0.02)
    data = batches_of(workers, rounds * every // fragments + every)
    servers, there = training(
        MODEL,
        inner,
        NESTEROV,
        workers,
        data,
        every=every,
        fragments=fragments,
        overlap=overlap,
        mix=mix,
    )
    wanted = streamed(data, inner, workers, every, fragments, overlap, mix, rounds)
    for params in wanted:
        for worker, iterator in there:
            worker.run(iterator)
        servers.close()
        close(servers.now(), params)
    assert there[0][0].began == (overlap > 0)
    # A window reads the fragment that it merges, and no other.
    assert there[0][0].pulled == len(MODEL) // fragments


def test_a_window_that_runs_again_begins_where_it_began_before():
    data = batches_of(1, 20)
    ends = []
    for fails in (False, True):
        servers, ((worker, iterator),) = training(
            MODEL, optax.adam(0.02), NESTEROV, 1, data, every=5
        )
        worker.run(iterator)
        servers.close()
        if fails:
            lost = zs.StepIterator(
                list(zip(data[0][0][5:], data[1][0][5:], strict=True))
            )
            worker.run(lost, step=7, settle=False)
            servers.waiting.clear()
        worker.run(iterator, step=7)
        servers.close()
        worker.run(iterator)
        servers.close()
        ends.append(servers.now())
    for name, value in ends[0].items():
        np.testing.assert_array_equal(value, ends[1][name])


def test_no_step_counts_twice_after_a_window_that_failed():
    """A step moves each value by -1, and so does its contribution."""
    values = {name: np.zeros(1, np.float32) for name in "abc"}
    _, servers, worker = of_ones(values, optax.sgd(1.0), every=3, fragments=3)
    worker.run()
    servers.close()
    worker.run(step=9, settle=False)
    servers.waiting.clear()
    worker.residents.settle(9, failed=True)
    for steps in range(2, 9):
        worker.run()
        servers.close()
        assert min(x.item() for x in servers.now().values()) >= -steps


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_schedule_counts_the_steps_of_the_run_and_not_those_of_a_worker(fragments):
    rates = optax.sgd(lambda count: 0.1 + jnp.asarray(count, jnp.float32))
    values = {name: np.ones(2, np.float32) for name in ("a", "b", "c")}
    # A gradient of one moves by the rate: what is left are the rates.
    _, servers, worker = of_ones(
        values,
        rates,
        optax.sgd(0.0),
        lambda before, now: (before["a"] - now["a"].value())[0],
        every=6,
        fragments=fragments,
    )
    servers.round = 4
    count = 6 // fragments
    first = 4 * count
    for _ in range(2):
        wanted = 0.1 + np.arange(first, first + count)
        np.testing.assert_allclose(worker.run(), wanted, rtol=1e-4)
        servers.close()
        first += count


def test_each_segment_is_a_program_and_no_retrace_to_warn_of():
    values = {name: np.zeros(1, np.float32) for name in "abcde"}
    window, servers, worker = of_ones(values, optax.sgd(1.0), every=5, fragments=5)
    for _ in range(11):
        worker.run()
        servers.close()
    assert window.trace_count == 6  # the first segment also takes all values
    # Each was exchanged after 1 to 5 steps, and again after 5 more; the first, thrice.
    assert sorted(x.item() for x in servers.now().values()) == [-11, -10, -9, -8, -7]


@pytest.mark.parametrize("options", [{}, {"overlap": 1}])
def test_a_slow_worker_makes_fewer_steps_while_there_is_a_fast_one(options):
    values = {"w": np.zeros(2, np.float32)}
    window, servers, fast = of_ones(
        values,
        optax.sgd(1.0),
        optax.sgd(0.0),
        lambda _, now: now["w"].value()[0],
        every=6,
        adapt=True,
        **options,
    )
    slow = Worker(window, servers)
    fast.speed, slow.speed = 100.0, 26.0
    lengths = []
    for _ in range(4):
        lengths.append([len(fast.run()), len(slow.run())])
        servers.close()
    # The speed of a window is known in the next one, which says how long its next is.
    fewer = 1 + options.get("overlap", 0)
    assert lengths == [[6, 6], [6, 6], [6, fewer], [6, fewer]]
    # The steps after the copy has taken what the servers have, each by -1.
    np.testing.assert_array_equal(slow.sent[0].arrays[0], [1.0, 1.0])
    servers.round += 24  # the fast one is gone
    for _ in range(2):
        slow.run()
        servers.close()
    assert len(slow.run()) == 6


def test_a_worker_that_joins_contributes_when_its_fragment_is_due():
    data = batches_of(2, 30)
    servers, there = training(
        MODEL, optax.sgd(0.1), optax.sgd(1.0), 2, data, every=3, fragments=3
    )
    (first, mine), (joins, other) = there
    first.run(mine)
    servers.close()
    first.run(mine)
    joins.run(other)  # its fragment would be the first, and the second is exchanged
    assert [len(each) for each in servers.waiting] == [1, 0]
    servers.close()
    for _ in range(3):
        first.run(mine)
        joins.run(other)
        keys = [set(each) for each in servers.waiting]
        assert keys[0] == keys[1]
        assert keys[0]
        servers.close()


def test_a_late_worker_takes_all_fragments_before_it_goes_on():
    data = batches_of(1, 30)
    servers, ((worker, iterator),) = training(
        MODEL, optax.sgd(0.1), optax.sgd(1.0), 1, data, every=3, fragments=3
    )
    worker.run(iterator)
    servers.close()
    servers.round += 4  # rounds of others
    worker.run(iterator)
    assert servers.waiting == [{}]
    servers.close()
    worker.run(iterator)
    assert worker.pulled == len(MODEL)
    assert servers.waiting[0]


def test_a_table_contributes_the_rows_that_the_window_has_touched():
    values = {"table": np.ones((50, 2), np.float32)}
    table = variables_like(values)["table"]
    optimizer = local_optimizer(optax.sgd(0.5), optax.sgd(1.0), every=3)

    def step(iterator):
        ids = next(iterator)

        def loss(table):
            return jnp.sum(zs.embedding_lookup(table, ids) ** 2) / 2

        loss, grads = zs.value_and_grad(loss)(table)
        optimizer.apply_gradients(grads, table)
        return loss

    servers = Servers(values, optax.sgd(1.0))
    worker = Worker(optimizer.window(step), servers)
    ids = np.array([[3, 7], [7, 7], [3, 49]], np.int32)
    worker.run(zs.StepIterator(list(ids)))
    assert (worker.whole, worker.rows) == ([], [("table", [3, 7, 49])])
    (sent,) = worker.sent
    assert sent.op is UpdateOp.OPTIMIZE_ROWS
    wanted = np.ones((50, 2), np.float32)
    for step_ids in ids:
        np.subtract.at(wanted, step_ids, 0.5 * wanted[step_ids])
    np.testing.assert_array_equal(sent.arrays[0], [3, 7, 49])
    np.testing.assert_allclose(sent.arrays[1], 1.0 - wanted[[3, 7, 49]])


IDS = np.array([[3, 7], [7, 7], [3, 49], [0, 7], [1, 1], [49, 2]], np.int32)


def table_windows(look_up, inner, ids=IDS, more=None):
    """Runs two windows of three steps; returns the worker and the table after them."""
    values = {"table": np.arange(100, dtype=np.float32).reshape(50, 2) / 7}
    values["first"] = np.zeros((), np.float32)
    variables = variables_like(values)
    table = variables["table"]
    optimizer = local_optimizer(inner, optax.sgd(1.0), every=3)

    def step(iterator):
        ids = next(iterator)
        grads = zs.grad(look_up)(variables, ids)
        optimizer.apply_gradients(grads if more is None else more(grads), variables)
        return zs.embedding_lookup(table, ids)

    servers = Servers(values, optax.sgd(1.0))
    worker = Worker(optimizer.window(step), servers)
    iterator, made = zs.StepIterator(list(ids)), []
    for _ in range(2):
        made.append(worker.run(iterator))
        servers.close()
    return worker, servers.now()["table"], np.concatenate(made)


def looks_up(variables, ids):
    rows = zs.embedding_lookup(variables["table"], ids)
    return jnp.sum(rows**2) / 2 + 0 * variables["first"]


def reads_whole(variables, ids):
    return looks_up(variables, ids) + jnp.sum(variables["table"]) * 0


def ids_of_a_variable(variables, ids):
    return looks_up(variables, ids + variables["first"].astype(int))


def other_rows(grads):
    table = grads["table"]
    indices = (table.indices + 1) % 50
    return {**grads, "table": zs.IndexedSlices(table.values, indices, (50, 2))}


def remembers_values():
    """Scales nothing, and begins with the values of the variables."""

    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda x, u: x + 0 * u, state, updates)

    return optax.GradientTransformation(lambda params: params, update)


ADAM = optax.chain(optax.clip_by_global_norm(0.9), optax.adam(0.1))


def test_rows_that_are_pulled_alone_train_as_a_table_that_is_pulled_whole():
    worker, table, rows = table_windows(looks_up, ADAM)
    assert worker.rows == [("table", [0, 1, 2, 7, 49])]
    assert worker.whole == ["first"]
    worker, found, rows_found = table_windows(ids_of_a_variable, ADAM)
    assert (worker.rows, sorted(worker.whole)) == ([], ["first", "table"])
    np.testing.assert_allclose(found, table, rtol=1e-6)
    np.testing.assert_allclose(rows_found, rows, rtol=1e-6)


@pytest.mark.parametrize(
    ("step", "inner", "more"),
    [
        (reads_whole, ADAM, None),
        (looks_up, ADAM, other_rows),
        (looks_up, optax.chain(remembers_values(), optax.sgd(0.1)), None),
    ],
)
def test_a_table_is_pulled_whole_if_rows_are_not_all_that_a_window_needs(
    step, inner, more
):
    worker, _, _ = table_windows(step, inner, more=more)
    assert (worker.rows, sorted(worker.whole)) == ([], ["first", "table"])


def test_a_row_outside_of_its_table_is_an_error_at_the_line_that_looks_it_up():
    with pytest.raises(IndexError, match=r"test_program_windows.py:\d+.*row 50"):
        table_windows(looks_up, ADAM, ids=np.array([[3, 7], [7, 50], [1, 2]]))


def counting(every, step_of, **options):
    """A window that trains one variable, and a worker for it."""
    values = {"w": np.ones(2, np.float32), "scale": np.full((), 2.0, np.float32)}
    variables = variables_like(values)
    optimizer = local_optimizer(optax.sgd(1.0), optax.sgd(1.0), every=every, **options)
    step = step_of(variables["w"], variables["scale"], optimizer)
    servers = Servers(values, optax.sgd(1.0))
    return Worker(optimizer.window(step), servers), servers


def test_a_step_may_return_a_pytree_and_read_what_it_does_not_train():
    def step_of(w, scale, optimizer):
        @zs.function
        def step(iterator, more):
            x = next(iterator) * scale.value()

            def loss(w):
                return jnp.sum(w * x), {"x": x, "more": more}

            (value, aux), grads = zs.value_and_grad(loss, has_aux=True)(w)
            optimizer.apply_gradients([(grads, w)])
            return {"aux": aux, "loss": value, "name": "text", "after": w.value()}

        return step

    worker, servers = counting(2, step_of)
    made = worker.run(zs.StepIterator([np.float32(1), np.float32(3)]), np.float32(5))
    assert made["name"] == "text"
    assert made["aux"]["x"].tolist() == [2.0, 6.0]
    assert made["aux"]["more"].tolist() == [5.0, 5.0]
    assert made["loss"].tolist() == [4.0, -12.0]
    assert made["after"].tolist() == [[-1.0, -1.0], [-7.0, -7.0]]
    servers.close()
    assert servers.now()["w"].tolist() == [-7.0, -7.0]
    assert servers.now()["scale"] == 2.0


def test_a_random_key_is_another_one_in_each_step():
    def step_of(w, scale, optimizer):
        def step(key):
            drawn = jax.random.normal(key, ())
            optimizer.apply_gradients(0.0 * w.value(), w)
            return drawn

        return step

    worker, _ = counting(4, step_of)
    key = jax.random.key(3)
    drawn = [jax.random.normal(jax.random.fold_in(key, n), ()) for n in range(4)]
    np.testing.assert_array_equal(worker.run(key), drawn)


def test_elements_of_other_shapes_are_steps_one_by_one():
    def step_of(w, scale, optimizer):
        def step(iterator):
            total = jnp.sum(next(iterator))
            optimizer.apply_gradients(total + 0.0 * w.value(), w)
            return total

        return step

    worker, servers = counting(3, step_of)
    elements = [np.ones(n, np.float32) for n in (4, 4, 1)]
    with pytest.warns(UserWarning, match="one by one"):
        totals = worker.run(zs.StepIterator(elements))
    assert totals.tolist() == [4.0, 4.0, 1.0]
    servers.close()
    assert servers.now()["w"].tolist() == [-8.0, -8.0]


def draws_one(w, scale, optimizer):
    def step(iterator):
        optimizer.apply_gradients(next(iterator) + 0.0 * w.value(), w)

    return step


def test_a_window_that_gets_too_few_elements_draws_none():
    worker, _ = counting(3, draws_one)
    iterator = zs.StepIterator([np.float32(n) for n in range(5)])
    worker.run(iterator)
    with pytest.raises(OutOfRangeError):
        worker.run(iterator)
    assert [x.item() for x in iterator] == [3, 4]


def test_a_window_of_too_many_elements_says_so():
    worker, _ = counting(1025, draws_one)
    iterator = zs.StepIterator([np.float32(n) for n in range(2)])
    with pytest.raises(ValueError, match="every="):
        worker.run(iterator)
    assert len(list(iterator)) == 2


def applies_another(w, scale, optimizer):
    other = local_optimizer(optax.sgd(1.0), optax.sgd(1.0), every=1).outer
    return lambda: other.apply_gradients(w.value(), w)


def updates_in_a_loop(w, scale, optimizer):
    def one(carry, _):
        optimizer.apply_gradients(w.value(), w)
        return carry, None

    return lambda: jax.lax.scan(one, 0, None, 2)[0]


def applies(w, scale, optimizer):
    return lambda: optimizer.apply_gradients(w.value(), w)


def applies_and(more):
    """A step that does something more, which is refused."""

    def step_of(w, scale, optimizer):
        applied = applies(w, scale, optimizer)
        return lambda: [applied(), more(w, scale, optimizer)][2:]

    return step_of


@pytest.mark.parametrize(
    ("step_of", "kind", "remedy", "options"),
    [
        (
            applies_and(lambda w, scale, optimizer: scale.assign(1.0)),
            RuntimeError,
            "outside of the window",
            {},
        ),
        (
            applies_and(
                lambda w, _, optimizer: optimizer.apply_gradients(w.value(), w)
            ),
            RuntimeError,
            "one call",
            {},
        ),
        (applies_another, RuntimeError, "the zs.LocalOptimizer that made it", {}),
        (
            lambda w, _, optimizer: (
                lambda: optimizer.apply_gradients(w.value(), w, value=1.0)
            ),
            ValueError,
            "leave them out",
            {},
        ),
        (lambda w, *_: lambda: w.value(), RuntimeError, "call apply_gradients", {}),
        (updates_in_a_loop, RuntimeError, "", {}),
        (applies, ValueError, "1 fragments at most", {"fragments": 2}),
    ],
)
def test_what_a_step_in_a_window_may_not_do(step_of, kind, remedy, options):
    worker, _ = counting(2, step_of, **options)
    with pytest.raises(kind) as caught:
        worker.run()
    assert remedy in str(caught.value)
    if "trains nothing" not in str(caught.value):
        assert "test_program_windows.py:" in str(caught.value)


@pytest.mark.parametrize("fragments", [1, 2])
def test_an_outer_global_norm_is_of_one_fragment_only(fragments):
    values = {"w": np.ones(2, np.float32), "v": np.ones(2, np.float32)}
    outer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    _, _, worker = of_ones(
        values, optax.sgd(1.0), outer, every=2, fragments=fragments, mix=0.5
    )
    if fragments == 1:
        worker.run()
        assert UpdateOp.OPERANDS in [update.op for update in worker.sent]
    else:
        with pytest.raises(ValueError, match="fragments=1"):
            worker.run()


@pytest.mark.parametrize(
    "given",
    [
        {"every": 0},
        {"every": 1.5},
        {"every": 4, "fragments": 5},
        {"every": 4, "fragments": 2, "overlap": 2},
        {"every": 4, "overlap": -1},
        {"every": 4, "mix": 1.0},
        {"every": 4, "fragments": 2, "rounds": zs.Rounds(late="next")},
    ],
)
def test_numbers_out_of_range(given):
    with pytest.raises(ValueError, match=f"{[*given][-1]}="):
        local_optimizer(optax.sgd(1.0), optax.sgd(1.0), **given)


@pytest.mark.parametrize("fragments", [1, 2])
def test_what_is_late_is_of_another_fragment_than_the_round_that_is_open(fragments):
    optimizer = local_optimizer(
        optax.sgd(1.0),
        optax.sgd(1.0),
        every=2,
        fragments=fragments,
        rounds=zs.Rounds(workers=2, merge="sum"),
    )
    rounds = optimizer.outer.rounds
    assert (rounds.workers, rounds.merge) == (2, "sum")
    assert rounds.drops_late == (fragments > 1)


def test_windows_need_parameter_servers_and_a_coordinator():
    with pytest.raises(ValueError, match="ParameterServerStrategy"):
        zs.LocalOptimizer(optax.sgd(1.0), optax.sgd(1.0), every=2)
    optimizer = local_optimizer(optax.sgd(1.0), optax.sgd(1.0), every=2)
    w = variables_like({"w": np.ones(2, np.float32)})["w"]
    with pytest.raises(RuntimeError, match="window"):
        optimizer.apply_gradients(np.ones(2, np.float32), w)
    with pytest.raises(TypeError, match="eager"):
        optimizer.window(zs.function(lambda: None, eager=True))
    with pytest.raises(TypeError, match="None"):
        optimizer.window(None)
    with pytest.raises(TypeError, match="/inner"):
        local_optimizer(0.1, optax.sgd(1.0), every=2)
    window = optimizer.window(lambda: optimizer.apply_gradients(w.value(), w))

    with pytest.raises(RuntimeError, match="closure by itself"):
        optimizer.window(window).plan()
