"""Shapes and slices by the number of the replica, or by what is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs


@pytest.fixture(scope="module")
def two():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


def number():
    return zs.get_replica_context().replica_id_in_sync_group


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
    found = two.experimental_local_results(two.run(fn, (jnp.asarray(X),)))
    assert len(found) == 2
    for n, part in enumerate(found):
        np.testing.assert_array_equal(part, expected(n), strict=False)
        assert part.shape == expected(n).shape


@pytest.mark.parametrize("name", ["zeros", "stop"])
def test_in_a_step_the_number_is_known_in_turns(two, name):
    fn, expected = CASES[name]

    @zs.function
    def step(x):
        return two.experimental_local_results(two.run(fn, (x,)))

    for n, part in enumerate(step(jnp.asarray(X))):
        np.testing.assert_array_equal(part, expected(n))


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
