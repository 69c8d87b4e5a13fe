"""Dataset: TF's rules, with numpy and plain Python as the judges."""

from __future__ import annotations

import gc
import itertools
import pickle
import subprocess
import sys
import threading
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.data import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
    Elements,
    InputContext,
)


def numbers(dataset):
    return [np.asarray(element).tolist() for element in dataset]


def test_jax_is_not_imported():
    code = "import sys, zstrat.data; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# input context


@pytest.mark.shows("v1 InputContext")
def test_input_context_defaults_and_words():
    context = InputContext()
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.num_replicas_in_sync == 1
    told = str(InputContext(num_input_pipelines=4, input_pipeline_id=2))
    assert "input pipeline id 2, total: 4" in told


@pytest.mark.shows("InputContext.get_per_replica_batch_size")
def test_per_replica_batch_size():
    context = InputContext(num_replicas_in_sync=2)
    assert context.get_per_replica_batch_size(12) == 6
    with pytest.raises(ValueError, match="`num_replicas_in_sync`"):
        context.get_per_replica_batch_size(13)


# sources


@pytest.mark.parametrize(
    "make",
    [
        Dataset.range,
        Dataset.from_tensors,
        Dataset.from_tensor_slices,
        lambda v: Dataset.from_tensors({"x": (np.ones(2), [1.0, v])}),
    ],
)
def test_a_variable_is_not_frozen_while_a_dataset_is_made(make):
    import zstrat as zs

    with pytest.raises(TypeError, match=r"numpy\(\)"):
        make(zs.Variable(np.int64(3)))


def test_functions_of_a_dataset_read_variables_when_they_run():
    import zstrat as zs

    factor = zs.Variable(np.int64(3))
    dataset = Dataset.range(3).map(lambda x: x * factor)
    factor.assign(5)
    assert numbers(dataset) == [0, 5, 10]


@pytest.mark.shows("tf.data.Dataset.range")
@pytest.mark.parametrize("args", [(5,), (2, 7), (7, 1, -2), (0,), (3, 3)])
def test_range(args):
    dataset = Dataset.range(*args)
    assert numbers(dataset) == list(range(*args))
    assert all(element.dtype == np.int64 for element in dataset)
    assert len(dataset) == len(range(*args))


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


@pytest.mark.shows("tf.data.Dataset.from_tensor_slices")
def test_slices_of_nested_structures():
    images, labels = np.arange(12.0).reshape(3, 2, 2), np.array([5, 6, 7])
    tree = {"a": images, "b": (labels, Pair(labels, images)), "c": [1, 2, 3]}
    elements = list(Dataset.from_tensor_slices(tree))
    assert len(elements) == 3
    np.testing.assert_array_equal(elements[1]["a"], images[1])
    assert elements[2]["b"][0] == 7
    assert isinstance(elements[2]["b"][1], Pair)
    assert elements[0]["c"] == 1  # a list is an array, as in TF


def test_slices_are_views():
    rows = np.zeros((4, 3))
    assert next(iter(Dataset.from_tensor_slices(rows))).base is rows


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ((), "`tensors`"),
        ({}, "`tensors`"),
        (np.float32(3), "`tensors`"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, r"\['x'\].*\b3\b.*\['y'\]"),
        ([np.zeros((3, 2)), np.zeros(3)], "for several components use a tuple"),
    ],
)
def test_slices_refuse(tensors, words):
    with pytest.raises(ValueError, match=words):
        Dataset.from_tensor_slices(tensors)


def test_generator_is_called_for_each_pass():
    calls = []

    def generate(n):
        calls.append(n)
        for i in range(n):
            yield {"i": i, "row": [i, i + 1]}

    dataset = Dataset.from_generator(generate, args=(2,))
    for _ in range(2):
        assert [e["row"].tolist() for e in dataset] == [[0, 1], [1, 2]]
    assert calls == [2, 2]
    with pytest.raises(TypeError, match="`generator`"):
        Dataset.from_generator(generate(2))
    with pytest.raises(TypeError, match="unknown"):
        len(dataset)


def refill():
    """A generator as fast ones are: it fills one buffer again and again."""
    buffer = np.zeros(2, np.int64)
    for i in range(6):
        buffer[:] = i
        yield {"x": buffer, "row": np.broadcast_to(buffer[:1], (3,))}


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda d: d,
        lambda d: d.batch(1),
        lambda d: d.batch(4),
        lambda d: d.prefetch(3),
        lambda d: d.shuffle(4, seed=1),
        lambda d: d.repeat(1).prefetch(2).batch(2),
    ],
)
def test_generator_that_fills_one_buffer(pipeline):
    elements = list(pipeline(Dataset.from_generator(refill)))
    for leaf in ("x", "row"):
        got = np.concatenate([np.unique(e[leaf]) for e in elements])
        assert sorted(got.tolist()) == list(range(6))


