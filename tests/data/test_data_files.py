"""Datasets that are read from files: lines, arrays, archives, records, others."""

from __future__ import annotations

import pathlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zstrat.data as zd
from zstrat.data import AutoShardPolicy, Dataset, Options, Worker, allotted


def text_files(folder, *contents):
    paths = [folder / f"{n}.txt" for n in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


# text


@pytest.mark.shows("tf.data.TextLineDataset")
def test_lines_come_without_their_ends(tmp_path):
    paths = text_files(tmp_path, b"one\ntwo\r\n\nthree", b"", b"four\n")
    dataset = Dataset.from_text_lines(paths)
    assert list(dataset) == [b"one", b"two", b"", b"three", b"four"]
    assert list(dataset) == list(zd.TextLineDataset([str(path) for path in paths]))
    assert list(Dataset.from_text_lines(paths[0]))[:1] == [b"one"]
    assert dataset.cardinality() == zd.UNKNOWN_CARDINALITY


def test_batches_of_records_keep_every_byte(tmp_path):
    (path,) = text_files(tmp_path, b"a\0\nbcd\n\0\n")
    (batch,) = Dataset.from_text_lines(path).shuffle(1).batch(3)
    assert batch.dtype == object
    assert batch.tolist() == [b"a\0", b"bcd", b"\0"]


def test_lines_are_mapped_to_numbers(tmp_path):
    paths = text_files(tmp_path, b"1,2\n3,4\n", b"5,6\n")
    dataset = Dataset.from_text_lines(paths)
    dataset = dataset.map(lambda line: np.array(line.split(b","), np.float32))
    assert [x.tolist() for x in dataset.batch(2)] == [[[1, 2], [3, 4]], [[5, 6]]]


def test_a_missing_file_is_named_when_it_is_read(tmp_path):
    dataset = Dataset.from_text_lines(tmp_path / "gone.txt")
    with pytest.raises(FileNotFoundError, match=r"gone\.txt"):
        next(iter(dataset))


@pytest.mark.parametrize("names", [[], ()])
def test_no_files_are_refused(names):
    with pytest.raises(ValueError, match="`filenames`"):
        Dataset.from_text_lines(names)
    with pytest.raises(TypeError):
        Dataset.from_npy([3])


# arrays


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.integers(1, 7),
    st.integers(0, 3),
)
def test_rows_of_arrays_are_those_of_the_files_in_order(
    tmp_path_factory, lengths, batch, seed
):
    folder = tmp_path_factory.mktemp("arrays")
    paths, rows = [], 0
    for number, length in enumerate(lengths):
        paths.append(folder / f"{number}.npy")
        np.save(paths[-1], np.arange(rows, rows + length) * 10)
        rows += length
    dataset = Dataset.from_npy(paths)
    assert [int(x) for x in dataset] == [10 * n for n in range(rows)]
    mixed = [x for b in dataset.shuffle(100, seed=seed).batch(batch) for x in b]
    assert sorted(mixed) == [10 * n for n in range(rows)]
    order = [int(x) for x in dataset.shuffle(100, seed=seed)]
    assert [int(x) for x in mixed] == order


def test_archives_give_dicts_of_rows(tmp_path):
    x = np.arange(12.0).reshape(6, 2)
    for number in range(2):
        mine = slice(3 * number, 3 * number + 3)
        np.savez(tmp_path / f"{number}.npz", x=x[mine], y=np.arange(6)[mine])
    dataset = Dataset.from_npz(sorted(tmp_path.glob("*.npz")))
    first = next(iter(dataset))
    np.testing.assert_array_equal(first["x"], [0, 1])
    batches = list(dataset.batch(4))
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in batches]), x)
    assert [b["y"].tolist() for b in batches] == [[0, 1, 2, 3], [4, 5]]


def test_arrays_of_a_file_need_the_same_rows(tmp_path):
    np.savez(tmp_path / "bad.npz", x=np.zeros(3), y=np.zeros(2))
    with pytest.raises(ValueError, match=r"bad\.npz.*\b3\b.*\b2\b"):
        next(iter(Dataset.from_npz(tmp_path / "bad.npz")))
    np.save(tmp_path / "scalar.npy", np.float32(1))
    with pytest.raises(ValueError, match=r"scalar\.npy"):
        next(iter(Dataset.from_npy(tmp_path / "scalar.npy")))


def test_files_that_hold_something_else_are_named(tmp_path):
    objects = np.array([{}], object)
    np.save(tmp_path / "objects.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "objects.npz", x=objects)
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "text.npy").write_text("1 2 3")
    for read, name in [
        (Dataset.from_npy, "objects.npy"),
        (Dataset.from_npy, "text.npy"),
        (Dataset.from_npy, "objects.npz"),
        (Dataset.from_npz, "objects.npz"),
        (Dataset.from_npz, "one.npy"),
    ]:
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            next(iter(read(tmp_path / name)))


