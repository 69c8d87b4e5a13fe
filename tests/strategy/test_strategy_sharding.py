"""Variables in parts, created in a strategy's scope: names, sizes, places, values."""

import copy
import functools
import logging
import pickle
import tracemalloc

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zstrat.variables as zv
from zstrat import initializers
from zstrat.program import load
from zstrat.strategy.server import (
    PlacementRule,
    VariablePlacement,
    _variable_placement,
    draft,
)
from zstrat.variables import partitioners
from zstrat.wire import UpdateOp


def in_parts(count):
    return partitioners.FixedShardsPartitioner(count)


def requested(value):
    return zv.VariableRequest(
        value,
        None,
        None,
        "w",
        True,
        zv.VariableAggregation.NONE,
        zv.VariableSynchronization.AUTO,
    )


def places(*variables):
    return [part.spec.ps for variable in variables for part in variable.components]


@pytest.mark.shows("ShardedVariable.variables")
def test_parts_have_the_names_and_sizes_of_the_reference(make_cluster):
    strategy = make_cluster(ps=3, variable_partitioner=in_parts(4)).strategy
    with strategy.scope():
        w = zv.Variable(np.arange(20.0).reshape(10, 2), name="w", dtype="float32")
    assert isinstance(w, zv.ShardedVariable)
    assert (w.name, w.shape, w.dtype) == ("w", (10, 2), np.float32)
    assert [part.name for part in w.variables] == [f"w/part_{n}" for n in range(4)]
    assert [part.shape for part in w] == [(3, 2), (3, 2), (2, 2), (2, 2)]
    assert places(w) == [0, 1, 2, 0]
    assert [part.spec.part for part in w] == [
        zv.ComponentRows("w", n, 4, offset, 10) for n, offset in enumerate([0, 3, 6, 8])
    ]
    np.testing.assert_array_equal(w.numpy(), np.arange(20).reshape(10, 2))
    np.testing.assert_array_equal(w.variables[2], [[12, 13], [14, 15]])


@given(rows=st.integers(1, 200), parts=st.integers(1, 30))
def test_the_first_parts_are_one_row_longer(rows, parts):
    plan = draft(requested(np.arange(rows)), in_parts(parts))
    lengths = [plan.shape_of(number)[0] for number in range(plan.parts)]
    expected = [len(part) for part in np.array_split(np.arange(rows), min(rows, parts))]
    assert lengths == expected


def test_parts_take_their_turn_from_the_running_counter(make_cluster):
    def partitioner(shape, dtype):
        return [2 if shape[0] > 3 else 1]

    strategy = make_cluster(ps=3, variable_partitioner=partitioner).strategy
    with strategy.scope():
        made = [zv.Variable(np.zeros(n, np.float32)) for n in (2, 4, 2, 4, 3)]
    assert places(*made) == [0, 1, 2, 0, 1, 2, 0]


def test_what_stays_whole(make_cluster):
    calls = []

    def partitioner(shape, dtype):
        calls.append(shape)
        return [5] + [1] * (len(shape) - 1)

    strategy = make_cluster(ps=2, variable_partitioner=partitioner).strategy
    with strategy.scope():
        scalar = zv.Variable(1.0, name="scalar")
        empty = zv.Variable(np.zeros((0, 3), np.float32), name="empty")
        single = zv.Variable(np.zeros((1, 3), np.float32), name="single")
        with strategy.extended.colocate_vars_with(scalar):
            beside = zv.Variable(np.zeros(9, np.float32), name="beside")
        after = zv.Variable(2.0)
    assert strategy.variable_partitioner is partitioner
    assert [type(v) for v in (scalar, empty, beside)] == [zv.Variable] * 3
    assert calls == [(0, 3), (1, 3)]
    # TF joins even a single part, if several were asked for.
    assert [part.name for part in single] == ["single/part_0"]
    assert places(scalar, empty, single, beside, after) == [0, 1, 0, 0, 1]


