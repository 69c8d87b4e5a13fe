"""Weak types: Python numbers in jax take the dtype of what they meet, and so they do
whichever way replicas run. What replicas have together has a dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zstrat as zs
from zstrat.strategy import PerReplica

WAYS = [
    "by itself",
    "in a step",
    "captured in a step",
    "in turns",
    "in turns in a step",
]

pytestmark = pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")


@pytest.fixture(scope="module")
def two():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(params=WAYS)
def run(request, two):
    way = request.param

    def run(fn, *args):
        def body(*own):
            if "turns" in way:
                zs.get_replica_context().merge_call(lambda strategy: None)
            return fn(*own)

        if "captured" in way:
            found = zs.function(lambda: two.run(body, args))()
        elif "step" in way:
            found = zs.function(lambda *given: two.run(body, given))(*args)
        else:
            found = two.run(body, args)
        return two.experimental_local_results(found)

    return run


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


BYTE, HALF = jnp.int8(3), jnp.float16(1.5)


@pytest.mark.parametrize(
    ("strong", "numbers"), [(BYTE, (100, 101)), (HALF, (2.0, 3.0))]
)
def test_numbers_of_each_replica(run, strong, numbers):
    expected = [strong * number for number in numbers]
    same(run(lambda x: strong * x, PerReplica(numbers)), expected)
    weak = [jnp.asarray(number) for number in numbers]
    same(run(lambda x: strong * x, PerReplica(weak)), expected)
    rows = [jnp.full(2, number) for number in numbers]
    same(
        run(lambda x: strong * x, PerReplica(rows)),
        [strong * number for number in rows],
    )


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("turns", [True, False])
def test_what_replicas_returned(run, two, shape, turns):
    def numbers():
        if turns:
            zs.get_replica_context().merge_call(lambda strategy: None)
        return jnp.full(shape, 100) * 1

    value = two.run(numbers)
    assert all(jax.typeof(x).weak_type for x in value.values)
    same(run(lambda x: BYTE * x, value), [BYTE * jnp.full(shape, 100)] * 2)


def test_what_all_devices_have(run):
    mesh = Mesh(np.array(jax.devices()[:2]), ("devices",))
    whole = jax.device_put(jnp.asarray(2.0), NamedSharding(mesh, PartitionSpec()))
    assert jax.typeof(whole).weak_type
    same(run(lambda x: HALF * x, whole), [jnp.float16(3)] * 2)


def test_what_replicas_have_together_is_strong(run):
    context = zs.get_replica_context
    both = run(lambda: BYTE * context().all_reduce("sum", 100))
    same(both, [jnp.int32(600)] * 2)
    both = run(lambda: HALF * context().all_reduce("mean", jnp.asarray(2.0)))
    same(both, [jnp.float32(3)] * 2)
    both = run(lambda: HALF * context().all_gather(jnp.full(1, 2.0), 0))
    same(both, [jnp.full(2, 3, jnp.float32)] * 2)

    def rows():
        slices = zs.IndexedSlices(jnp.full((1, 1), 2.0), jnp.array([0]))
        return HALF * context().all_reduce("sum", slices).values

    same(run(rows), [jnp.full((2, 1), 3, jnp.float32)] * 2)


ALONE_OR_TWO = {
    "none": zs.get_strategy,
    "one device": lambda: zs.OneDeviceStrategy("CPU:0"),
    "one copy": lambda: zs.MirroredStrategy(["CPU:0"]),
    "two copies": lambda: zs.MirroredStrategy(["CPU:0", "CPU:1"]),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", ALONE_OR_TWO)
def test_dtypes_are_the_same_however_many_replicas(kind, compiled):
    strategy = ALONE_OR_TWO[kind]()
    names = ["bool", "int8", "int32", "float16", "complex64"]
    values = {name: jnp.array([1, 0], name) for name in names}

    def replica_fn():
        context = zs.get_replica_context()
        slices = zs.IndexedSlices(values["int8"], jnp.arange(2))
        return {
            "sum": context.all_reduce("sum", values),
            "mean": context.all_reduce("mean", values),
            "rows": context.all_reduce("mean", slices).values,
            # What is weak has met nobody yet.
            "number": context.all_reduce("sum", 1.0) * HALF,
            "integer": context.all_reduce("mean", 1) * HALF,
            "joined": context.all_gather(jnp.full(1, 1.0), 0) * HALF,
        }

    def step():
        return strategy.run(replica_fn)

    found = (zs.function(step) if compiled else step)()
    first = strategy.experimental_local_results(found)[0]
    dtypes = jax.tree.map(lambda array: array.dtype.name, first)
    same = {name: name for name in names}
    assert dtypes == {
        "sum": {**same, "bool": "int32"},
        "mean": {**same, **dict.fromkeys(names[:3], "float32")},
        **dict.fromkeys(["rows", "number", "integer", "joined"], "float32"),
    }
    for name in names:
        assert first["sum"][name].tolist() == [strategy.num_replicas_in_sync, 0]
        assert first["mean"][name].tolist() == [1, 0]
