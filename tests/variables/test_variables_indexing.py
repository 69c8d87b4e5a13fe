"""Indexing a sharded variable: numpy's result, and only the rows that it needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

import zstrat.variables as zv
from zstrat.variables import UnboundStorage


class Counting(UnboundStorage):
    """A storage of several variables that counts what it is asked for."""

    def __init__(self):
        self.values = {}
        self.rows = {}
        self.requests = 0

    def read(self, variable):
        return self.read_many([variable])[0]

    def read_many(self, variables):
        self.requests += 1
        for variable in variables:
            self.rows[variable.spec.key] = variable.shape[0]
        return [self.values[variable.spec.key] for variable in variables]

    def read_rows(self, parts):
        self.requests += 1
        for variable, indices in parts:
            self.rows[variable.spec.key] = len(indices)
        return [self.values[variable.spec.key][indices] for variable, indices in parts]


def sharded(value, cuts):
    """The rows of ``value`` cut there, in one storage."""
    storage, parts = Counting(), []
    for key, rows in enumerate(np.split(value, cuts)):
        spec = zv.VariableSpec(key, f"part_{key}", rows.shape, rows.dtype.name, 0)
        storage.values[key] = rows
        parts.append(zv.handle(spec, storage))
    return zv.ShardedVariable(parts), storage


def bounds(size):
    return st.none() | st.integers(-size - 3, size + 3)


@st.composite
def one_axis(draw, size):
    if size and draw(st.booleans()):
        return draw(st.integers(-size, size - 1))
    step = draw(st.none() | st.integers(-4, 4).filter(bool))
    return slice(draw(bounds(size)), draw(bounds(size)), step)


@st.composite
def cases(draw):
    """A shape, cuts of its rows, and an index that numpy takes."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
    shape = (draw(st.integers(1, 12)), *shape)
    cuts = sorted(draw(st.lists(st.integers(0, shape[0]), max_size=4)))
    used = draw(st.integers(0, len(shape)))
    axes = list(shape[:used])
    index = []
    if draw(st.booleans()):
        covered = draw(st.integers(1, len(shape)))
        count = int(np.prod(shape[:covered]))
        bits = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        index = [np.array(bits, bool).reshape(shape[:covered])]
        axes = list(shape[covered:used])
    index += [draw(one_axis(size)) for size in axes]
    if draw(st.booleans()):
        # Axes before the ellipsis count from the front, those after it from the back.
        place = draw(st.integers(0, len(index)))
        behind = sum(np.ndim(part) or 1 for part in index[place:])
        tail = [draw(one_axis(size)) for size in shape[len(shape) - behind :]]
        index = [*index[:place], ..., *(tail if behind else [])]
    for _ in range(draw(st.integers(0, 2))):
        index.insert(draw(st.integers(0, len(index))), None)
    if len(index) == 1 and draw(st.booleans()):
        return shape, cuts, index[0]
    return shape, cuts, tuple(index)


@given(cases())
@examples(300)
def test_indexing_is_that_of_numpy(case):
    shape, cuts, index = case
    value = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    try:
        expected = value[index]
    except IndexError:
        return  # an ellipsis beside a mask may make too many axes
    variable, storage = sharded(value, cuts)
    found = variable[index]
    assert np.shape(found) == expected.shape
    np.testing.assert_array_equal(found, expected)
    assert storage.requests <= 1


@given(cases())
@examples(25)
def test_indexing_in_a_step_is_that_of_numpy(case):
    shape, cuts, index = case
    value = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, np.ndarray) for part in parts) and len(parts) > 1:
        return  # jax and numpy order the axes of such mixtures by rules of their own
    variable, storage = sharded(value, cuts)

    class Step:
        def read(self, variable):
            return jnp.asarray(storage.values[variable.spec.key])

    token = zv.recorder.set(Step())
    try:
        found = variable[index]
    finally:
        zv.recorder.reset(token)
    assert isinstance(found, jax.Array)
    np.testing.assert_array_equal(found, value[index])


VALUE = np.arange(40, dtype=np.float32).reshape(20, 2)


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (3, {0: 1}),
        (-1, {3: 1}),
        ((12, 1), {2: 1}),
        (slice(0, 4), {0: 5}),  # most of a part: the whole part
        (slice(4, 6), {0: 1, 1: 1}),
        (slice(None, None, 10), {0: 1, 2: 1}),
        (slice(18, 3, -12), {3: 1, 1: 1}),
        (slice(7, 7), {}),
        ((None, slice(19, None)), {3: 1}),
        (np.arange(20) == 6, {1: 1}),
        (np.arange(20) > 20, {}),
        (..., {0: 5, 1: 5, 2: 5, 3: 5}),
        ((..., 0), {0: 5, 1: 5, 2: 5, 3: 5}),
        ((..., 9, slice(None)), {1: 1}),
    ],
)
def test_only_the_rows_that_are_needed_are_fetched(index, rows):
    variable, storage = sharded(VALUE, [5, 10, 15])
    np.testing.assert_array_equal(variable[index], VALUE[index])
    assert storage.rows == rows
    assert storage.requests == (1 if rows else 0)


def test_a_step_reads_only_the_components_that_are_needed():
    variable, storage = sharded(VALUE, [5, 10, 15])
    read = []

    class Step:
        def read(self, variable):
            read.append(variable.name)
            return jnp.asarray(storage.values[variable.spec.key])

    token = zv.recorder.set(Step())
    try:
        np.testing.assert_array_equal(variable[4:7, 1], VALUE[4:7, 1])
        assert variable[7:7].shape == (0, 2)
    finally:
        zv.recorder.reset(token)
    assert read == ["part_0", "part_1"]


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        (20, IndexError, "out of bounds"),
        (-21, IndexError, "out of bounds"),
        ((0, 2), IndexError, "out of bounds"),
        ((20, np.array([True, False])), IndexError, "out of bounds"),
        ((0, 0, 0), IndexError, "too many indices"),
        ((..., ...), IndexError, "single ellipsis"),
        ((..., np.ones((20, 2), bool), ...), IndexError, "single ellipsis"),
        ((0, np.ones((20, 2), bool)), IndexError, "too many indices"),
        (np.ones(19, bool), IndexError, "did not match"),
        (slice(None, None, 0), ValueError, "step cannot be zero"),
        (np.array(1), TypeError, "sparse_read"),
        (np.array([1, 2]), TypeError, "sparse_read"),
        ([1, 2], TypeError, "sparse_read"),
        (jnp.array(1), TypeError, "ArrayImpl"),
        (slice(np.array(1), None), TypeError, "sparse_read"),
        (slice(None, jnp.array(1)), TypeError, "ArrayImpl"),
        (True, TypeError, "sparse_read"),
        (1.0, TypeError, "sparse_read"),
        ("rows", TypeError, "sparse_read"),
    ],
)
def test_objects_that_are_not_an_index_are_refused(index, error, words):
    variable, storage = sharded(VALUE, [5, 10, 15])
    with pytest.raises(error, match=words):
        variable[index]
    assert not storage.requests


def test_items_are_not_assigned():
    variable, _ = sharded(VALUE, [5])
    with pytest.raises(TypeError, match="item assignment"):
        variable[0] = 1.0
    with pytest.raises(TypeError, match="item deletion"):
        del variable[0]


def test_fetched_rows_are_read_only():
    variable, _ = sharded(VALUE, [5])
    for index in (3, slice(2, 9), ...):
        assert not variable[index].flags.writeable
