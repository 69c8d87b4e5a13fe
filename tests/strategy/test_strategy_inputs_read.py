"""What is read of a dataset, and when: passes and their first draws, batches without
rows, static shapes, seeds, classes of elements and what describes them."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
from ranks import ranks

import zstrat as zs
from zstrat.data import AutoShardPolicy, Dataset, InputContext, Options, Recipe
from zstrat.errors import OutOfRangeError
from zstrat.strategy import ProcessInputs


def distributed(batches):
    inputs = ProcessInputs(InputContext(num_replicas_in_sync=2), 2)
    return list(inputs.of_dataset(batches))


def test_a_first_batch_without_rows_is_passed_over():
    (element,) = distributed([np.zeros((0, 2)), np.ones((4, 2))])
    assert [part.shape for part in element.values] == [(2, 2), (2, 2)]
    assert distributed([np.zeros((0, 2))]) == []


def with_policy(policy):
    options = Options()
    options.auto_shard_policy = policy
    return Dataset.range(8).batch(4).with_options(options)


def calls(strategy):
    return len(strategy._channel.collective.board.calls)


@pytest.mark.parametrize("policy", [AutoShardPolicy.DATA, AutoShardPolicy.OFF])
@pytest.mark.parametrize("endless", [False, True])
def test_every_pass_begins_with_a_question(policy, endless):
    def program(strategy, rank):
        data = with_policy(policy)
        made = strategy.experimental_distribute_dataset(
            data.repeat() if endless else data
        )
        asked = []
        for _ in range(2):
            before = calls(strategy)
            iterator = iter(made)
            found = np.asarray(next(iterator)).tolist()
            asked.append((found, calls(strategy) > before))
            iterator.close()
        return asked

    firsts = [[0, 1], [0, 1] if policy is AutoShardPolicy.OFF else [2, 3]]
    expected = [[(first, True)] * 2 for first in firsts]
    assert ranks(2, program) == expected


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    x: object
    y: object


def test_batches_of_classes_that_are_pytrees():
    batches = [Pair(np.arange(10.0).reshape(5, 2), np.arange(5)) for _ in range(2)]
    for source in (batches, iter(batches)):
        elements = distributed(source)
        assert len(elements) == 2
        for element in elements:
            assert isinstance(element, Pair)
            # Five rows for two: as many as fit in equal pieces, then the rest.
            assert [part.tolist() for part in element.y.values] == [[0, 1, 2], [3, 4]]
            rows = np.concatenate([np.asarray(part) for part in element.x.values])
            np.testing.assert_array_equal(rows, batches[0].x)


class Watched(Recipe):
    """Says in which thread its passes begin, and where their elements are made."""

    def __init__(self):
        self.begins, self.makes = [], []

    def begin_pass(self):
        self.begins.append(threading.current_thread())
        return self

    def items(self):
        self.makes.append(threading.current_thread())
        yield np.arange(4)

    def size(self):
        return 1


def check(distribute, watched):
    distributed = distribute(Dataset(watched))
    assert watched.begins == []
    passes = [iter(distributed), iter(distributed)]
    assert watched.begins == [threading.current_thread()] * 2
    assert [len(list(each)) for each in passes] == [1, 1]
    assert len(watched.begins) == len(watched.makes) == 2
    # The elements are made in advance all the same.
    assert threading.current_thread() not in watched.makes


def inputs(replicas, **more):
    return ProcessInputs(InputContext(num_replicas_in_sync=replicas), replicas, **more)


def test_passes_begin_in_the_thread_that_calls_iter():
    for replicas in (1, 2):
        check(inputs(replicas).of_dataset, Watched())
    check(lambda d: inputs(1).of_function(lambda context: d), Watched())


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (8, [[2, 2], [2, 2]]),
        (7, [[2, 2], [2, 1]]),
        (6, [[2, 2], [1, 1]]),
        (5, [[2, 2]]),
    ],
)
def test_a_step_without_rows_for_a_replica_is_none(rows, expected):
    """Batches of 4 for two replicas, 2 rows each: TF's rule looks for rows, and does
    not count them."""
    static = ProcessInputs(InputContext(1, 0, 2), 2, static_shapes=True)
    steps = static.of_dataset(Dataset.range(rows).batch(4))
    assert [[len(part) for part in step.values] for step in steps] == expected


def test_batches_that_leave_replicas_out_are_no_end_of_the_data():
    """Whose size nobody knows before: behind a map, or a rebatch."""
    static = ProcessInputs(InputContext(1, 0, 4), 4, static_shapes=True)
    for batches in (
        Dataset.range(13).batch(6).map(np.negative),
        Dataset.range(13).batch(2).rebatch(6),
    ):
        with pytest.raises(ValueError, match="6 rows leaves a replica without any"):
            list(static.of_dataset(batches))
    last = Dataset.range(14).batch(8).map(np.negative)  # 6 are left at the end
    assert len(list(static.of_dataset(last))) == 1


def test_the_warning_is_at_the_line_of_the_user():
    dataset = Dataset.range(8).shuffle(8).batch(4)

    def program(strategy, rank):
        del rank
        strategy.experimental_distribute_dataset(dataset)

    with pytest.warns(UserWarning, match="`shuffle`") as caught:
        ranks(2, program)
    assert {warning.filename for warning in caught} == {__file__}


def watched_inputs(replicas=1):
    return ProcessInputs(InputContext(1, 0, replicas), replicas)


def once(count):
    return (np.full(2, number) for number in range(count))


def firsts(elements):
    return [int(element[0]) for element in elements]


@pytest.mark.parametrize("drawn", [0, 1, 2, 6])
def test_of_a_generator_no_element_is_lost(drawn):
    distributed = zs.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(once(6))
    iterator = iter(distributed)
    found = firsts(next(iterator) for _ in range(drawn))
    assert distributed.element_spec.shape == (2,)
    assert found + firsts(iterator) == [0, 1, 2, 3, 4, 5]
    assert distributed.element_spec.shape == (2,)


def test_a_function_is_not_read_again_for_it():
    distributed = watched_inputs().of_function(lambda context: once(4))
    iterator = iter(distributed)
    assert firsts([next(iterator)]) == [0]
    assert distributed.element_spec.shape == (2,)
    assert firsts(iterator) == [1, 2, 3]


def test_a_pass_that_nobody_holds_has_described_it():
    passes = []

    def batches():
        passes.append(True)
        yield from once(3)

    distributed = watched_inputs().of_dataset(Dataset.from_generator(batches))
    iterator = iter(distributed)
    next(iterator)
    iterator.close()
    del iterator
    assert distributed.element_spec.shape == (2,)
    assert len(passes) == 1


def test_after_a_pass_that_was_closed_unread_a_fresh_one_tells():
    begun = []

    def batches():
        begun.append(True)
        if len(begun) > 1:
            yield from once(3)

    distributed = watched_inputs().of_dataset(Dataset.from_generator(batches))
    empty = iter(distributed)
    with pytest.raises(OutOfRangeError):
        distributed.element_spec  # noqa: B018 - that pass is under way
    empty.close()
    assert distributed.element_spec.shape == (2,)
    assert firsts(distributed) == [0, 1, 2]
    assert len(begun) == 2


@pytest.mark.parametrize("drop", [False, True])
def test_replicas_share_each_batch_of_the_permutation(drop):
    data = zs.data.Dataset.from_indexed(
        np.arange(22), 8, shuffle_seed=1, epochs=2, drop_remainder=drop
    )
    strategy = zs.MirroredStrategy(jax.devices()[:2])
    found = []
    for batch in strategy.experimental_distribute_dataset(data):
        rows = [np.asarray(x) for x in strategy.experimental_local_results(batch)]
        found.append(np.concatenate(rows).tolist())
    assert found == [batch.tolist() for batch in data]
