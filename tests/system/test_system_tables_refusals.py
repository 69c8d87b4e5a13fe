"""Ids, gradients, partitioners and initializers that do not fit: refused with words."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from system_worlds import numbered

import zstrat as zs

pytestmark = pytest.mark.processes

ROWS, DIM = 10, 4
WORDS, CONTEXTS = numbered(ROWS, DIM), numbered(ROWS + 3, DIM)


@pytest.fixture
def coordinator(world):
    return world.coordinator


@pytest.fixture
def scope(world):
    return world.scope


@pytest.fixture(scope="module")
def program(world):
    """Two tables and an optimizer that nothing here may change."""
    with world.scope(3):
        table = zs.Variable(WORDS, name="words")
        whole = zs.Variable(CONTEXTS, name="contexts")
        optimizer = zs.Optimizer(optax.adagrad(0.1))
    return world.coordinator, table, whole, optimizer


def _arrives_once(coordinator, step, *args, error, says):
    """Schedules a step that fails, and others that do not mind afterwards."""

    @zs.function
    def fine():
        return jnp.float32(1)

    with pytest.raises(error, match=says) as caught:
        coordinator.schedule(step, args=args)
        coordinator.join()
    coordinator.join()
    assert coordinator.done()
    assert coordinator.schedule(fine).fetch() == 1.0
    coordinator.join()
    return caught.value


@pytest.mark.parametrize("bad", [-1, ROWS, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("computed", [False, True], ids=["given", "computed"])
def test_ids_that_are_not_there(program, bad, computed):
    coordinator, table, _, _ = program

    @zs.function
    def step(ids):
        return zs.embedding_lookup(table, ids * 1 if computed else ids)

    ids = np.array([[1, 2], [bad, 3]], np.int64)
    says = rf"'words'.*no row {bad}\b"
    _arrives_once(coordinator, step, ids.astype("i4"), error=IndexError, says=says)
    good = coordinator.schedule(step, args=(np.array([[1, 9], [0, 1]], "i4"),)).fetch()
    np.testing.assert_array_equal(good, WORDS[[[1, 9], [0, 1]]])


@pytest.mark.parametrize("bad", [-1, ROWS + 3])
def test_ids_of_a_whole_table_that_are_not_there(program, bad):
    coordinator, _, whole, optimizer = program

    @zs.function
    def step(ids):
        def loss(whole):
            return zs.embedding_lookup(whole, ids).sum()

        optimizer.apply_gradients([(zs.grad(loss)(whole), whole)])

    says = rf"'contexts'.*no row {bad}\b"
    _arrives_once(coordinator, step, np.array([0, bad]), error=IndexError, says=says)
    np.testing.assert_array_equal(whole.numpy(), CONTEXTS)


@pytest.mark.parametrize("bad", [-3, ROWS])
def test_rows_to_be_written_that_are_not_there(program, bad):
    coordinator, table, _, _ = program

    @zs.function
    def step(indices):
        rows = zs.IndexedSlices(jnp.ones((2, DIM)), indices)
        table.scatter_add(rows)

    says = rf"'words'.*no row {bad}\b"
    _arrives_once(coordinator, step, np.array([0, bad]), error=IndexError, says=says)
    np.testing.assert_array_equal(table.numpy(), WORDS)
    outside = rf"'words'.*(index|no row) {bad}\b"
    with pytest.raises(IndexError, match=outside):
        table.scatter_add(zs.IndexedSlices(np.ones((2, DIM), "f4"), np.array([0, bad])))
    with pytest.raises(IndexError, match=outside):
        table.sparse_read(np.array([0, bad]))
    np.testing.assert_array_equal(table.numpy(), WORDS)


def rows(shape, dtype=jnp.float32, count=2):
    return zs.IndexedSlices(jnp.ones(shape, dtype), jnp.arange(count))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            lambda table, _: zs.embedding_lookup(table, jnp.ones(3)),
            "'words'.*integer.*float32",
        ),
        (
            lambda table, _: zs.embedding_lookup(table, jnp.ones(3, bool)),
            "'words'.*integer.*bool",
        ),
        (
            lambda table, _: table.sparse_read(jnp.ones((2, 2), jnp.int32)),
            "'words'.*rank 1, got rank 2",
        ),
        (
            lambda table, _: table.scatter_add(rows((2, DIM), count=3)),
            r"'words'.*\(2, 4\).*expected \(3, 4\)",
        ),
        (
            lambda table, _: table.scatter_add(rows((2, DIM + 1))),
            r"'words'.*\(2, 5\).*expected \(2, 4\)",
        ),
        (
            lambda table, _: table.scatter_update(rows(2)),
            r"'words'.*\(2,\).*expected \(2, 4\)",
        ),
        (
            lambda table, _: table.scatter_add(rows((2, DIM), jnp.complex64)),
            "'words'.*float32.*complex64",
        ),
        (
            lambda table, optimizer: optimizer.apply_gradients(
                [(rows((2, DIM), jnp.complex64), table)]
            ),
            "'words'.*float32.*complex64",
        ),
        (
            lambda table, optimizer: optimizer.apply_gradients(
                [(jnp.ones((ROWS + 1, DIM)), table)]
            ),
            r"'words'.*\(10, 4\).*\(11, 4\)",
        ),
    ],
)
def test_what_does_not_fit_a_table(program, body, says):
    coordinator, table, _, optimizer = program

    @zs.function
    def step():
        return body(table, optimizer)

    _arrives_once(coordinator, step, error=ValueError, says=f"(?s){says}")
    np.testing.assert_array_equal(table.numpy(), WORDS)


@pytest.mark.parametrize(
    "answer",
    [None, 2, "two", [2], [2, 2], [0, 1], [-1, 1], [1.5, 1], [2, 1, 1], [1, 2]],
)
def test_a_partitioner_that_returns_nonsense(scope, answer):
    with scope(lambda *_: answer):
        with pytest.raises(ValueError, match=r"'odd'.*\(4, 3\)") as caught:
            zs.Variable(np.zeros((4, 3), "f4"), name="odd")
        assert repr(answer) in str(caught.value)
    with scope([2, 1]):
        table = zs.Variable(np.ones((4, 3), "f4"), name="even")
    assert [v.name for v in table.components] == ["even/part_0", "even/part_1"]
    np.testing.assert_array_equal(table.numpy(), np.ones((4, 3)))


def test_a_partitioner_that_raises(scope):
    def broken(shape, dtype):
        raise KeyError("no plan for this shape")

    with scope(broken), pytest.raises(KeyError, match="no plan"):
        zs.Variable(np.zeros((4, 3), "f4"), name="odd")


def test_an_initializer_that_fails_on_the_ps_leaves_no_variable(scope):
    """It is made there, of another shape than it was told; the name is free again."""

    def wrong(shape, dtype, partition_shape=None, partition_offset=None):
        return np.zeros((1, 1), dtype)

    def raises(shape, dtype, partition_shape=None, partition_offset=None):
        raise ArithmeticError("cannot draw")

    with scope(2):
        with pytest.raises(zs.ZstratError, match=r"\(2, 3\).*\(1, 1\)"):
            zs.Variable(wrong, shape=(4, 3), dtype="float32", name="odd")
        with pytest.raises(zs.ZstratError, match="ArithmeticError"):
            zs.Variable(raises, shape=(4, 3), dtype="float32", name="odd")
        table = zs.Variable(np.ones((4, 3), "f4"), name="odd")
    np.testing.assert_array_equal(table.numpy(), np.ones((4, 3)))
