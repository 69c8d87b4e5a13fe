"""What TensorFlow 2.21 gave for these programs, and plain Python for all others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.data import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset


def plain(dataset):
    return [np.asarray(element).tolist() for element in dataset]


def filled(stop=5):
    """[1], [2, 2], [3, 3, 3], …"""
    return Dataset.range(1, stop).map(lambda x: np.full([x], x))


# from_tensors, zip, concatenate


@pytest.mark.shows("tf.data.Dataset.from_tensors")
def test_a_structure_is_one_element():
    (element,) = Dataset.from_tensors((np.arange(3), {"a": 1.5}))
    assert element[0].tolist() == [0, 1, 2]
    assert element[1]["a"] == 1.5
    assert Dataset.from_tensors([1, 2]).cardinality() == 1
    assert plain(Dataset.from_tensors([1, 2]).repeat(2).batch(2)) == [[[1, 2]] * 2]
    with pytest.raises(ValueError, match="`tensors`"):
        Dataset.from_tensors(())


@pytest.mark.shows("tf.data.Dataset.zip")
def test_zip_ends_with_the_shortest():
    assert list(Dataset.zip(Dataset.range(3), Dataset.range(10, 20))) == [
        (0, 10),
        (1, 11),
        (2, 12),
    ]
    nested = {"a": Dataset.range(2), "b": (Dataset.range(2), Dataset.range(5))}
    assert list(Dataset.zip(nested)) == [
        {"a": 0, "b": (0, 0)},
        {"a": 1, "b": (1, 1)},
    ]
    assert plain(Dataset.zip(Dataset.range(2))) == [0, 1]
    assert list(Dataset.zip((Dataset.range(2),))) == [(0,), (1,)]
    assert list(Dataset.zip(datasets=(Dataset.range(1),))) == [(0,)]


def test_zip_of_infinite_and_unknown_ones():
    three, forever = Dataset.range(3), Dataset.range(3).repeat()
    unknown = three.filter(lambda x: True)
    assert Dataset.zip(three, forever).cardinality() == 3
    assert Dataset.zip(forever, forever).cardinality() == INFINITE_CARDINALITY
    assert Dataset.zip(three, unknown).cardinality() == UNKNOWN_CARDINALITY
    assert len(list(Dataset.zip(three, forever))) == 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda d: Dataset.zip(), "`zip`"),
        (lambda d: Dataset.zip([d, d]), "`tuple`"),
        (lambda d: Dataset.zip(d, 3), "'int'"),
        (lambda d: Dataset.zip(d, datasets=d), "`datasets`"),
        (lambda d: d.concatenate([1]), "`concatenate`"),
        (lambda d: d.concatenate(Dataset.from_tensors(("a",))), "TensorSpec"),
        (lambda d: d.concatenate(Dataset.from_tensors(1.0)), "TensorSpec"),
        (lambda d: d.take(2.5), r"`count`.*\b2\b.*\b5\b"),
        (lambda d: d.batch(2.0), r"`batch_size`.*\b2\b.*\b0\b"),
        (lambda d: d.shard(2, 0.5), r"`index`.*\b0\b.*\b5\b"),
        (lambda d: d.enumerate(0.5), r"`start`.*\b0\b.*\b5\b"),
        (lambda d: d.filter(3), "must be callable"),
        (lambda d: list(d.filter(lambda x: x)), "`predicate`"),
        (lambda d: d.interleave(3), "must be callable"),
        (lambda d: list(d.interleave(lambda x: x)), "`map_func`"),
        (lambda d: d.reduce(0, 3), "must be callable"),
        (lambda d: d.reduce(0, lambda s, x: (s, x)), "`reduce_func`"),
        (lambda d: d.reduce(0, lambda s, x: s + 1.5), "`reduce_func`"),
        (lambda d: d.reduce(np.int8(0), lambda s, x: x + 127), r"\b1\b"),
        (
            lambda d: d.reduce(np.int64(0), lambda s, x: np.uint64(2**63)),
            "`reduce_func`",
        ),
        (lambda d: d.reduce(np.float32(0), lambda s, x: x + 1e39), "`reduce_func`"),
        (lambda d: d.batch(2).rebatch([1.5]), "'float'"),
    ],
)
def test_what_has_the_wrong_type(call, words):
    with pytest.raises(TypeError, match=words):
        call(Dataset.range(3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda d: d.interleave(lambda x: d, cycle_length=0), "cycle_length"),
        (lambda d: d.interleave(lambda x: d, block_length=0), "block_length"),
        (
            lambda d: d.interleave(lambda x: d, 2, num_parallel_calls=3),
            "`num_parallel_calls`",
        ),
        (lambda d: d.rebatch(0), r"\b1\b"),
        (lambda d: d.rebatch([]), "`batch_size`"),
        (lambda d: d.padded_batch(0), r"\b1\b"),
        (lambda d: list(d.unbatch()), "`unbatch`"),
        (lambda d: list(d.rebatch(2)), "`rebatch`"),
        (lambda d: d.repeat().reduce(0, max), "would not end"),
        (lambda d: d.repeat().cache(), "before repeat"),
        (lambda d: d.map(max, num_parallel_calls=0), r"\b1\b"),
        (lambda d: d.map(max, num_parallel_calls=-2), r"\b1\b"),
    ],
)
def test_what_has_the_wrong_value(call, words):
    with pytest.raises(ValueError, match=words):
        call(Dataset.range(3))


@pytest.mark.shows("tf.data.Dataset.concatenate")
def test_concatenate():
    joined = Dataset.range(2).concatenate(Dataset.range(5, 7))
    assert plain(joined) == [0, 1, 5, 6]
    assert len(joined) == 4
    assert plain(joined.shuffle(9, seed=1).batch(4)) != [[0, 1, 5, 6]]
    forever = Dataset.range(2).concatenate(Dataset.range(5).repeat())
    assert forever.cardinality() == INFINITE_CARDINALITY
    assert plain(forever.take(4).batch(3)) == [[0, 1, 0], [1]]


# filter, unbatch, rebatch, reduce


@pytest.mark.shows("tf.data.Dataset.filter")
def test_filter():
    assert plain(Dataset.range(6).filter(lambda x: x % 2 == 0)) == [0, 2, 4]
    pairs = Dataset.zip(Dataset.range(4), Dataset.range(4))
    assert list(pairs.filter(lambda a, b: a + b > 3)) == [(2, 2), (3, 3)]
    assert Dataset.range(6).filter(lambda x: True).cardinality() == UNKNOWN_CARDINALITY


@pytest.mark.shows("tf.data.Dataset.unbatch")
def test_unbatch():
    rows = Dataset.from_tensor_slices({"a": np.arange(6).reshape(2, 3)}).unbatch()
    assert [row["a"] for row in rows] == [0, 1, 2, 3, 4, 5]
    batches = Dataset.range(5).batch(2)
    assert batches.unbatch().cardinality() == UNKNOWN_CARDINALITY
    whole = Dataset.range(5).batch(2, drop_remainder=True)
    assert whole.unbatch().cardinality() == 4
    assert batches.repeat().unbatch().cardinality() == INFINITE_CARDINALITY
    assert plain(Dataset.from_tensors(np.zeros((0, 2))).unbatch()) == []
    unlike = Dataset.from_tensors((np.zeros(2), np.zeros(3)))
    with pytest.raises(ValueError, match="Encountered 2 and 3"):
        list(unlike.unbatch())


@pytest.mark.shows("tf.data.Dataset.rebatch")
@pytest.mark.parametrize(
    ("sizes", "drop", "batches"),
    [
        (3, False, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (3, True, [[0, 1, 2], [3, 4, 5]]),
        ([2, 1, 1], False, [[0, 1], [2], [3], [4, 5], [6], [7]]),
        ([2, 1, 1, 2], True, [[0, 1], [2], [3], [4, 5], [6, 7]]),
        ([3, 2], False, [[0, 1, 2], [3, 4], [5, 6, 7]]),
    ],
)
def test_rebatch(sizes, drop, batches):
    assert plain(Dataset.range(8).batch(4).rebatch(sizes, drop)) == batches


@given(
    lengths=st.lists(st.integers(0, 5), max_size=6),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_rebatch_keeps_every_row(lengths, sizes):
    ends = np.cumsum([0, *lengths])
    batches = [{"x": np.arange(a, b)} for a, b in itertools.pairwise(ends)]
    found = [
        e["x"].tolist() for e in Dataset.from_generator(lambda: batches).rebatch(sizes)
    ]
    assert [row for batch in found for row in batch] == list(range(ends[-1]))
    wanted = itertools.islice(itertools.cycle(sizes), len(found))
    assert all(len(batch) == n for batch, n in zip(found[:-1], wanted, strict=False))
    assert all(found)


BATCHED = {
    "batch": lambda d: d.unbatch().batch(3),
    "rebatch": lambda d: d.rebatch(3),
    "padded_batch": lambda d: d.unbatch().padded_batch(3),
}


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([2**53 + 1], [0.5], r"\b0\b.*\b2\b.*\b53\b"),
        ([-(2**53) - 1], np.float32([0.5]), r"\b0\b"),
        ([-1], np.uint64([2**53 + 1]), r"\b1\b"),
        ([1], np.array(["a"]), r"\b1\b"),
        ([1], np.array([b"a"]), r"\b1\b"),
        ([1], np.array([b"a"], object), r"\b1\b"),
        ([1], np.array([1], "m8[s]"), r"\b1\b"),
        ([1], np.array(["2020-01-01"], "M8[s]"), r"\b1\b"),
    ],
)
def test_what_would_be_others_together_is_no_batch(name, first, second, words):
    """numpy makes floats of the digits of integers, and text of numbers."""
    dataset = Dataset.from_generator(lambda: [first, second])
    with pytest.raises(ValueError, match=words):
        list(BATCHED[name](dataset))


@pytest.mark.parametrize("name", BATCHED)
def test_numbers_of_several_dtypes_are_a_batch_that_has_them(name):
    dataset = Dataset.from_generator(lambda: [[2**53, -(2**53)], [0.5], np.uint64([7])])
    assert plain(BATCHED[name](dataset)) == [[2**53, -(2**53), 0.5], [7]]


@pytest.mark.shows("tf.data.Dataset.reduce")
def test_reduce():
    five = Dataset.range(5)
    assert five.reduce(np.int64(0), lambda s, x: s + x) == 10
    counted = five.reduce((np.int64(0), np.int64(0)), lambda s, x: (s[0] + x, s[1] + 1))
    assert counted == (10, 5)
    pairs = Dataset.zip(Dataset.range(3), Dataset.range(3))
    assert pairs.reduce(np.int64(0), lambda s, e: s + e[0] * e[1]) == 5
    assert Dataset.range(0).reduce(7, lambda s, x: s) == 7
    assert five.reduce(np.float32(0), lambda s, x: 2**24 + 1) == np.float32(2**24)
    mean = five.reduce(np.float32(0), lambda s, x: s + x / 5)
    assert (mean.dtype, mean) == (np.float32, 2)


# padded_batch


PADDED = [[[1, 0], [2, 2]], [[3, 3, 3, 0], [4, 4, 4, 4]]]


@pytest.mark.shows("tf.data.Dataset.padded_batch")
@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, PADDED),
        ({"padded_shapes": [-1]}, PADDED),
        (
            {"padded_shapes": 5},
            [[[1, 0, 0, 0, 0], [2, 2, 0, 0, 0]], [[3, 3, 3, 0, 0], [4, 4, 4, 4, 0]]],
        ),
        (
            {"padded_shapes": [None], "padding_values": np.int64(-1)},
            [[[1, -1], [2, 2]], [[3, 3, 3, -1], [4, 4, 4, 4]]],
        ),
    ],
)
def test_padded_batch(options, batches):
    assert plain(filled().padded_batch(2, **options)) == batches


def test_padded_batch_of_structures():
    pairs = Dataset.zip(filled(), filled().map(lambda x: x.astype(np.float32)))
    how = {"padded_shapes": ([4], [None]), "padding_values": (-1, 100.0)}
    first, _ = pairs.padded_batch(2, **how)
    assert first[0].tolist() == [[1, -1, -1, -1], [2, 2, -1, -1]]
    assert first[1].tolist() == [[1, 100], [2, 2]]
    assert first[1].dtype == np.float32
    kept = pairs.padded_batch(2, padding_values=(None, 7.0))
    assert next(iter(kept))[0].tolist() == [[1, 0], [2, 2]]
    assert len(list(filled().padded_batch(3, drop_remainder=True))) == 1
    scalars = Dataset.zip(Dataset.range(3), filled()).padded_batch(2)
    assert next(iter(scalars))[0].tolist() == [0, 1]
    by_name = Dataset.zip({"a": filled(), "b": filled()})
    (batch,) = by_name.padded_batch(9, padded_shapes={"b": [4], "a": [6]})
    assert (batch["a"].shape, batch["b"].shape) == ((4, 6), (4, 4))


def test_padded_text_and_booleans():
    texts = Dataset.from_tensor_slices([["a", "b"], ["c", "d"]])
    assert plain(texts.padded_batch(2, [3])) == [[["a", "b", ""], ["c", "d", ""]]]
    flags = Dataset.from_tensor_slices([[True]]).padded_batch(2, [3])
    assert plain(flags) == [[[True, False, False]]]
    records = Dataset.zip(Dataset.from_generator(lambda: [b"a\0", b"bb"]), filled())
    (batch,) = records.padded_batch(2)
    assert batch[0].tolist() == [b"a\0", b"bb"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"padded_shapes": [3]}, ValueError, "smaller size than the input element"),
        ({"padded_shapes": [5, 2]}, ValueError, "not compatible"),
        ({"padding_values": -1.5}, TypeError, "`padding_values`"),
        ({"padded_shapes": ([4], [4])}, None, ""),
    ],
)
def test_padding_that_does_not_fit(options, error, words):
    if error is None:  # a shape may be a tuple, and so may these: two axes of one
        error, words = TypeError, "int"
    with pytest.raises(error, match=words):
        list(filled().padded_batch(4, **options))
    pairs = Dataset.zip(filled(), filled())
    with pytest.raises(TypeError, match="`padded_shapes`"):
        list(pairs.padded_batch(2, padded_shapes=[4]))
    floats = Dataset.from_generator(lambda: [np.ones(1, "f4"), np.ones(2, "f4")])
    words = Dataset.from_generator(lambda: [np.array(["a"]), np.array(["b", "c"])])
    (batch,) = words.padded_batch(2, padding_values="<pad>")
    assert batch.tolist() == [["a", "<pad>"], ["b", "c"]]
    days = [np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-01"] * 2, "M8[D]")]
    (batch,) = Dataset.from_generator(lambda: days).padded_batch(
        2, padding_values=np.datetime64("NaT", "D")
    )
    assert np.isnat(batch).tolist() == [[False, True], [False, False]]
    for value in (1j, 1 + 0j, 1e39):  # no 0 and no inf
        with pytest.raises(TypeError, match="`padding_values`"):
            list(floats.padded_batch(2, padding_values=value))
    (batch,) = floats.padded_batch(2, padding_values=2**24 + 1)
    assert batch[0].tolist() == [1, np.float32(2**24 + 1)]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8), size=st.integers(1, 4)
)
def test_padding_keeps_the_rows(lengths, size):
    rows = [np.arange(1, n + 1) for n in lengths]
    batches = list(Dataset.from_generator(lambda: rows).padded_batch(size))
    found = [row for batch in batches for row in batch]
    for row, n in zip(found, lengths, strict=True):
        assert row[:n].tolist() == list(range(1, n + 1))
        assert not row[n:].any()
    longest = [max(lengths[i : i + size]) for i in range(0, len(lengths), size)]
    assert [batch.shape[1] for batch in batches] == longest


# interleave


def tens(x):
    """Of 3: 30, 31, 32."""
    return Dataset.range(x * 10, x * 10 + x)


@pytest.mark.shows("tf.data.Dataset.interleave")
def test_interleave_in_blocks():
    copies = Dataset.range(1, 6).interleave(
        lambda x: Dataset.from_tensors(x).repeat(6), cycle_length=2, block_length=4
    )
    assert plain(copies) == (
        [1] * 4 + [2] * 4 + [1] * 2 + [2] * 2 + [3] * 4 + [4] * 4
        + [3] * 2 + [4] * 2 + [5] * 6
    )  # fmt: skip
    assert copies.cardinality() == UNKNOWN_CARDINALITY
    assert plain(Dataset.range(4).flat_map(tens)) == [10, 20, 21, 30, 31, 32]


@pytest.mark.parametrize("calls", [None, 1, 3, -1])
def test_interleave_of_unlike_lengths(calls):
    uneven = Dataset.range(6).interleave(tens, 3, 2, num_parallel_calls=calls)
    wanted = [10, 20, 21, 30, 31, 40, 41, 32, 42, 43, 50, 51, 52, 53, 54]
    assert plain(uneven) == wanted
    assert plain(uneven) == wanted


def test_a_shuffle_in_it_has_an_order_for_each_element_alike_in_all_passes():
    mixed = Dataset.range(9).shuffle(9, seed=1)
    epochs = Dataset.range(3).flat_map(lambda epoch: mixed)
    orders = [tuple(plain(epochs)[i : i + 9]) for i in (0, 9, 18)]
    assert len(set(orders)) == 3
    assert all(sorted(order) == list(range(9)) for order in orders)
    assert plain(epochs) == [x for order in orders for x in order]


def test_a_pass_that_is_given_up_closes_all_that_is_open():
    closed = []

    def opened(x):
        def generate():
            try:
                yield from itertools.repeat(x)
            finally:
                closed.append(int(x))

        return Dataset.from_generator(generate)

    for calls in (None, 2):
        elements = iter(
            Dataset.range(9).interleave(opened, 3, num_parallel_calls=calls)
        )
        assert [int(next(elements)) for _ in range(4)] == [0, 1, 2, 0]
        elements.close()
        assert sorted(closed) == [0, 1, 2]
        closed.clear()


# all together, against plain Python


UNCOUNTED = {"filter", "flat_map", "batches"}
STEPS = {
    "filter": (lambda d, n: d.filter(lambda x: x % (n + 1) == 0),
               lambda m, n: [x for x in m if x % (n + 1) == 0]),
    "concatenate": (lambda d, n: d.concatenate(Dataset.range(n)),
                    lambda m, n: m + list(range(n))),
    "zip": (lambda d, n: Dataset.zip(d, Dataset.range(n)).map(lambda a, b: a + b),
            lambda m, n: [a + b for a, b in zip(m, range(n), strict=False)]),
    "cache": (lambda d, n: d.cache(), lambda m, n: m),
    "flat_map": (lambda d, n: d.flat_map(lambda x: Dataset.range(x, x + n % 3)),
                 lambda m, n: [x + i for x in m for i in range(n % 3)]),
    "batches": (lambda d, n: d.batch(n + 1).rebatch(2).unbatch(), lambda m, n: m),
    "map": (lambda d, n: d.map(lambda x: x + n, num_parallel_calls=n % 3 + 1),
            lambda m, n: [x + n for x in m]),
    "shard": (lambda d, n: d.shard(n + 1, n // 2), lambda m, n: m[n // 2 :: n + 1]),
    "repeat": (lambda d, n: d.repeat(n % 3), lambda m, n: m * (n % 3)),
    "take": (lambda d, n: d.take(2 * n), lambda m, n: m[: 2 * n]),
    "skip": (lambda d, n: d.skip(n), lambda m, n: m[n:]),
    "sums": (lambda d, n: d.batch(n + 1).map(np.sum),
             lambda m, n: [sum(m[i : i + n + 1]) for i in range(0, len(m), n + 1)]),
}  # fmt: skip


@pytest.mark.shows("tf.data.Dataset")
@pytest.mark.parametrize(
    "names", [["repeat", "skip", "sums", "take"], sorted(STEPS)], ids=["few", "all"]
)
@given(size=st.integers(0, 20), data=st.data())
def test_chains_of_all_against_lists(names, size, data):
    each = st.tuples(st.sampled_from(names), st.integers(0, 9))
    steps = data.draw(st.lists(each, max_size=4))
    dataset, model = Dataset.range(size), list(range(size))
    for name, n in steps:
        ours, theirs = STEPS[name]
        dataset, model = ours(dataset, n), theirs(model, n)
    assert plain(dataset) == model
    assert plain(dataset) == model  # a second pass
    if any(name in UNCOUNTED for name, _ in steps):
        assert dataset.cardinality() in (len(model), UNKNOWN_CARDINALITY)
    else:
        assert dataset.cardinality() == len(model)