def test_colocation_is_with_a_component(make_cluster):
    strategy = make_cluster(ps=3, variable_partitioner=in_parts(2)).strategy
    with strategy.scope():
        w = zv.Variable(np.zeros(4, np.float32), name="w")
        with pytest.raises(ValueError, match=r"'w'.*\[0\]"):
            strategy.extended.colocate_vars_with(w)
        with strategy.extended.colocate_vars_with(w.variables[1]):
            beside = zv.Variable(np.zeros(4, np.float32))
        after = zv.Variable(np.zeros(4, np.float32))
    assert places(beside) == [1]
    assert places(after) == [2, 0]
    assert strategy.extended.variable_created_in_scope(w)
    assert not strategy.extended.variable_created_in_scope(
        zv.ShardedVariable([zv.Variable([1.0])])
    )


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 5))
def test_by_bytes_the_next_goes_where_there_are_fewest(sizes, ps_count):
    placement = VariablePlacement(ps_count, PlacementRule.BYTES)
    held = [0] * ps_count
    for size, ps in zip(sizes, placement.place(sizes), strict=True):
        assert held[ps] == min(held)
        assert ps == held.index(min(held)), "the lowest of several"
        held[ps] += size


def test_placement_by_bytes(make_cluster):
    strategy = make_cluster(ps=2, placement="bytes").strategy
    with strategy.scope():
        small = zv.Variable(np.zeros(4, np.float32))
        large = zv.Variable(np.zeros(100, np.float32))
        more = [zv.Variable(np.zeros(4, np.float32)) for _ in range(3)]
        assert places(small, large, *more) == [0, 1, 0, 0, 0]
        strategy.delete_variables(large)
        assert places(zv.Variable(0.0)) == [1], "what was deleted makes room"


def test_a_hundred_gigabytes_are_never_here(make_cluster):
    fake = make_cluster(ps=4, variable_partitioner=in_parts(8))
    sent = []

    async def told(entries, code):
        sent.append((entries, code))

    fake.session.initialize_variables = told
    tracemalloc.start()
    try:
        with fake.strategy.scope():
            table = zv.Variable(
                initializers.normal(0.01, seed=7),
                shape=(400_000_000, 64),
                dtype="float32",
                name="table",
            )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert table.dtype.itemsize * table.size == 102_400_000_000
    assert peak < 1_000_000
    ((entries, code),) = sent
    assert len(code) < 1000
    assert [spec.ps for spec, _ in entries] == [0, 1, 2, 3] * 2
    spec, last = entries[7]
    assert last.name == spec.name == "table/part_7"
    assert last.sharded
    assert last.shape == [50_000_000, 64]
    assert last.whole == [400_000_000, 64]
    assert last.offset == [350_000_000, 0]
    assert "create" not in fake.session.requests


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_one_seed_is_one_array_however_it_is_cut(make_cluster, parts):
    make = initializers.uniform(seed=3)
    fake = make_cluster(ps=2, variable_partitioner=in_parts(parts))
    with fake.strategy.scope():
        large = zv.Variable(make, shape=(100, 3000), dtype="float32")
        small = zv.Variable(make, shape=(10, 3000), dtype="float32")
    assert fake.session.requests == ["initialize", "create"]
    np.testing.assert_array_equal(large.numpy(), make((100, 3000), "float32"))
    np.testing.assert_array_equal(small.numpy(), make((10, 3000), "float32"))


def test_a_function_that_makes_parts_makes_them_there(make_cluster):
    calls = []

    def rows(shape, dtype, partition_shape=None, partition_offset=None):
        calls.append((shape, dtype, partition_shape, partition_offset))
        start = partition_offset[0]
        column = np.arange(start, start + partition_shape[0], dtype=dtype)
        return np.broadcast_to(column[:, None], partition_shape)

    fake = make_cluster(variable_partitioner=in_parts(2))
    fake.session.initialize_variables = functools.partial(here, fake.session, rows)
    with fake.strategy.scope():
        w = zv.Variable(rows, shape=(5, 2), dtype="int32")
    np.testing.assert_array_equal(w.numpy(), np.repeat(np.arange(5)[:, None], 2, 1))
    assert calls == [
        ((5, 2), np.int32, (3, 2), (0, 0)),
        ((5, 2), np.int32, (2, 2), (3, 0)),
    ]


