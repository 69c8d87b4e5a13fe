"""Initial values: the same array however it is cut, and what the names promise."""

import itertools
import pickle
import subprocess
import sys
import tracemalloc
import zlib
from statistics import NormalDist

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zstrat import initializers

SEEDED = [
    initializers.normal(0.1, 5),
    initializers.normal(0.1, 5, mean=1.0),
    initializers.uniform(-1, 1, 5),
    initializers.glorot_uniform(5),
    initializers.he_normal(5),
    initializers.constant(3),
    initializers.constant(np.arange(4)),
    initializers.zeros,
    initializers.ones,
]


def part(make, shape, dtype, start, stop):
    return make(
        shape,
        dtype,
        partition_shape=(stop - start, *shape[1:]),
        partition_offset=(start, *[0] * (len(shape) - 1)),
    )


@pytest.mark.parametrize("make", SEEDED)
@given(
    rows=st.integers(1, 300),
    cuts=st.lists(st.integers(0, 300), max_size=5),
    width=st.sampled_from([1000, 40_000]),
)
@settings(max_examples=15, deadline=None)
def test_one_seed_is_one_array_for_any_partitioning(make, rows, cuts, width):
    shape = (max(1, rows * 1000 // width), width // 4, 4)
    bounds = sorted({0, shape[0], *(min(cut, shape[0]) for cut in cuts)})
    whole = make(shape, np.float32)
    parts = [part(make, shape, np.float32, a, b) for a, b in itertools.pairwise(bounds)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("make", SEEDED)
def test_any_window_is_cut_out(make):
    shape = (2000, 6, 4)
    whole = make(shape, np.float32)
    cut = make(
        shape, np.float32, partition_shape=(1500, 2, 4), partition_offset=(300, 3, 0)
    )
    np.testing.assert_array_equal(cut, whole[300:1800, 3:5])
    assert cut.flags.c_contiguous


@pytest.mark.parametrize("make", SEEDED)
def test_they_travel_by_name(make):
    shape = (50, 4)
    shipped = pickle.loads(pickle.dumps(make))
    np.testing.assert_array_equal(shipped(shape, "float32"), make(shape, "float32"))
    assert b"cloudpickle" not in pickle.dumps(make)


def test_another_process_makes_the_same_without_jax():
    program = (
        "import sys, zlib; from zstrat import initializers;"
        "array = initializers.normal(0.1, 5)((3000, 64), 'float32');"
        "assert 'jax' not in sys.modules;"
        "print(zlib.crc32(array.tobytes()))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    here = initializers.normal(0.1, 5)((3000, 64), "float32")
    assert int(ran.stdout) == zlib.crc32(here.tobytes())


def test_a_part_costs_no_more_than_itself():
    shape = (10**9, 64)  # 256 GB
    make = initializers.normal(1.0, 1)
    tracemalloc.start()
    try:
        cut = part(make, shape, np.float32, 999_000_000, 999_010_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < cut.nbytes + 2_000_000
    assert abs(cut.std() - 1) < 0.01


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float64"])
def test_other_floats_are_rounded_once(dtype):
    dtype = np.dtype(dtype)
    shape = (400, 300)
    made = initializers.normal(2.0, 3)(shape, dtype)
    assert made.dtype == dtype
    assert abs(made.astype(np.float64).std() - 2) < 0.02
    if dtype.itemsize == 2:
        single = initializers.normal(2.0, 3)(shape, np.float32)
        np.testing.assert_array_equal(made, single.astype(dtype))
    assert initializers.zeros(shape, dtype).dtype == dtype
    assert not initializers.zeros(shape, dtype).any()
    assert (initializers.ones(shape, dtype) == dtype.type(1)).all()


def test_rows_blocks_and_columns_are_independent():
    drawn = initializers.normal(1.0, 0)((4096, 64), np.float32)  # four blocks
    blocks = drawn.reshape(4, -1)
    assert np.abs(np.corrcoef(blocks) - np.eye(4)).max() < 0.02
    assert np.abs(np.corrcoef(drawn.T) - np.eye(64)).max() < 0.1
    # Kolmogorov and Smirnov: the distance from the normal law.
    ordered = np.sort(drawn.ravel())[::256]
    law = np.array([NormalDist().cdf(float(x)) for x in ordered])
    assert np.abs(law - np.arange(len(law)) / len(law)).max() < 0.005


def test_uniform_fills_its_interval_evenly():
    drawn = initializers.uniform(-2, 3, 0)((1000, 100), np.float32)
    counts, _ = np.histogram(drawn, 10, (-2, 3))
    assert counts.sum() == drawn.size
    assert np.abs(counts / drawn.size - 0.1).max() < 0.005


@pytest.mark.parametrize("rows", [1, 2, 5, 10])
def test_fans_are_those_of_the_whole(rows):
    make, shape = initializers.glorot_uniform(0), (10, 30)
    bound = np.sqrt(6 / 40)
    cut = part(make, shape, np.float32, 0, rows)
    assert np.abs(cut).max() <= bound
    np.testing.assert_array_equal(cut, make(shape, np.float32)[:rows])


def test_without_a_seed_every_call_differs():
    make = initializers.normal()
    assert not np.array_equal(make((4, 4), "float32"), make((4, 4), "float32"))
    one = part(make, (8, 4), "float32", 0, 4)
    assert not np.array_equal(one, part(make, (8, 4), "float32", 4, 8))


@pytest.mark.parametrize("make", SEEDED)
def test_scalars_and_empty_arrays(make):
    if isinstance(make, initializers.Constant) and np.ndim(make.value):
        assert make((0, 4), "float32").shape == (0, 4)
        return
    assert make((), "float32").shape == ()
    assert make((0, 4), "float32").shape == (0, 4)
    assert make((4, 0), "float16").shape == (4, 0)
    np.testing.assert_array_equal(make((), "float32"), make((1,), "float32")[0])


@pytest.mark.parametrize(
    ("partition_shape", "partition_offset"),
    [
        ((3, 2), (8, 0)),
        ((3,), (0,)),
        ((3, 2), (-1, 0)),
        ((3, 2), None),
        ((-1, 2), (3, 0)),
    ],
)
def test_a_part_is_inside_of_the_whole(partition_shape, partition_offset):
    with pytest.raises(ValueError, match=r"\(10, 2\)"):
        initializers.zeros(
            (10, 2),
            "float32",
            partition_shape=partition_shape,
            partition_offset=partition_offset,
        )


def test_what_a_user_returns_is_checked():
    def wrong(shape, dtype, partition_shape, partition_offset):
        return np.zeros((1, 1))

    make = initializers.Sliced(wrong, takes_shape=True, names_parts=True)
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        part(make, (4, 2), np.float32, 0, 2)


def test_a_mistake_of_the_user_is_not_taken_for_a_refusal():
    def broken(partition_shape, partition_offset):
        raise TypeError("a mistake")

    make = initializers.Sliced(broken, takes_shape=False, names_parts=True)
    with pytest.raises(TypeError, match="a mistake"):
        make((2,), np.float32)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_integers_are_drawn_alike(dtype):
    low = 0 if dtype == "uint8" else -2
    whole = initializers.uniform(low, 3, seed=0)((30_000,), dtype)
    numbers, counts = np.unique(whole, return_counts=True)
    assert whole.dtype == dtype
    assert numbers.tolist() == list(range(low, 3))
    expected = len(whole) / len(numbers)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
    cut = part(initializers.uniform(low, 3, seed=0), whole.shape, dtype, 17, 9000)
    np.testing.assert_array_equal(cut, whole[17:9000])


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (initializers.normal(1.0), "int32"),
        (initializers.glorot_uniform(), "int8"),
        (initializers.he_normal(), "complex64"),
        (initializers.uniform(0, 1), "bool"),
        (initializers.uniform(), "int32"),
        (initializers.uniform(-1, 3), "uint8"),
        (initializers.uniform(0, 257), "uint8"),
        (initializers.uniform(3, 3), "uint8"),
        (initializers.constant(2**70), "int32"),
        (initializers.constant(1.5), "int32"),
        (initializers.constant(np.nan), "int32"),
        (initializers.constant(1e20), "int64"),
        (initializers.constant(np.array([3, 200])), "int8"),
        (initializers.constant(np.array([-1])), "uint8"),
        (initializers.constant(2), "bool"),
        (initializers.constant(1 + 2j), "float32"),
        (
            initializers.Sliced(lambda: np.full(2, 0.5), False, False),
            "int32",
        ),
    ],
)
def test_a_dtype_without_these_numbers_is_refused(make, dtype):
    with pytest.raises(ValueError, match=dtype):
        make((2,), np.dtype(dtype))


def test_integers_that_no_float_has_are_drawn():
    low, high = 2**63 + 1, 2**63 + 4
    drawn = initializers.uniform(low, high, seed=0)((3000,), np.uint64)
    found, counts = np.unique(drawn, return_counts=True)
    assert found.tolist() == [low, low + 1, low + 2]
    assert counts.min() > 900
    full = initializers.uniform(0, 2**64, seed=0)((100,), np.uint64)
    assert len(set(full.tolist())) == 100


def test_numbers_that_another_kind_has_are_the_same_there():
    make = initializers.constant
    for value, dtype in ((2.0, "int32"), (1, "bool"), (3 + 0j, "float32"), (7, "f2")):
        made = make(value)((2,), dtype)
        assert made.dtype == dtype
        assert (made == value).all()
