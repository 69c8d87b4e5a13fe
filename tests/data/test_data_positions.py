"""The place of an iterator: saved as text, found again in a dataset that is made anew.

What is expected is what the same pass draws that nobody interrupts.
"""

from __future__ import annotations

import itertools
import json
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from tiers import examples

from zstrat.data import Dataset, Options
from zstrat.errors import ClosedError, InvalidArgumentError

MOST = 40
"""Drawn of a pass, which may be without end."""


def state_of(iterator):
    """As it comes out of a file."""
    return json.loads(json.dumps(iterator.get_state()))


def plain(element):
    if isinstance(element, tuple):
        return tuple(map(plain, element))
    if isinstance(element, dict):
        return {key: plain(each) for key, each in element.items()}
    return np.asarray(element).tolist()


def drawn(iterator, count=MOST):
    return [plain(element) for element in itertools.islice(iterator, count)]


def number_in(*element):
    (first, *_) = element
    while isinstance(first, tuple | dict):
        first = next(iter(first.values() if isinstance(first, dict) else first))
    return int(np.sum(first))


def same(*element):
    return element if len(element) > 1 else element[0]


def rows(dataset):
    """Anything as numbers: what some operations take alone."""
    return dataset.map(number_in).map(np.int64)


def few(*element):
    return Dataset.range(number_in(*element) % 4).shuffle(3, seed=4)


CHAINS = {
    "map": lambda d, n, s: d.map(same),
    "map with threads": lambda d, n, s: d.map(same, num_parallel_calls=2),
    "batch": lambda d, n, s: d.batch(n),
    "whole batches": lambda d, n, s: d.batch(n, drop_remainder=True),
    "padded": lambda d, n, s: rows(d).map(np.arange).padded_batch(n, [None]),
    "unbatch": lambda d, n, s: d.batch(n, drop_remainder=True).unbatch(),
    "rebatch": lambda d, n, s: rows(d).batch(3).rebatch(n),
    "repeat": lambda d, n, s: d.repeat(n - 1),
    "shuffle": lambda d, n, s: d.shuffle(2 * n, seed=s),
    "one order": lambda d, n, s: d.shuffle(n, s, reshuffle_each_iteration=False),
    "take": lambda d, n, s: d.take(3 * n),
    "skip": lambda d, n, s: d.skip(n),
    "shard": lambda d, n, s: d.shard(n, n - 1),
    "enumerate": lambda d, n, s: d.enumerate(n),
    "zip": lambda d, n, s: Dataset.zip(d, Dataset.range(4 * n).shuffle(9, seed=s)),
    "concatenate": lambda d, n, s: d.concatenate(d),
    "filter": lambda d, n, s: d.filter(lambda *x: number_in(*x) % (n + 1) > 0),
    "flat_map": lambda d, n, s: d.flat_map(few),
    "interleave": lambda d, n, s: d.interleave(few, n, 2, num_parallel_calls=n),
    "cache": lambda d, n, s: d.cache(),
    "prefetch": lambda d, n, s: d.prefetch(n),
    "options": lambda d, n, s: d.with_options(Options()),
}
SOURCES = {
    "range": Dataset.range,
    "arrays": lambda n: Dataset.from_tensor_slices(
        {"a": np.arange(2 * n).reshape(-1, 2)}
    ),
    "generator": lambda n: Dataset.from_generator(lambda: iter(range(n))),
}
ENDS = {
    "": lambda d: d,
    "for ever": lambda d: d.repeat(),
    "in batches for ever": lambda d: d.batch(3).repeat(),
    "for ever in batches": lambda d: d.repeat().batch(3).prefetch(1),
}
steps = st.tuples(
    st.sampled_from(sorted(CHAINS)), st.integers(1, 4), st.sampled_from([None, 1, 2])
)


def is_by_chance(chain):
    """Whether nobody knows the order in which a cache was filled."""
    mixed = False
    for what, _, seed in chain:
        mixed |= what in ("shuffle", "zip") and seed is None
        if what == "cache" and mixed:
            return True
    return False


@examples(100)
@given(
    source=st.sampled_from(sorted(SOURCES)),
    size=st.integers(1, 12),
    chain=st.lists(steps, max_size=5),
    end=st.sampled_from(sorted(ENDS)),
    before=st.integers(0, 2),
    drawn_first=st.integers(0, 12),
    elsewhere=st.integers(0, 3),
)
def test_the_rest_is_that_of_a_pass_that_nobody_interrupts(
    source, size, chain, end, before, drawn_first, elsewhere
):
    def made():
        dataset = SOURCES[source](size)
        for what, number, seed in chain:
            dataset = CHAINS[what](dataset, number, seed)
        return ENDS[end](dataset)

    dataset = made()
    try:
        for _ in range(before):
            drawn(dataset, 2)
        iterator = iter(dataset)
        drawn(iterator, drawn_first)
    except ValueError:  # elements that make no batch
        reject()
    if is_by_chance(chain):
        with pytest.raises(InvalidArgumentError, match="a shuffle before `cache`"):
            iterator.get_state()
        return
    state = state_of(iterator)
    try:
        rest, later = drawn(iterator), [drawn(dataset) for _ in range(2)]
    except ValueError:
        reject()
    restored = made()
    other = iter(restored)
    drawn(other, elsewhere)
    other.set_state(state)
    assert other.get_state() == state
    assert drawn(other) == rest
    if all(seed is not None for _, _, seed in chain):
        assert [drawn(restored) for _ in range(2)] == later
    for again in (iterator, other):
        again.set_state(state)
        assert drawn(again) == rest
    iterator.close()
    other.close()