def test_map_that_fills_one_buffer():
    buffer = np.zeros(2, np.int64)

    def fill(x):
        buffer[:] = x
        return buffer

    assert numbers(Dataset.range(4).map(fill).batch(4)) == [[[i, i] for i in range(4)]]


def test_what_nobody_can_write_to_is_not_copied():
    fixed = np.arange(3)
    fixed.flags.writeable = False
    dataset = Dataset.from_generator(lambda: [fixed]).map(lambda x: x)
    assert next(iter(dataset)) is fixed


# transformations


@pytest.mark.shows("tf.data.Dataset.batch", "Dataset.batch(drop_remainder=)")
def test_batch_stacks_and_keeps_or_drops_the_rest():
    dataset = Dataset.from_tensor_slices((np.arange(7), np.arange(14.0).reshape(7, 2)))
    kept, dropped = list(dataset.batch(3)), list(dataset.batch(3, drop_remainder=True))
    assert [len(x) for x, _ in kept] == [3, 3, 1]
    assert [y.shape for _, y in dropped] == [(3, 2), (3, 2)]
    np.testing.assert_array_equal(kept[1][1], np.arange(6.0, 12.0).reshape(3, 2))
    assert next(iter(dataset.batch(2).batch(2)))[1].shape == (2, 2, 2)


def test_batch_of_generated_elements():
    dataset = Dataset.from_generator(lambda: ({"a": i, "n": None} for i in range(3)))
    (batch,) = dataset.batch(5)
    assert batch["a"].tolist() == [0, 1, 2]
    assert batch["n"] is None


@pytest.mark.parametrize(
    ("elements", "words"),
    [
        ([np.zeros(2), np.zeros(3)], r"\[2\].*\b1\b"),
        ([{"a": 1}, {"b": 1}], r"\['a'\].*\b1\b"),
        ([(1, 2), (1, 2, 3)], r"\b2\b.*\b1\b.*\b3\b"),
        ([None, 1], r"\b1\b"),
    ],
)
def test_batch_of_unlike_elements(elements, words):
    with pytest.raises(ValueError, match=words):
        list(Dataset.from_generator(lambda: elements).batch(2))


@pytest.mark.shows("tf.data.Dataset.repeat")
def test_repeat():
    dataset = Dataset.range(3)
    assert numbers(dataset.repeat(2)) == [0, 1, 2, 0, 1, 2]
    assert numbers(dataset.repeat(0)) == []
    for forever in (dataset.repeat(), dataset.repeat(-1)):
        assert numbers(forever.take(7)) == [0, 1, 2, 0, 1, 2, 0]
    assert numbers(Dataset.range(0).repeat()) == []  # and does not hang
    with pytest.raises(TypeError, match="infinite"):
        len(dataset.repeat())
    assert dataset.repeat()  # nevertheless true


@pytest.mark.shows("tf.data.Dataset.shuffle")
@given(size=st.integers(0, 40), buffer=st.integers(1, 50), seed=st.integers(0, 99))
def test_shuffle_is_a_permutation_within_its_buffer(size, buffer, seed):
    order = numbers(Dataset.range(size).shuffle(buffer, seed))
    assert sorted(order) == list(range(size))
    # Element i can be drawn only after it came into the buffer.
    assert all(number < place + buffer for place, number in enumerate(order))
    assert numbers(Dataset.range(size).shuffle(buffer, seed)) == order


def test_shuffle_is_uniform_with_a_full_buffer():
    firsts = [0] * 4
    dataset = Dataset.range(4).shuffle(4, seed=1)
    for _ in range(2000):
        firsts[numbers(dataset)[0]] += 1
    assert all(abs(count - 500) < 100 for count in firsts)  # five sigma


def test_shuffle_without_a_seed():
    same = Dataset.range(50).shuffle(50, reshuffle_each_iteration=False)
    assert numbers(same) == numbers(same) == numbers(pickle.loads(pickle.dumps(same)))
    assert numbers(Dataset.range(50).shuffle(50)) != list(range(50))


