"""The place of an iterator of a distributed dataset: counted in steps, for all workers.

What is expected is what the same pass gives that nobody interrupts.
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from process_inputs import inputs, values
from ranks import ranks
from tiers import examples

import zstrat as zs
from zstrat.data import SHARD_HINT, AutoShardPolicy, Dataset, Options
from zstrat.errors import ClosedError, InvalidArgumentError
from zstrat.strategy import InputOptions, InputReplicationMode

PER_REPLICA = InputOptions(
    experimental_fetch_to_device=False,
    experimental_replication_mode=InputReplicationMode.PER_REPLICA,
)
MOST = 20


def state_of(iterator):
    """As it comes out of a file."""
    return json.loads(json.dumps(iterator.get_state()))


def drawn(iterator, count=MOST):
    return [values(element) for element in itertools.islice(iterator, count)]


ENDS = {
    "": lambda d: d,
    "repeat": lambda d: d.repeat(2),
    "endless": lambda d: d.repeat(),
    "map": lambda d: d.map(lambda x: x + 1, num_parallel_calls=2),
    "ragged": lambda d: d.map(lambda x: x[: 1 + int(x[0]) % 2]),
    "mixed batches": lambda d: d.shuffle(3, seed=2),
    "filter": lambda d: d.filter(lambda x: x.sum() % 3 != 0),
    "take": lambda d: d.skip(1).take(4).prefetch(2),
    "concatenate": lambda d: d.concatenate(d),
    "rebatch": lambda d: d.rebatch(3, drop_remainder=True),
}
HOW = ("dataset", "function", "per replica")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for number in range(4):
        np.save(folder / f"{number}.npy", 10 * number + np.arange(number + 2))
    return sorted(folder.iterdir())


@examples(120)
@given(
    how=st.sampled_from(HOW),
    policy=st.sampled_from(sorted(AutoShardPolicy, key=lambda each: each.name)),
    size=st.integers(1, 17),
    batch=st.integers(1, 7),
    dropping=st.booleans(),
    end=st.sampled_from(sorted(ENDS)),
    worker=st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 2)]),
    local=st.integers(1, 3),
    static=st.booleans(),
    all_max=st.sampled_from([None, list]),
    before=st.integers(0, 9),
)
def test_the_rest_is_that_of_a_pass_that_nobody_interrupts(
    files,
    how,
    policy,
    size,
    batch,
    dropping,
    end,
    worker,
    local,
    static,
    all_max,
    before,
):
    workers, index = worker if how != "per replica" else (1, 0)

    def dataset(_=None):
        named = policy is AutoShardPolicy.FILE
        rows = Dataset.from_npy(files) if named else Dataset.range(size)
        if policy is AutoShardPolicy.HINT and how == "dataset":
            rows = rows.shard(SHARD_HINT, SHARD_HINT)
        mixed = rows.shuffle(5, seed=1).batch(batch, drop_remainder=dropping)
        return ENDS[end](mixed).with_options(Options(policy))

    def made():
        ours = inputs(
            local,
            workers,
            index,
            all_max=all_max,
            static_shapes=static,
            per_replica=True,
        )
        if how == "dataset":
            return ours.of_dataset(dataset())
        options = PER_REPLICA if how == "per replica" else None
        return ours.of_function(dataset, options)

    try:
        drawn(iter(made()))
    except ValueError:  # nothing that these replicas could draw
        return
    distributed = made()
    iterator = iter(distributed)
    drawn(iterator, before)
    state, rest, later = state_of(iterator), drawn(iterator), drawn(iter(distributed))
    restored = made()
    other = iter(restored)
    drawn(other, 2)
    other.set_state(state)
    assert other.get_state() == state
    assert drawn(other) == rest
    assert drawn(iter(restored)) == later
    for again in (iterator, other):
        again.set_state(state)
        assert drawn(again) == rest
        again.close()


def test_shapes_before_the_place_decide_of_the_last_step():
    """As in TF a step that lacks an element is one, where shapes differ."""

    def ragged(_):
        return Dataset.range(7).map(lambda x: np.full(2 if x == 0 else 1, x))

    for options in (None, PER_REPLICA):

        def made(options=options):
            ours = inputs(2, per_replica=True)
            return iter(ours.of_function(ragged, options))

        whole = made()
        drawn(whole, 3)
        state, rest = state_of(whole), drawn(whole)
        restored = made()
        restored.set_state(state)
        assert drawn(restored) == rest
    assert rest[-1] == [[6], [6]]  # of one pipeline for each replica


@pytest.mark.parametrize("policy", [AutoShardPolicy.AUTO, AutoShardPolicy.OFF])
@pytest.mark.parametrize("repeated", [False, True])
def test_what_is_left_out_is_not_mapped(policy, repeated):
    calls = []

    def note(x):
        calls.append(int(x))
        return x

    def made():
        rows = Dataset.range(80).shuffle(80).map(note).batch(4)
        rows = rows.repeat() if repeated else rows
        return iter(inputs(2).of_dataset(rows.with_options(Options(policy))))

    iterator = made()
    drawn(iterator, 35 if repeated else 15)
    state = state_of(iterator)
    expected = drawn(iterator, 1)
    iterator.close()
    other = made()
    calls.clear()
    other.set_state(state)
    assert drawn(other, 1) == expected
    other.close()
    assert len(calls) <= 20  # of one step, and those that are made ahead


def test_an_iterator_tells_of_its_elements_wherever_it_is():
    def made():
        return iter(inputs(2).of_dataset(Dataset.range(4).batch(2)))

    whole = made()
    spec = repr(whole.element_spec)
    drawn(whole)
    for state in (state_of(made()), state_of(whole)):
        iterator = made()
        iterator.set_state(state)
        assert repr(iterator.element_spec) == spec
        iterator.close()


def test_what_a_failed_step_has_drawn_is_not_counted():
    distributed = inputs(1).of_dataset(Dataset.range(8).batch(2))
    plain = iter(Dataset.range(8).batch(2))
    dist = iter(distributed)
    for iterator, drawing in ((dist, dist), (plain, zs.StepIterator(plain))):
        is_broken = True

        @zs.function
        def step(iterator):
            found = next(iterator), next(iterator)
            if is_broken:  # noqa: B023
                raise LookupError("a bad batch")
            return found

        with pytest.raises(LookupError):
            step(drawing)
        state = state_of(iterator)
        is_broken = False
        first = np.concatenate(step(drawing)).tolist()
        assert first == [0, 1, 2, 3]
        iterator.set_state(state)
        assert np.concatenate(step(drawing)).tolist() == first
        iterator.close()


# what is refused


def batches(size, *, rows=24, **how):
    return Dataset.range(rows).shuffle(rows, **how).batch(size)


@pytest.mark.parametrize("local", [1, 2])
def test_an_iterator_that_is_read_once_has_no_place(local):
    source = (np.arange(2) for _ in range(4))
    iterator = iter(inputs(local).of_dataset(source))
    drawn(iterator, 1)
    with pytest.raises(InvalidArgumentError, match="from_generator"):
        iterator.get_state()


def test_workers_without_a_common_order_have_no_place():
    for how in ({}, {"reshuffle_each_iteration": False}):
        ours = inputs(1, 2, 0, all_max=list)
        iterator = iter(ours.of_function(lambda _, how=how: batches(4, **how)))
        drawn(iterator, 1)
        with pytest.raises(InvalidArgumentError, match="seed="):
            iterator.get_state()


def function_of(dataset):
    return lambda ours: ours.of_function(lambda _: dataset)


def dataset_of(dataset):
    return lambda ours: ours.of_dataset(dataset)


@pytest.mark.parametrize(
    ("saved", "here", "words"),
    [
        ((2, 1, dataset_of(batches(4))), (2, 1, dataset_of(batches(6))), "elements"),
        (
            (2, 2, dataset_of(batches(4, seed=1))),
            (2, 2, dataset_of(batches(6, seed=1))),
            r"batch\(4\)",
        ),
        (
            (2, 2, dataset_of(batches(4, seed=1))),
            (2, 2, dataset_of(batches(4, seed=2))),
            "seed=2",
        ),
        (
            (2, 1, function_of(batches(4, seed=1))),
            (3, 1, function_of(batches(4, seed=1))),
            r"\b2\b.*\b3\b",
        ),
        (
            (1, 2, function_of(batches(4, seed=1))),
            (1, 2, function_of(Dataset.range(8).batch(4))),
            r"\b1\b",
        ),
        (
            (1, 1, function_of(batches(4, seed=1))),
            (1, 2, function_of(batches(4, seed=1))),
            r"\b1\b.*\b2\b",
        ),
    ],
)
def test_the_place_of_another_dataset_is_refused(saved, here, words):
    (local, workers, of), (local_here, workers_here, of_here) = saved, here
    all_max = list if workers_here > 1 else None
    before = iter(of(inputs(local, workers, 0, all_max=all_max)))
    drawn(before, 2)
    iterator = iter(of_here(inputs(local_here, workers_here, 0, all_max=all_max)))
    drawn(iterator, 1)
    with pytest.raises(InvalidArgumentError, match=words):
        iterator.set_state(state_of(before))
    assert iterator.get_state()["steps"] == 1
    assert drawn(iterator, 1)


def test_a_closed_iterator_goes_nowhere():
    iterator = iter(inputs(2).of_dataset(batches(4)))
    state = state_of(iterator)
    iterator.close()
    with pytest.raises(ClosedError):
        iterator.set_state(state)
    with pytest.raises(InvalidArgumentError, match="'drawn'"):
        iter(inputs(2).of_dataset(batches(4))).set_state({"drawn": 1})
    with pytest.raises(InvalidArgumentError, match=r"'steps'.*'drawn'"):
        iter(inputs(2).of_dataset(batches(4))).set_state({**state, "steps": 10**30})


# several workers


def test_workers_shard_the_rest_together():
    def program(strategy, rank, state=None):
        dataset = batches(6, rows=15, seed=1).repeat(2)
        distributed = strategy.experimental_distribute_dataset(dataset)
        iterator = iter(distributed)
        found = [x.tolist() for x in itertools.islice(iterator, 4 * (not state))]
        if state is not None:
            iterator.set_state(state)
        place = state_of(iterator)
        found += [x.tolist() for x in iterator]
        return found, place, [x.tolist() for x in distributed]

    whole = ranks(2, program)
    state = whole[0][1]
    assert all(place == state for _, place, _ in whole)
    rest = ranks(2, lambda strategy, rank: program(strategy, rank, state))
    for rank in range(2):
        assert rest[rank] == (whole[rank][0][4:], state, whole[rank][2])
    steps = itertools.chain(whole[0][0], whole[1][0])
    assert sorted(itertools.chain(*steps)) == sorted([*range(15)] * 2)
