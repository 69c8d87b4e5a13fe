"""First rows of ids: from seed and id alone."""

import itertools

import numpy as np
import pytest

from zstrat import initializers
from zstrat.ids import IdGenerator

IDS = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 4000)
MADE = [
    initializers.uniform(-0.5, 1.5),
    initializers.normal(2.0, mean=1.0),
    initializers.constant(0.25),
]


def rows(initializer, ids, width=7, dtype="f4", seed=3):
    out = np.full((len(ids), width), np.nan, dtype)
    initializer.rows(IdGenerator(seed, ids), out)
    return out


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("initializer", MADE, ids=["uniform", "normal", "constant"])
def test_a_row_is_a_matter_of_its_id_alone(initializer, dtype):
    all_rows = rows(initializer, IDS, dtype=dtype)
    some = np.random.default_rng(1).permutation(len(IDS))[:50]
    np.testing.assert_array_equal(
        rows(initializer, IDS[some], dtype=dtype), all_rows[some]
    )
    assert rows(initializer, IDS[:0], dtype=dtype).shape == (0, 7)


def test_rows_are_distributed_as_they_should_be():
    uniform = rows(MADE[0], IDS, 8)
    assert -0.5 <= uniform.min() < -0.499 < 1.499 < uniform.max() <= 1.5
    normal = (rows(MADE[1], IDS, 8) - 1.0) / 2.0
    count = uniform.size
    # Five standard errors.
    for values, mean, variance in [(uniform, 0.5, 4 / 12), (normal, 0.0, 1.0)]:
        assert abs(values.mean() - mean) < 5 * np.sqrt(variance / count)
        assert abs(values.var() - variance) < 5 * np.sqrt(2 * variance**2 / count)
        for a, b in itertools.pairwise(values.T):  # neighbours in a row
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(len(IDS))
    inside = np.mean(np.abs(normal) < 1.0)
    assert abs(inside - 0.6827) < 5 * np.sqrt(0.6827 * 0.3173 / count)


def test_neighbouring_ids_and_seeds_have_nothing_in_common():
    ids = np.arange(4000)
    base = rows(MADE[0], ids, 1)[:, 0]
    for other in (
        rows(MADE[0], ids + 1, 1)[:, 0],
        rows(MADE[0], ids, 1, seed=4)[:, 0],
        rows(MADE[0], -ids - 1, 1)[:, 0],
    ):
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / np.sqrt(len(ids))


def test_integers():
    out = np.zeros((len(IDS), 5), "i4")
    initializers.uniform(-3, 4).rows(IdGenerator(0, IDS), out)
    counts = np.unique(out, return_counts=True)
    assert counts[0].tolist() == list(range(-3, 4))
    expected = out.size / 7
    assert (abs(counts[1] - expected) < 5 * np.sqrt(expected)).all()


@pytest.mark.parametrize(
    "initializer",
    [initializers.glorot_uniform(), initializers.he_normal()],
)
def test_what_depends_on_the_number_of_rows_is_refused(initializer):
    with pytest.raises(ValueError, match=type(initializer).__name__):
        rows(initializer, IDS)