def test_take_and_skip_of_everything():
    assert numbers(Dataset.range(3).take(-1)) == [0, 1, 2]
    assert numbers(Dataset.range(3).skip(-1)) == []
    assert Dataset.range(3).repeat().take(5).cardinality() == 5
    assert Dataset.range(3).repeat().skip(5).cardinality() == INFINITE_CARDINALITY


def test_a_list_that_map_is_given_back_is_a_tuple():
    # tf.data does not stack it: its parts may have any shapes.
    pairs = Dataset.range(2).map(lambda x: [x, np.arange(x + 2)])
    made = list(pairs.map(lambda x, several: x + several.sum()))
    np.testing.assert_array_equal(made, [0 + 0 + 1, 1 + 0 + 1 + 2])
    nested = next(iter(pairs.map(lambda x, _: {"a": [x, x + 1]})))
    np.testing.assert_array_equal(nested["a"], [0, 1])


def test_map_spreads_tuples_only():
    pairs = Dataset.from_tensor_slices((np.arange(3), np.arange(3) * 10))
    assert numbers(pairs.map(lambda x, y: x + y)) == [0, 11, 22]
    tree = pairs.map(lambda x, y: {"sum": x + y, "both": [x, y]})
    assert [e["both"].tolist() for e in tree] == [[0, 0], [1, 10], [2, 20]]
    assert numbers(tree.map(lambda e: e["sum"])) == [0, 11, 22]
    with pytest.raises(TypeError, match="`map_func`"):
        pairs.map(3)


def test_enumerate():
    out = list(Dataset.range(5, 7).enumerate(start=3))
    assert out == [(3, 5), (4, 6)]
    assert out[0][0].dtype == np.int64


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.batch(0),
        lambda d: d.shuffle(0),
        lambda d: d.repeat(-2),
        lambda d: d.shard(0, 0),
        lambda d: d.shard(2, 2),
        lambda d: d.shard(2, -1),
        lambda d: d.take(-2),
        lambda d: d.skip(-2),
        lambda d: d.prefetch(-2),
    ],
)
def test_bad_numbers(call):
    with pytest.raises(ValueError, match="must be"):
        call(Dataset.range(3))


def test_cardinalities():
    assert Dataset.range(10).batch(3).cardinality() == 4
    assert Dataset.range(10).batch(3, drop_remainder=True).cardinality() == 3
    generated = Dataset.from_generator(lambda: iter([1]))
    for dataset in (
        generated,
        generated.batch(2),
        generated.take(1),
        generated.repeat(2),
    ):
        assert dataset.cardinality() == UNKNOWN_CARDINALITY
    assert Dataset.range(0).repeat().cardinality() == 0


def test_pipelines_pickle():
    dataset = Dataset.range(10).shuffle(4, seed=2).shard(2, 1).batch(2).prefetch(1)
    assert [b.tolist() for b in pickle.loads(pickle.dumps(dataset))] == [
        b.tolist() for b in dataset
    ]


# prefetch


def prefetchers():
    return [t for t in threading.enumerate() if t.name == "zstrat prefetch"]


def join_prefetchers():
    for thread in prefetchers():
        thread.join(60)
    return not prefetchers()


@pytest.mark.shows("tf.data.Dataset.prefetch")
def test_prefetch_is_bounded_and_in_order():
    made, room = [], threading.Semaphore(0)

    def generate():
        for i in itertools.count():
            made.append(i)
            if i == 3:
                room.release()  # 1 read + 2 in the buffer + this one in the hand
            yield i

    iterator = iter(Dataset.from_generator(generate).prefetch(2))
    assert next(iterator) == 0
    assert room.acquire(timeout=60)
    assert made == [0, 1, 2, 3]
    assert [int(next(iterator)) for _ in range(5)] == [1, 2, 3, 4, 5]
    del iterator
    gc.collect()
    assert join_prefetchers()


def test_prefetch_thread_ends_with_the_pass():
    for size in (1, 2, AUTOTUNE):
        assert numbers(Dataset.range(9).prefetch(size)) == list(range(9))
    assert join_prefetchers()
    assert numbers(Dataset.range(2).prefetch(0)) == [0, 1]


def test_closing_a_prefetching_pass_closes_the_generator():
    ended = threading.Event()

    def generate():
        try:
            yield from itertools.count()
        finally:
            ended.set()

    elements = Elements(Dataset.from_generator(generate).prefetch(1))
    assert elements.draw() == 0
    elements.close()
    assert ended.wait(60)
    assert join_prefetchers()
