"""How batches of one process are cut for its replicas, and which last step is one."""

import numpy as np
import pytest
from process_inputs import drawn, inputs, parts_of

from zstrat.data import AutoShardPolicy, Dataset, Options


@pytest.mark.parametrize(
    ("rows", "replicas", "drop", "policy", "expected"),
    [
        # TensorFlow's guide to distributed input has the first three of these.
        (6, 2, False, None, [[[0, 1], [2, 3]], [[4], [5]]]),
        (4, 5, False, None, [[[0], [1], [2], [3], []]]),
        (8, 3, False, None, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
        (7, 3, True, "AUTO", [[[0, 1], [2, 3], []]]),
        (7, 3, False, "DATA", [[[0, 1], [2, 3], []], [[4], [5], [6]]]),
        (7, 3, False, "OFF", [[[0, 1], [2], [3]], [[4, 5], [6], []]]),
        (7, 3, False, "FILE", [[[0, 1], [2], [3]], [[4, 5], [6], []]]),
        (7, 3, False, "HINT", [[[0, 1], [2], [3]], [[4, 5], [6], []]]),
    ],
)
def test_batches_of_one_worker_are_cut_as_by_tensorflow(
    rows, replicas, drop, policy, expected
):
    """The values are those of tf.distribute.MirroredStrategy of TensorFlow 2.21."""
    dataset = Dataset.range(rows).batch(4, drop_remainder=drop)
    if policy is not None:
        dataset = dataset.with_options(Options(AutoShardPolicy[policy]))
    assert drawn(inputs(replicas).of_dataset(dataset)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x: x.map(np.negative), [[0, -1, -2], [-3, -4], [-5, -6], [-7, -8]]),
        (lambda x: x.map(np.copy).shuffle(1), [[0, 1, 2], [3, 4], [5, 6], [7, 8]]),
        (lambda x: x.rebatch(9), [[0, 1, 2], [3, 4], [5, 6], [7, 8]]),
    ],
)
def test_promised_sizes_are_known_behind_map_and_rebatch(change, expected):
    """The values are those of tf.distribute.MirroredStrategy of TensorFlow 2.21, under
    a policy that does not shard."""
    batches = Dataset.range(13).batch(9, drop_remainder=True)
    dataset = change(batches).with_options(Options(AutoShardPolicy.OFF))
    assert drawn(inputs(4).of_dataset(dataset)) == [expected]


@pytest.mark.parametrize(
    ("dataset", "sizes"),
    [
        (Dataset.range(9).batch(9, True).map(lambda x: x[:6]), [2, 2, 2, 0]),
        (Dataset.range(6, 7).map(lambda n: np.ones(n)), [2, 2, 2, 0]),
    ],
)
def test_batches_of_other_sizes_than_promised_are_cut_by_themselves(dataset, sizes):
    """As by TF where a function makes arrays of a length that it cannot know."""
    dataset = dataset.with_options(Options(AutoShardPolicy.OFF))
    (step,) = inputs(4).of_dataset(dataset)
    assert [len(part) for part in parts_of(step)] == sizes


