"""Datasets of several processes: who reads what, and how all come to one end."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import ranks
from tiers import examples

from zstrat.data import SHARD_HINT, AutoShardPolicy, Dataset, InputContext, Options
from zstrat.strategy import PerReplica, ProcessInputs

OFF, FILE, DATA = AutoShardPolicy.OFF, AutoShardPolicy.FILE, AutoShardPolicy.DATA


def values(element):
    found = element.values if isinstance(element, PerReplica) else (element,)
    return [np.asarray(part).tolist() for part in found]


class Lockstep:
    """Workers that are driven one step at a time, in one thread."""

    def __init__(self, workers, replicas):
        self.replicas = replicas
        self.workers = workers

    def run(self, make):
        """What each worker draws; ``make(inputs)`` is its dataset."""

        def program(strategy, rank):
            inputs = ProcessInputs(
                InputContext(self.workers, rank, self.workers * self.replicas),
                self.replicas,
                all_max=strategy._inputs().all_max,
            )
            return [values(element) for element in make(inputs)]

        return ranks(self.workers, program)


def opted(dataset, policy):
    return dataset.with_options(Options(policy))


def files(folder, lengths):
    first = 0
    paths = []
    for number, length in enumerate(lengths):
        paths.append(folder / f"{number}.npy")
        np.save(paths[-1], np.arange(first, first + length, dtype=np.int32))
        first += length
    return paths


# data


@examples(25)
@given(st.integers(0, 30), st.integers(1, 9), st.integers(2, 3), st.integers(1, 3))
def test_together_they_draw_every_row_once(total, size, workers, replicas):
    dataset = Dataset.range(total).batch(size)
    found = Lockstep(workers, replicas).run(lambda inputs: inputs.of_dataset(dataset))
    assert len({len(steps) for steps in found}) == 1
    rows = [x for steps in found for step in steps for part in step for x in part]
    assert sorted(rows) == list(range(total))
    for step in range(-(-total // size)):
        mine = [x for steps in found for part in steps[step] for x in part]
        assert sorted(mine) == list(range(total))[step * size : (step + 1) * size]


# files


@pytest.mark.shows("tf.data.experimental.AutoShardPolicy")
def test_each_worker_reads_files_of_its_own(tmp_path):
    dataset = Dataset.from_npy(files(tmp_path, [4, 4, 2])).batch(4)
    found = Lockstep(2, 1).run(lambda inputs: inputs.of_dataset(dataset))
    # Files 0 and 2, and file 1; two rows in every step, then none.
    assert found == [
        [[[0, 1]], [[2, 3]], [[8, 9]]],
        [[[4, 5]], [[6, 7]], [[]]],
    ]


@examples(25)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.integers(1, 9),
    st.integers(1, 2),
)
def test_files_of_any_length_end_in_one_step(tmp_path_factory, lengths, size, replicas):
    folder = tmp_path_factory.mktemp("files")
    dataset = Dataset.from_npy(files(folder, lengths)).batch(size)
    found = Lockstep(2, replicas).run(lambda inputs: inputs.of_dataset(dataset))
    starts = np.cumsum([0, *lengths])
    for worker, steps in enumerate(found):
        mine = [
            row
            for n in range(worker, len(lengths), 2)
            for row in range(starts[n], starts[n + 1])
        ]
        assert [x for step in steps for part in step for x in part] == mine
        assert all(len(step) == replicas for step in steps)
    assert len(found[0]) == len(found[1])
    assert any(part for steps in found for part in steps[-1]), "a step without data"


def test_an_empty_element_looks_like_the_others(tmp_path):
    np.savez(tmp_path / "0.npz", x=np.ones((4, 3), np.float16), y=np.arange(4))
    np.savez(tmp_path / "1.npz", x=np.ones((2, 3), np.float16), y=np.arange(2))
    dataset = Dataset.from_npz([tmp_path / "0.npz", tmp_path / "1.npz"]).batch(4)

    def program(strategy, rank):
        found = list(strategy.experimental_distribute_dataset(dataset))
        return [(e["x"].shape, e["x"].dtype.name, e["y"].shape) for e in found]

    long, short = ranks(2, program)
    assert long == [((2, 3), "float16", (2,))] * 2
    assert short == [((2, 3), "float16", (2,)), ((0, 3), "float16", (0,))]


def test_a_worker_that_never_had_an_element_says_so(tmp_path):
    paths = files(tmp_path, [0, 2])
    dataset = Dataset.from_npy(paths).batch(2)

    def program(strategy, rank):
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        if rank == 1:
            return values(next(iterator))
        with pytest.raises(ValueError, match="auto_shard_policy"):
            next(iterator)
        return None

    assert ranks(2, program) == [None, [[0]]]


def test_too_few_files_are_an_error_in_every_worker(tmp_path):
    dataset = opted(Dataset.from_npy(files(tmp_path, [4])).batch(2), FILE)

    def program(strategy, rank):
        with pytest.raises(ValueError, match="not enough files, 1 for 2 workers"):
            strategy.experimental_distribute_dataset(dataset)

    ranks(2, program)


# off and hints


@pytest.mark.shows("tf.data.experimental.AutoShardPolicy.OFF")
def test_without_sharding_every_worker_draws_all():
    dataset = opted(Dataset.range(7).batch(4), OFF)
    found = Lockstep(2, 1).run(lambda inputs: inputs.of_dataset(dataset))
    assert found == [[[[0, 1]], [[2, 3]], [[4, 5]], [[6]]]] * 2


def test_uneven_batches_take_turns():
    dataset = opted(Dataset.range(5).batch(5), OFF)
    found = Lockstep(2, 1).run(lambda inputs: inputs.of_dataset(dataset))
    assert found == [[[[0, 1, 2]], [[3, 4]]], [[[0, 1]], [[2, 3, 4]]]]
    dataset = opted(Dataset.range(3).batch(5), OFF)
    found = Lockstep(2, 1).run(lambda inputs: inputs.of_dataset(dataset))
    assert found == [[[[0, 1, 2]], [[]]], [[[0, 1]], [[2]]]]


def test_a_hint_says_where_to_shard():
    dataset = Dataset.range(8).shard(SHARD_HINT, SHARD_HINT).map(lambda x: x * 10)
    dataset = opted(dataset.batch(4), AutoShardPolicy.HINT)
    found = Lockstep(2, 1).run(lambda inputs: inputs.of_dataset(dataset))
    assert found == [
        [[[0, 20]], [[40, 60]]],
        [[[10, 30]], [[50, 70]]],
    ]


# functions


@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_functions_that_give_less_go_on_with_nothing(kind):
    def of(context):
        dataset = Dataset.range(2 + 3 * context.input_pipeline_id).batch(1)
        if kind == "known":
            return dataset
        return Dataset.from_generator(lambda: iter(dataset))

    found = Lockstep(2, 2).run(lambda inputs: inputs.of_function(of))
    assert found == [
        [[[0], [1]], [[], []], [[], []]],
        [[[0], [1]], [[2], [3]], [[4], []]],
    ]


def test_where_shapes_are_static_the_shortest_ends_all():
    def make(inputs):
        static = replace(inputs, static_shapes=True)
        return static.of_function(
            lambda context: Dataset.range(2 + 3 * context.input_pipeline_id).batch(1)
        )

    assert Lockstep(2, 2).run(make) == [[[[0], [1]]], [[[0], [1]]]]


def test_infinite_data_ask_once():
    def program(strategy, rank):
        made = strategy.distribute_datasets_from_function(
            lambda context: Dataset.range(3).repeat().batch(2)
        )
        iterator = iter(made)
        found = [next(iterator).tolist() for _ in range(2 + rank)]
        return found, len(strategy._channel.collective.board.calls)

    (_, calls), (found, _) = ranks(2, program)
    assert found == [[0, 1], [2, 0], [1, 2]]
    assert calls == 1


def test_the_element_spec_asks_nobody():
    def program(strategy, rank):
        made = strategy.distribute_datasets_from_function(
            lambda context: Dataset.range(4).batch(2)
        )
        if rank == 0:
            assert made.element_spec.shape == (2,)
        return [x.tolist() for x in made]

    assert ranks(2, program) == [[[0, 1], [2, 3]]] * 2
