"""Records are bytes, and every one of them arrives: numpy's strings drop last zeros."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.data import Dataset

RECORDS = [b"ab\0\0", b"cdef", b"g\0", b""]


def read(path):
    del path
    yield from RECORDS


def files():
    return Dataset.from_files(["x"], read)


SOURCES = {
    "files": files,
    "prefetched": lambda: files().prefetch(2),
    "enumerated": lambda: files().enumerate().map(lambda number, record: record),
    "mapped": lambda: files().map(lambda record: record),
    "generated": lambda: Dataset.from_generator(lambda: iter(RECORDS)),
    "shuffled": lambda: files().prefetch(1).shuffle(1).repeat(1),
    "a list": lambda: Dataset.from_tensor_slices(RECORDS),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_byte_of_a_record_is_kept(source):
    assert list(source()) == RECORDS
    for size in (1, 3, 4):
        batches = list(source().batch(size))
        assert all(batch.dtype == object for batch in batches)
        assert [record for batch in batches for record in batch] == RECORDS
    (batch,) = source().batch(2).batch(2)
    assert batch.tolist() == [RECORDS[:2], RECORDS[2:]]


@given(st.lists(st.binary(max_size=6), min_size=1, max_size=6))
def test_records_within_structures_are_kept(records):
    def images(path):
        del path
        yield from ({"img": record, "n": len(record)} for record in records)

    (batch,) = Dataset.from_files(["x"], images).batch(len(records))
    assert batch["img"].dtype == object
    assert batch["img"].tolist() == records
    assert batch["n"].tolist() == [len(record) for record in records]
    (numbers, pairs) = next(iter(files().enumerate().batch(4)))
    assert (numbers.tolist(), pairs.tolist()) == ([0, 1, 2, 3], RECORDS)
    (split,) = files().take(1).map(lambda r: {"parts": [r, b"x\0"]})
    assert split["parts"].tolist() == [b"ab\0\0", b"x\0"]


def test_a_mapped_function_gets_records_as_they_are():
    for source in (files(), files().prefetch(1), files().map(lambda record: record)):
        assert [int(n) for n in source.map(len)] == [4, 4, 2, 0]
        lengths = source.batch(4).map(lambda b: np.array([len(r) for r in b]))
        assert next(iter(lengths)).tolist() == [4, 4, 2, 0]


def test_arrays_of_numpys_strings_stay_what_they_are():
    names = np.array([b"ab", b"c"])
    (batch,) = Dataset.from_tensor_slices(names).map(lambda name: name).batch(2)
    assert batch.dtype == names.dtype
    assert batch.tolist() == [b"ab", b"c"]