async def here(session, function, entries, code):
    """Initializes with the function of this process, so that calls are seen."""
    shipped = load(code)
    made = initializers.Sliced(function, shipped.takes_shape, shipped.names_parts)
    for spec, entry in entries:
        session.values[spec.key] = made(
            entry.whole,
            entry.dtype,
            partition_shape=entry.shape,
            partition_offset=entry.offset,
        )


def whole_or_part(**options):
    """As a Keras initializer that is bound to its shape."""
    if options:
        raise ValueError("Keyword argument 'partition_shape' not understood")
    return np.arange(12, dtype=np.float32).reshape(6, 2)


def full_size(partition_shape=None, partition_offset=None):
    return np.arange(12, dtype=np.float32).reshape(6, 2)


@pytest.mark.parametrize(
    ("function", "is_shipped"),
    [
        (whole_or_part, True),
        (full_size, True),
        (lambda: np.arange(12, dtype=np.float32).reshape(6, 2), False),
        (lambda shape, dtype: np.arange(12, dtype=dtype).reshape(shape), False),
        (np.arange(12, dtype=np.float32).reshape(6, 2), False),
    ],
    ids=["keywords refused", "whole for a part", "plain", "of a shape", "array"],
)
def test_what_makes_only_the_whole_is_cut(make_cluster, function, is_shipped):
    fake = make_cluster(variable_partitioner=in_parts(4))
    with fake.strategy.scope():
        w = zv.Variable(function, shape=(6, 2), dtype="float32")
    assert fake.session.requests == ["initialize" if is_shipped else "create"]
    assert [part.shape[0] for part in w] == [2, 2, 1, 1]
    np.testing.assert_array_equal(w.numpy(), np.arange(12).reshape(6, 2))


def test_without_shape_or_dtype_a_function_is_called_here_once(make_cluster):
    calls = []

    def function(partition_shape=None, partition_offset=None):
        calls.append((partition_shape, partition_offset))
        return np.zeros((4, 1), np.float32)

    fake = make_cluster(variable_partitioner=in_parts(2))
    with fake.strategy.scope():
        zv.Variable(function, shape=(4, 1))
        w = zv.Variable(function, dtype="float32")
    assert calls == [(None, None)] * 2
    assert fake.session.requests == ["create", "create"]
    assert len(w.variables) == 2


def test_a_bound_initializer_runs_there_too(make_cluster):
    bound = functools.partial(initializers.normal(seed=1), (6, 2), "float32")
    fake = make_cluster(variable_partitioner=in_parts(3))
    with fake.strategy.scope():
        w = zv.Variable(bound, shape=(6, 2), dtype="float32")
    assert fake.session.requests == ["initialize"]
    np.testing.assert_array_equal(w.numpy(), bound())


def test_a_large_value_that_is_made_here_is_warned_about(make_cluster, caplog):
    request = requested(None)
    huge = np.broadcast_to(np.zeros((), np.int8), (10**9 + 1,))
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_variable_placement, "initial", lambda request: huge)
        made = draft(request, in_parts(2))
        assert made.parts == 2
        patch.setattr(_variable_placement, "initial", lambda request: huge[:-1])
        draft(request, in_parts(2))
    (record,) = caplog.records
    assert "'w' of 1000000001 elements is made whole" in record.message


def test_several_variables_are_made_in_few_requests(make_cluster):
    fake = make_cluster(variable_partitioner=in_parts(2))
    with fake.strategy.scope():
        tree = {"a": np.zeros(4), "b": np.ones((3, 2)), "c": 1.0}
        made = zv.create_variables(tree, dtype="float32")
    assert fake.session.requests == ["create"]
    assert isinstance(made["a"], zv.ShardedVariable)
    assert [part.name for part in made["b"]] == ["b/part_0", "b/part_1"]
    assert isinstance(made["c"], zv.Variable)
    read = zv.values(made)
    np.testing.assert_array_equal(read["b"], np.ones((3, 2)))
    fake.strategy.delete_variables(made)
    assert not fake.session.values


def sharded(fake, rows=10, name="w"):
    value = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
    with fake.strategy.scope():
        return zv.Variable(value, name=name), value