def test_a_file_that_is_a_cache_gives_the_rest(tmp_path):
    def made(number):
        mixed = Dataset.range(9).shuffle(9, seed=1).cache(tmp_path / number)
        return mixed.repeat(2).batch(2)

    iterator = iter(made("one"))
    drawn(iterator, 6)
    state, rest = state_of(iterator), drawn(iterator)
    for number in ("one", "other"):  # there already, and not yet
        other = iter(made(number))
        other.set_state(state)
        assert drawn(other) == rest


def test_files_give_the_rest(tmp_path):
    for number in range(3):
        lines = "".join(f"{number} {line}\n" for line in range(4))
        (tmp_path / f"{number}.txt").write_text(lines)

    def made():
        names = Dataset.list_files(f"{tmp_path}/*.txt", seed=3)
        return names.interleave(Dataset.from_text_lines, 2, 1).shuffle(5).repeat(2)

    iterator = iter(made())
    first = drawn(iterator, 15)
    other = iter(made())
    other.set_state(state_of(iterator))
    rest = drawn(other)
    assert rest == drawn(iterator)
    assert len(first + rest) == 24
    assert sorted(first[:12]) == sorted((first + rest)[12:])


# later passes


def test_a_shuffle_before_a_cache_counts_no_pass():
    def made():
        base = Dataset.range(8).shuffle(8, seed=3)
        return base, base.cache()

    base, cached = made()
    iterator = iter(cached)
    drawn(iterator, 1)
    state, later = state_of(iterator), drawn(base)
    base, cached = made()
    iter(cached).set_state(state)
    assert drawn(base) == later


def test_passes_that_threads_begin_at_once_have_numbers_of_their_own():
    dataset = Dataset.range(20).shuffle(20, seed=1)
    found = []

    def begin():
        found.extend([tuple(drawn(dataset)) for _ in range(20)])

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other = Dataset.range(20).shuffle(20, seed=1)
    assert sorted(found) == sorted(tuple(drawn(other)) for _ in range(80))


# what is counted


def test_what_is_given_back_is_not_counted():
    iterator = iter(Dataset.range(6))
    iterator.peek()
    assert iterator.get_state()["drawn"] == 0
    one, other = next(iterator), iterator.draw()
    iterator.unread(other)
    iterator.unread(one)
    state = state_of(iterator)
    assert drawn(iterator) == [0, 1, 2, 3, 4, 5]
    iterator.set_state(state)
    iterator.peek()
    iterator.set_state(state)
    assert drawn(iterator) == [0, 1, 2, 3, 4, 5]


def test_a_pass_goes_on_behind_an_error():
    broken = {3}

    def read(x):
        if int(x) in broken:
            raise OSError("bad sector")
        return x

    iterator = iter(Dataset.range(6).map(read))
    assert drawn(iterator, 3) == [0, 1, 2]
    with pytest.raises(OSError, match="bad sector") as caught:
        next(iterator)
    assert "of element 3 of this pass" in caught.value.__notes__[0]
    state = state_of(iterator)
    iterator.set_state(state)
    with pytest.raises(OSError, match="bad sector") as caught:
        next(iterator)
    assert "of element 3 of this pass" in caught.value.__notes__[0]
    broken.clear()
    iterator.set_state(state)
    assert drawn(iterator) == [3, 4, 5]


# what is not made


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda d: d.batch(4).prefetch(1),
        lambda d: d.batch(4).repeat(),
        lambda d: d.repeat().batch(4),
        lambda d: d.take(90).batch(4),
        lambda d: d.skip(3).batch(4),
        lambda d: d.enumerate().batch(4),
        lambda d: Dataset.range(3).concatenate(d).batch(4),
        lambda d: Dataset.zip(d, Dataset.range(100)).batch(4),
        lambda d: d.with_options(Options()).padded_batch(4, []),
    ],
)
def test_what_is_left_out_is_not_mapped(pipeline):
    calls = []

    def note(x):
        calls.append(int(x))
        return x

    def made():
        return pipeline(Dataset.range(100).shuffle(100).map(note))

    iterator = iter(made())
    drawn(iterator, 20)
    state = state_of(iterator)
    expected = plain(next(iterator))
    other = iter(made())
    iterator.close()
    calls.clear()
    other.set_state(state)
    assert plain(next(other)) == expected
    other.close()
    assert len(calls) <= 12  # of one batch, and those that are made ahead


# what is refused


def rest_of_two(dataset):
    iterator = iter(dataset)
    drawn(iterator, 2)
    return iterator