def test_batches_of_files_are_cut_by_sizes_as_by_tensorflow(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{n}\n" for n in range(7)))
    numbers = Dataset.from_text_lines(path).map(int).batch(4)
    found = drawn(inputs(3).of_dataset(numbers))
    assert found == [[[0, 1], [2], [3]], [[4, 5], [6], []]]


def test_a_step_that_lacks_elements_of_promised_shapes_ends_the_data():
    """As MirroredStrategy of TensorFlow 2.21: who drops remainders gets no empty
    batch, whose mean is not a number, and others no zero in place of a number."""

    def steps(dataset, replicas=2):
        found = inputs(replicas).of_function(lambda _: dataset)
        return [[np.shape(part) for part in parts_of(step)] for step in found]

    rows = Dataset.range(12)
    assert steps(rows.batch(4, drop_remainder=True)) == [[(4,), (4,)]]
    assert steps(rows.map(abs).batch(4, drop_remainder=True)) == [[(4,), (4,)]]
    assert steps(rows.batch(4, True).map(np.negative).prefetch(1)) == [[(4,), (4,)]]
    assert steps(rows.batch(4, drop_remainder=True).rebatch(4)) == [[(4,), (4,)]]
    ragged = rows.map(lambda n: np.ones(n % 3))
    for shapes, last in ((3, []), ([3], []), (None, [[(4, 2), (0, 2)]])):
        padded = ragged.padded_batch(4, shapes, drop_remainder=True)
        whole = [(4, 2), (4, 2)] if shapes is None else [(4, 3), (4, 3)]
        assert steps(padded) == [whole, *last]
    assert steps(rows.batch(6, drop_remainder=True).rebatch(4)) == [
        [(4,), (4,)],
        [(4,), (0,)],
    ]
    assert steps(rows.take(3)) == [[(), ()]]
    assert steps(rows.batch(4)) == [[(4,), (4,)], [(4,), (0,)]]
    assert steps(rows.batch(5)) == [[(5,), (5,)], [(2,), (0,)]]
    assert steps(rows.batch(5, drop_remainder=True), replicas=3) == []


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda rows: rows.skip(1).take(3).map(np.arange), [[1, 2], [3, 0]]),
        (lambda rows: rows.batch(4, True).map(lambda x: x[x > 0]), [[3, 4], [4, 0]]),
        (lambda rows: rows.batch(4, True).map(lambda x: x[1:]), [[3, 3]]),
        (lambda rows: rows.take(3).map(abs), [[(), ()]]),
        (lambda rows: rows.take(3).batch(3).map(abs).unbatch(), [[(), ()]]),
        (lambda rows: rows.take(3).batch(2, True).map(abs).unbatch(), [[(), ()]]),
        (lambda rows: rows.batch(4).map(abs), [[4, 4], [4, 0]]),
        (lambda rows: rows.batch(4).map(np.sum), [[(), ()]]),
        (
            lambda rows: rows.batch(4, True).concatenate(rows.take(2).batch(2)),
            [[4, 4], [4, 2]],
        ),
    ],
)
def test_what_functions_make_shows_whether_a_last_step_is_one(make, expected):
    """The shapes are those of MirroredStrategy of TensorFlow 2.21, which traces."""
    found = [
        [np.shape(part)[:1] or () for part in parts_of(step)]
        for step in inputs(2).of_function(lambda _: make(Dataset.range(12)))
    ]
    shapes = [[shape and shape[0] for shape in step] for step in found]
    assert shapes == expected


@pytest.mark.parametrize(
    ("make", "last"),
    [
        (lambda rows: rows.batch(4, True), []),
        (lambda rows: rows.map(abs).batch(4, True).prefetch(1), []),
        (lambda rows: rows.take(1).flat_map(lambda _: rows.batch(4, True)), []),
        (lambda rows: rows.batch(4), [4, 0]),
        (lambda rows: rows.batch(4, True).map(lambda x: x[x > 0]), [4, 0]),
        (lambda rows: rows.take(3).map(np.float32), []),
        (lambda rows: rows.skip(1).take(3).map(np.arange), [3, 0]),
    ],
)
def test_what_datasets_in_turn_promise_is_what_was_promised_of_those_that_were_made(
    make, last
):
    """The last steps are those of MirroredStrategy of TensorFlow 2.21."""
    rows = Dataset.range(12)
    for count, cycle in ((1, 1), (3, 2)):  # each of three batches or numbers
        made = Dataset.range(count).interleave(lambda _: make(rows), cycle)
        steps = [*inputs(2).of_function(lambda _, made=made: made)]
        assert len(steps) == 3 * count // 2 + bool(last)
        if last:
            assert [len(part) for part in parts_of(steps[-1])] == last
