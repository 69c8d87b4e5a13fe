"""Replicas in turns have what they have in one program: containers, their share of what
was drawn, shapes by their number; and what they may not bring together."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_replicas import meet, number, values

import zstrat as zs
from zstrat.strategy import regroup


@jax.tree_util.register_pytree_node_class
class Both:
    """A class of the user's with two members and a name."""

    def __init__(self, first, second, name):
        self.first, self.second, self.name = first, second, name

    def tree_flatten(self):
        return (self.first, self.second), self.name

    @classmethod
    def tree_unflatten(cls, name, members):
        return cls(*members, name)


def in_both_ways(strategy, make):
    """What is returned by one program and in turns; by itself and in a step."""

    def replica(in_turns):
        if in_turns:
            zs.get_replica_context().merge_call(lambda strategy: None)
        number = zs.get_replica_context().replica_id_in_sync_group
        return make(jnp.asarray(number, jnp.float32))

    for in_turns in (False, True):
        for run in (strategy.run, zs.function(strategy.run)):
            yield run(lambda in_turns=in_turns: replica(in_turns))


def with_default(x):
    made = collections.defaultdict(list)
    made["b"], made["a"] = x, [x + 10]
    return made


CONTAINERS = {
    "a class that jax knows": lambda x: Both(x, [x + 10], "name"),
    "a dictionary with a default": with_default,
    "an ordered dictionary": lambda x: collections.OrderedDict(b=x, a=[x + 10]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_what_they_were(two, name):
    for found in in_both_ways(two, CONTAINERS[name]):
        assert type(found) is type(CONTAINERS[name](0))
        if isinstance(found, Both):
            assert found.name == "name"
            members = found.first, found.second[0]
        else:
            assert getattr(found, "default_factory", list) is list
            assert sorted(found) == ["a", "b"]
            assert isinstance(found, collections.defaultdict) or [*found] == ["b", "a"]
            members = found["b"], found["a"][0]
        assert [values(each) for each in members] == [[0, 1], [10, 11]]


def test_containers_are_merged_or_refused():
    merged = regroup([collections.Counter(a=1), collections.Counter(a=2)])
    assert type(merged) is collections.Counter
    assert merged["a"].values == (1, 2)
    with pytest.raises(ValueError, match=r"\[one\].*\[other\]"):
        regroup([Both(1, 2, "one"), Both(1, 2, "other")])


BATCH = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("in_turns", [False, True])
def test_each_has_its_rows_of_what_was_drawn(two, eager, in_turns):
    def replica(x, shared, changed):
        if in_turns:
            meet()
        both = x["a"].sum() + shared.sum()
        return {"rows": x["a"] * 1, "of both": both, "changed": changed.sum()}

    @zs.function(eager=eager)
    def step(iterator):
        drawn = next(iterator)
        found = two.run(replica, args=(drawn, jnp.ones(2), drawn["a"] + 0))
        return found, two.reduce("sum", found["of both"], axis=None)

    iterator = zs.StepIterator(iter([{"a": BATCH}, {"a": BATCH + 1}]))
    for plus in (0, 1):
        found, total = step(iterator)
        assert values(found["rows"]) == [[plus, 1 + plus], [2 + plus, 3 + plus]]
        assert values(found["of both"]) == [3 + 2 * plus, 7 + 2 * plus]
        assert values(found["changed"]) == [6 + 4 * plus] * 2  # was not drawn: whole
        assert float(total) == 10 + 4 * plus
        if eager:
            places = [value.devices() for value in found["rows"].values]
            assert places == [{device} for device in jax.devices()[:2]]
    five = zs.StepIterator(iter([{"a": np.arange(5, dtype=np.float32)}]))
    with pytest.raises(ValueError, match="a batch of 5 elements does not split evenly"):
        step(five)


X = np.arange(6, dtype=np.float32)


# The function of what is computed, and the same in numpy of replica n.
CASES = {
    "zeros": (lambda x: jnp.zeros(number() + 1), lambda n: np.zeros(n + 1)),
    "zeros of two": (
        lambda x: jnp.zeros((number() + 1, 2)),
        lambda n: np.zeros((n + 1, 2)),
    ),
    "full": (lambda x: jnp.full((number() + 1,), 3.0), lambda n: np.full(n + 1, 3.0)),
    "eye": (lambda x: jnp.eye(number() + 1), lambda n: np.eye(n + 1)),
    "reshape": (
        lambda x: x.reshape(number() + 1, -1),
        lambda n: X.reshape(n + 1, -1),
    ),
    "broadcast_to": (
        lambda x: jnp.broadcast_to(x[1], (number() + 1,)),
        lambda n: np.full(n + 1, 1.0),
    ),
    "lax.full": (
        lambda x: jax.lax.full((number() + 1,), 2.0),
        lambda n: np.full(n + 1, 2.0),
    ),
    "start": (lambda x: x[number() :], lambda n: X[n:]),
    "stop": (lambda x: x[: number() + 1], lambda n: X[: n + 1]),
    "step": (lambda x: x[:: number() + 1], lambda n: X[:: n + 1]),
    "at": (
        lambda x: x.at[: number() + 1].set(9),
        lambda n: np.where(np.arange(6) <= n, 9, X),
    ),
    "of a value": (
        lambda x: jnp.ones(x.sum().astype(int) - 14 + number()),
        lambda n: np.ones(n + 1),
    ),
    "slice of a value": (
        lambda x: x[: x.argmax() - 3 + number()],
        lambda n: X[: 2 + n],
    ),
    "of numpy": (lambda x: np.zeros(number() + 1), lambda n: np.zeros(n + 1)),
    "arange": (lambda x: jnp.arange(number() + 1), lambda n: np.arange(n + 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_they_lead_to_turns(two, name):
    fn, expected = CASES[name]
    ways = [two.run]
    if name in ("zeros", "stop"):  # in a step the number is known in turns
        ways.append(zs.function(two.run))
    for run in ways:
        found = two.experimental_local_results(run(fn, (jnp.asarray(X),)))
        assert len(found) == 2
        for n, part in enumerate(found):
            np.testing.assert_array_equal(part, expected(n), strict=False)
            assert part.shape == expected(n).shape


def test_one_replica_and_a_shape_that_is_computed():
    one = zs.OneDeviceStrategy("CPU:1")
    given = (jnp.asarray(X),)
    found = one.run(lambda x: (jnp.ones(x.argmax()), x[: x.argmax()]), given)
    np.testing.assert_array_equal(found[0], np.ones(5))
    np.testing.assert_array_equal(found[1], X[:5])


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda x: jnp.zeros("a"), TypeError),
        (lambda x: jnp.zeros((2.5,)), TypeError),
        (lambda x: x["a"], TypeError),
        (lambda x: x[0, 0], IndexError),
        (lambda x: x[x], TypeError),
        (lambda x: [1][number() * 0 + 1], IndexError),
        (lambda x: (x + 1, 1 + None), TypeError),
    ],
)
def test_other_errors_are_raised(two, fn, error):
    with pytest.raises(error):
        two.run(fn, (jnp.asarray(X),))


def test_errors_of_the_user_do_not_run_twice(two):
    ran = []

    def fn(x):
        ran.append(x)
        raise IndexError("the slice entries must be sorted")

    with pytest.raises(IndexError, match="sorted"):
        two.run(fn, (jnp.asarray(X),))
    assert len(ran) == 1


def python_number():
    """Python looks at it, so replicas run in turns."""
    return int(zs.get_replica_context().replica_id_in_sync_group)


ROWS = zs.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (2, 2))


UNLIKE = [
    (lambda: jnp.ones(1 + 2 * python_number()), r"\(1,\).*\(3,\)"),
    (lambda: jnp.ones(2 + python_number()), r"\(2,\).*\(3,\)"),
    (lambda: 1.0 if python_number() else np.ones(2), r"\(2,\)"),
    (
        lambda: jnp.ones((2, 2)) if python_number() else ROWS,
        "IndexedSlices",
    ),
    (
        lambda: ROWS if python_number() else jnp.ones((2, 2)),
        "IndexedSlices",
    ),
    (lambda: [1.0] * (1 + python_number()), "different structures"),
]


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize(("value", "words"), UNLIKE)
def test_what_is_not_alike_is_not_added(two, value, words, in_step):
    def reduced():
        return two.run(lambda: zs.get_replica_context().all_reduce("sum", value()))

    with pytest.raises(ValueError, match=words):
        (zs.function(reduced) if in_step else reduced)()


def test_nor_is_it_gathered(two):
    def gathered(value, axis):
        def fn():
            return zs.get_replica_context().all_gather(value(), axis)

        return two.run(fn)

    with pytest.raises(ValueError, match="PyTreeDef"):
        gathered(lambda: [np.ones(1)] * (1 + python_number()), 0)
    with pytest.raises(ValueError, match="all_gather"):
        gathered(lambda: jnp.ones((2, 1 + python_number())), 0)
    found = gathered(
        lambda: jnp.full((2, 1 + python_number()), python_number()),
        1,
    )
    assert [x.tolist() for x in found.values] == [[[0, 1, 1]] * 2] * 2


@pytest.mark.parametrize("names", [["CPU:0"], ["CPU:0", "CPU:1"]])
@pytest.mark.parametrize("axis", [1, -2])
@pytest.mark.parametrize("in_step", [False, True])
def test_there_is_such_an_axis(names, axis, in_step):
    strategy = zs.MirroredStrategy(names)

    def gathered():
        return strategy.run(
            lambda: zs.get_replica_context().all_gather([jnp.ones(2)], axis)
        )

    with pytest.raises(ValueError, match=rf"axis {axis} is out of bounds .*\(2,\)"):
        (zs.function(gathered) if in_step else gathered)()


def scanned(fn):
    return lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, None, length=2)[0]


WAYS = {"jit": jax.jit, "grad": jax.grad, "vmap": jax.vmap, "scan": scanned}


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_no_merge_call_inside_of_what_jax_transforms(two, way, in_step):
    def merging(x):
        zs.get_replica_context().merge_call(lambda strategy: None)
        return x * x

    def call():
        x = jnp.ones(2) if way == "vmap" else jnp.float32(1)
        return two.run(WAYS[way](merging), (x,))

    words = "merge_call"
    with pytest.raises(RuntimeError, match=words):
        (zs.function(call) if in_step else call)()
    assert not zs.has_strategy()