MIXED = Dataset.range(8).shuffle(8)
PARALLEL = Dataset.range(8).map(same, num_parallel_calls=2, deterministic=False)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (MIXED.cache(), "`cache`"),
        (Dataset.zip(Dataset.range(9), MIXED.cache()), "`cache`"),
        (Dataset.range(2).flat_map(lambda _: MIXED), "`interleave`"),
        (
            Dataset.range(2).flat_map(
                lambda _: Dataset.range(2).flat_map(lambda _: MIXED)
            ),
            "`interleave`",
        ),
        (PARALLEL, r"map\(deterministic=False\)"),
        (PARALLEL.shuffle(3, seed=1).batch(2), r"map\(deterministic=False\)"),
        (Dataset.range(2).flat_map(lambda _: PARALLEL), r"map\(deterministic=False\)"),
    ],
)
def test_an_order_that_does_not_come_again_is_refused(dataset, words):
    iterator = rest_of_two(dataset)
    with pytest.raises(InvalidArgumentError, match=words):
        iterator.get_state()
    iterator.close()


def numbers(size=24):
    return Dataset.range(size)


def generated():
    return Dataset.from_generator(lambda: iter(range(24)))


@pytest.mark.parametrize(
    ("saved", "here", "words"),
    [
        (numbers().batch(4), numbers().batch(3), "elements"),
        (numbers().batch(13), numbers().batch(14), r"batch\(13\).*batch\(14\)"),
        (numbers().repeat().batch(4), numbers().repeat().batch(3), r"batch\(4\)"),
        (generated().batch(4), generated().batch(3), r"batch\(4\).*batch\(3\)"),
        (generated().batch(4), generated(), r"batch\(4\)"),
        (generated(), generated().filter(lambda _: True), r"no operation.*filter"),
        (
            generated().batch(4),
            generated().batch(4, drop_remainder=True),
            "drop_remainder",
        ),
        (numbers(), numbers(25), r"\b24\b"),
        (numbers(), numbers().shuffle(3), r"\b3\b.*seed=None"),
        (numbers().shuffle(3, 1), numbers().shuffle(3, 2), r"seed=1\).*seed=2"),
        (numbers().shuffle(3, 1), numbers().shuffle(3), r"seed=1\).*seed=None"),
        (numbers().shuffle(3), numbers().shuffle(3, 1), r"seed=None\).*seed=1"),
        (numbers().shuffle(3, 1), numbers().shuffle(4, 1), r"\b3\b.*\b4\b"),
        (numbers().flat_map(few), numbers().interleave(few, 2), "interleave"),
    ],
)
def test_the_place_of_another_dataset_is_refused(saved, here, words):
    state = state_of(rest_of_two(saved))
    iterator = rest_of_two(here)
    before = iterator.get_state()
    with pytest.raises(InvalidArgumentError, match=words):
        iterator.set_state(state)
    assert iterator.misfit(state)
    assert iterator.get_state() == before


@pytest.mark.parametrize(
    "state",
    [
        {},
        None,
        [],
        "drawn",
        {"drawn": -1, "orders": [], "sizes": [6], "operations": []},
        {"drawn": 1.5, "orders": [], "sizes": [6], "operations": []},
        {"drawn": 10**30, "orders": [], "sizes": [], "operations": []},
        {"drawn": 1, "orders": [[None, []]], "sizes": [6], "operations": []},
        {"drawn": 1, "orders": [[None, ["1"]]], "sizes": [6], "operations": []},
        {"drawn": 1, "orders": [3], "sizes": [6], "operations": []},
        {"steps": 1, "passes": [], "split": []},
    ],
)
def test_what_is_no_place_is_refused(state):
    iterator = rest_of_two(Dataset.range(6))
    with pytest.raises(InvalidArgumentError):
        iterator.set_state(state)
    assert drawn(iterator) == [2, 3, 4, 5]


def test_nothing_repeated_for_ever_is_nothing_before_a_place_too():
    nothing = Dataset.range(3).filter(lambda _: False).repeat()
    iterator = iter(nothing.concatenate(Dataset.range(4)))
    assert drawn(iterator, 1) == [0]
    iterator.set_state(state_of(iterator))
    assert drawn(iterator) == [1, 2, 3]


def test_a_place_behind_the_end_is_refused():
    iterator = rest_of_two(Dataset.range(6))
    state = {**state_of(iterator), "drawn": 7}
    with pytest.raises(InvalidArgumentError):
        iterator.set_state(state)
    iterator.set_state({**state, "drawn": 6})
    assert drawn(iterator) == []


def test_a_closed_iterator_goes_nowhere():
    iterator = rest_of_two(Dataset.range(6))
    state = state_of(iterator)
    iterator.close()
    assert iterator.misfit(state) == "it was closed"
    with pytest.raises(ClosedError):
        iterator.set_state(state)


def test_a_dataset_is_shipped_as_before_whatever_was_found_out_about_it():
    dataset = Dataset.range(3).flat_map(few).shuffle(4)
    before = pickle.dumps(dataset)
    iterator = rest_of_two(dataset)
    state = state_of(iterator)
    iterator.set_state(state)
    assert pickle.dumps(dataset) == before
    other = iter(pickle.loads(before))
    other.set_state(state)
    assert drawn(other) == drawn(iterator)