def test_reads_and_updates_are_one_request(make_cluster):
    fake = make_cluster(variable_partitioner=in_parts(4))
    w, value = sharded(fake)
    fake.session.requests.clear()
    np.testing.assert_array_equal(w.sparse_read([9, 0, 9, 3]), value[[9, 0, 9, 3]])
    w.assign_add(np.ones_like(value))
    w.scatter_update(zv.IndexedSlices(np.zeros((2, 2)), [0, 9]))
    value = value + 1
    value[[0, 9]] = 0
    np.testing.assert_array_equal(w.numpy(), value)
    np.testing.assert_array_equal(w[-1:], value[-1:])
    assert fake.session.requests == [
        "read_rows",
        "update_many",
        "update_many",
        "read",
        "read_rows",
    ]


async def test_the_twins_are_one_request_too(make_cluster):
    fake = make_cluster(variable_partitioner=in_parts(3))
    w, value = sharded(fake)
    fake.session.requests.clear()
    np.testing.assert_array_equal(await w.read_value_async(), value)
    np.testing.assert_array_equal(await w.sparse_read_async([7]), value[[7]])
    assert await w.assign_sub_async(value) is w
    slices = zv.IndexedSlices(np.ones((1, 2)), [5])
    await w.scatter_async(UpdateOp.SCATTER_ADD, slices)
    assert fake.session.requests == ["read", "read_rows", "update_many", "update"]
    assert w.numpy().sum() == 2


def test_gradients_outside_of_a_step_are_one_request(make_cluster):
    fake = make_cluster(variable_partitioner=in_parts(2))
    w, value = sharded(fake)
    with fake.strategy.scope():
        b = zv.Variable(np.zeros(3, np.float32), name="b")
        optimizer = zv.Optimizer(optax.sgd(1.0), count_iterations=True)
    fake.session.requests.clear()
    rows = zv.IndexedSlices(jnp.ones((3, 2)), jnp.array([8, 1, 8]))
    optimizer.apply_gradients([(rows, w), (np.ones(3, np.float32), b)])
    assert fake.session.requests == ["update_many"]
    value[1] -= 1
    value[8] -= 2
    np.testing.assert_array_equal(w.numpy(), value)
    np.testing.assert_array_equal(b.numpy(), -np.ones(3))
    assert optimizer.iterations.numpy() == 1


def test_a_local_optimizer_does_not_move_what_is_on_servers(make_cluster):
    fake = make_cluster(variable_partitioner=in_parts(2))
    w, value = sharded(fake)
    with pytest.raises(ValueError, match=r"'w/part_0'.*strategy\.scope"):
        zv.Optimizer(optax.sgd(0.1)).apply_gradients(value, w)


def test_a_copy_has_the_same_parts(make_cluster):
    fake = make_cluster(ps=3, variable_partitioner=in_parts(2))
    w, value = sharded(fake)
    with fake.strategy.scope():
        twin = copy.deepcopy(w)
    w.assign(np.zeros_like(value))
    np.testing.assert_array_equal(twin.numpy(), value)
    assert [part.name for part in twin] == ["w/part_0", "w/part_1"]
    assert places(twin) == [2, 0]
    other = copy.deepcopy(w)  # outside of the scope
    assert places(other) == [1, 2]
    np.testing.assert_array_equal(other.numpy(), np.zeros_like(value))
    with fake.strategy.scope():
        part = copy.deepcopy(w.variables[0])
    assert isinstance(part, zv.Variable)
    assert part.spec.part is None


def test_a_shipped_handle_has_no_value(make_cluster):
    fake = make_cluster(variable_partitioner=in_parts(2))
    w, _ = sharded(fake)
    far = pickle.loads(pickle.dumps(w))
    assert isinstance(far, zv.ShardedVariable)
    assert [part.spec for part in far] == [part.spec for part in w]
    assert (far.name, far.shape, far.table) == (w.name, w.shape, w.table)
    with pytest.raises(RuntimeError, match="part_0"):
        far.numpy()
    with pytest.raises(RuntimeError, match="part_0"):
        far.assign(np.zeros((10, 2)))