# records


def write_tfrecords(path, records):
    """The format: length and its check, record and its check; grain reads no check."""
    with open(path, "wb") as file:
        file.writelines(
            struct.pack("<QI", len(record), 0) + record + b"\0" * 4
            for record in records
        )


@pytest.mark.shows("tf.data.TFRecordDataset")
def test_tfrecords_are_read_by_grain(tmp_path):
    pytest.importorskip("grain", reason="grain is not installed")
    write_tfrecords(tmp_path / "a", [b"one\0\0", b""])
    write_tfrecords(tmp_path / "b", [b"three"])
    dataset = zd.TFRecordDataset([tmp_path / "a", tmp_path / "b"])
    assert list(dataset) == [b"one\0\0", b"", b"three"]
    (batch,) = dataset.batch(5)
    assert batch.tolist() == [b"one\0\0", b"", b"three"]


def test_a_torn_tfrecord_file_is_named(tmp_path):
    pytest.importorskip("grain", reason="grain is not installed")
    write_tfrecords(tmp_path / "torn", [b"whole", b"in two"])
    content = (tmp_path / "torn").read_bytes()
    (tmp_path / "torn").write_bytes(content[:-5])
    records = iter(Dataset.from_tfrecords(tmp_path / "torn"))
    assert next(records) == b"whole"
    with pytest.raises(ValueError, match="TFRecord"):
        next(records)


@pytest.mark.parametrize("length", [b"\xff" * 8, b"\0" * 5 + b"\xff\xff\0", b"text"])
def test_a_file_that_is_no_tfrecord_file_is_named_in_few_words(tmp_path, length):
    pytest.importorskip("grain", reason="grain is not installed")
    (tmp_path / "other").write_bytes(length + b"x" * 10_000)
    with pytest.raises(ValueError, match="TFRecord"):
        next(iter(Dataset.from_tfrecords(tmp_path / "other")))


def test_without_grain_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "grain.experimental", None)
    with pytest.raises(ImportError, match=r"\[grain\]"):
        Dataset.from_tfrecords("some.tfrecord")


# any other


def test_a_reader_of_ones_own(tmp_path):
    paths = text_files(tmp_path, b"1 2", b"3")
    opened = []

    def read(path):
        opened.append(path)
        buffer = np.zeros(1)
        for word in pathlib.Path(path).read_text().split():
            buffer[0] = float(word)
            yield {"x": buffer}

    dataset = Dataset.from_files(paths, read).batch(2)
    assert [b["x"].tolist() for b in dataset] == [[[1], [2]], [[3]]]
    assert len(list(dataset)) == 2
    assert opened == [str(path) for path in paths] * 2
    with pytest.raises(TypeError, match="`read`"):
        Dataset.from_files(paths, "text")


# sharing


def lines_of(dataset, workers):
    return [
        [
            line
            for batch in allotted(dataset, Worker(workers, n)).elements()
            for line in batch
        ]
        for n in range(workers)
    ]


def test_files_are_dealt_out_to_the_workers(tmp_path):
    paths = text_files(tmp_path, *[b"%d\n%d'" % (n, n) for n in range(5)])
    dataset = Dataset.from_text_lines(paths).batch(3)
    allotment = allotted(dataset, Worker(2, 1))
    assert allotment.policy is AutoShardPolicy.FILE
    assert allotment.batch_size == 3
    assert not allotment.ends_with_others
    assert lines_of(dataset, 2) == [
        [b"0", b"0'", b"2", b"2'", b"4", b"4'"],
        [b"1", b"1'", b"3", b"3'"],
    ]


def test_the_files_are_found_behind_everything_else(tmp_path):
    paths = text_files(tmp_path, *[b"%d\n" % n for n in range(4)])
    dataset = Dataset.from_text_lines(paths).map(int).shuffle(9, seed=1).repeat(2)
    dataset = dataset.batch(2).prefetch(1).with_options(Options(AutoShardPolicy.FILE))
    found = [sorted(each) for each in lines_of(dataset, 2)]
    assert found == [[0, 0, 2, 2], [1, 1, 3, 3]]


def test_too_few_files_are_data_or_an_error(tmp_path):
    dataset = Dataset.from_text_lines(text_files(tmp_path, b"1\n2\n")).batch(2)
    allotment = allotted(dataset, Worker(2, 1))
    assert allotment.policy is AutoShardPolicy.DATA
    assert allotment.ends_with_others
    files = dataset.with_options(Options(AutoShardPolicy.FILE))
    with pytest.raises(ValueError, match="not enough files, 1 for 2 workers"):
        allotted(files, Worker(2, 1))
    with pytest.raises(ValueError, match=r"AutoShardPolicy\.FILE.*DATA"):
        allotted(
            Dataset.range(4).batch(2).with_options(Options(AutoShardPolicy.FILE)),
            Worker(2, 0),
        )
