"""Rows of Parquet files: types, batches of any size, row groups distributed."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from zstrat.data import AutoShardPolicy, Dataset, Options, TensorSpec, Worker, allotted

arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")


def write(path, columns, group=4):
    parquet.write_table(arrow.table(columns), path, row_group_size=group)
    return path


def numbers(folder, lengths, group=4):
    """Files whose rows are counted through."""
    first, paths = 0, []
    for n, length in enumerate(lengths):
        rows = np.arange(first, first + length)
        paths.append(write(folder / f"{n}.parquet", {"n": rows, "x": rows / 2}, group))
        first += length
    return paths


@pytest.fixture
def all_kinds(tmp_path):
    kinds = {
        "int": arrow.array([1, 2, 3], arrow.int16()),
        "float": arrow.array([0.5, 1, 2], arrow.float32()),
        "flag": arrow.array([True, False, True]),
        "date": arrow.array([0, 1, 2], arrow.timestamp("ms")),
        "text": arrow.array(["ä", "", "c"]),
        "bytes": arrow.array([b"a\0", b"", b"c"]),
        "word": arrow.array(["b", "a", "b"]).dictionary_encode(),
        "pair": arrow.array([[1, 2], [3, 4], [5, 6]], arrow.list_(arrow.int32(), 2)),
        "list": arrow.array([[1], [1, 2], []], arrow.list_(arrow.int64())),
        "words": arrow.array([["a"], [], ["b", "c"]]),
        "both": arrow.array(
            [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3, "b": ""}]
        ),
    }
    return write(tmp_path / "kinds.parquet", kinds)


def test_each_type_of_column(all_kinds):
    dataset = Dataset.from_parquet(all_kinds)
    first, second, third = dataset
    assert (first["int"], first["float"], first["flag"]) == (1, 0.5, True)
    assert first["int"].dtype == np.int16
    assert second["date"] == np.datetime64(1, "ms")
    assert [row["text"] for row in dataset] == ["ä".encode(), b"", b"c"]
    assert [row["bytes"] for row in dataset] == [b"a\0", b"", b"c"]
    assert [row["word"] for row in dataset] == [b"b", b"a", b"b"]
    assert third["pair"].tolist() == [5, 6]
    assert [row["list"].tolist() for row in dataset] == [[1], [1, 2], []]
    assert third["words"].tolist() == [b"b", b"c"]
    assert third["both"] == {"a": 3, "b": b""}
    assert len(dataset) == 3


def test_the_spec_is_that_of_the_file(all_kinds):
    assert Dataset.from_parquet(all_kinds).element_spec == {
        "int": TensorSpec((), np.int16),
        "float": TensorSpec((), np.float32),
        "flag": TensorSpec((), bool),
        "date": TensorSpec((), "datetime64[ms]"),
        "text": TensorSpec((), bytes),
        "bytes": TensorSpec((), bytes),
        "word": TensorSpec((), bytes),
        "pair": TensorSpec((2,), np.int32),
        "list": TensorSpec((None,), np.int64),
        "words": TensorSpec((None,), bytes),
        "both": {"a": TensorSpec((), np.int64), "b": TensorSpec((), bytes)},
    }


def test_batches_of_text_and_of_ragged_lists(all_kinds):
    some = Dataset.from_parquet(all_kinds, ["text", "pair"], batch_size=3)
    (batch,) = some
    assert list(batch) == ["text", "pair"]
    assert batch["text"].tolist() == ["ä".encode(), b"", b"c"]
    assert batch["text"].dtype == object
    assert batch["pair"].shape == (3, 2)
    ragged = Dataset.from_parquet(all_kinds, ["list", "words"])
    with pytest.raises(ValueError, match=r"\b0\b.*\b2\b.*`padded_batch`"):
        list(ragged.batch(3))
    (padded,) = ragged.padded_batch(3)
    assert padded["list"].tolist() == [[1, 0], [1, 2], [0, 0]]
    assert padded["words"].tolist() == [[b"a", b""], [b"", b""], [b"b", b"c"]]
    assert [b["list"].tolist() for b in ragged.take(1).batch(1)] == [[[1]]]


@examples(20)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    group=st.integers(1, 5),
    size=st.integers(1, 12),
)
def test_batches_reach_over_groups_and_files(tmp_path_factory, lengths, group, size):
    paths = numbers(tmp_path_factory.mktemp("files"), lengths, group)
    dataset = Dataset.from_parquet(paths, batch_size=size)
    batches = [batch["n"].tolist() for batch in dataset]
    total = list(range(sum(lengths)))
    assert batches == [total[i : i + size] for i in range(0, len(total), size)]
    assert len(dataset) == len(batches)
    mixed = Dataset.from_parquet(paths).shuffle(100, seed=1).batch(size)
    rows = [(n, x) for b in mixed for n, x in zip(b["n"], b["x"], strict=True)]
    assert sorted(rows) == [(n, n / 2) for n in total]


# who reads what


def test_shards_are_row_groups_if_there_are_enough(tmp_path):
    paths = numbers(tmp_path, [10, 3])  # groups of 4, 4, 2 and 3 rows
    dataset = pickle.loads(pickle.dumps(Dataset.from_parquet(paths)))

    def shards(count):
        parts = [dataset.shard(count, index) for index in range(count)]
        found = [[int(row["n"]) for row in part] for part in parts]
        assert [len(part) for part in parts] == list(map(len, found))
        return found

    assert shards(2) == [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 10, 11, 12]]
    assert shards(5) == [[i for i in range(13) if i % 5 == n] for n in range(5)]
    mixed = dataset.shuffle(4, seed=1).shard(2, 1)  # of what comes out, by number
    assert len(mixed) == 6


@pytest.mark.parametrize("policy", [AutoShardPolicy.AUTO, AutoShardPolicy.FILE])
def test_workers_get_row_groups(tmp_path, policy):
    (path,) = numbers(tmp_path, [12])
    dataset = Dataset.from_parquet(path, ["n"]).map(lambda row: row["n"]).batch(3)
    dataset = dataset.with_options(Options(policy))
    parts = [allotted(dataset, Worker(2, index)) for index in range(2)]
    assert {part.policy for part in parts} == {AutoShardPolicy.FILE}
    rows = [[b.tolist() for b in part.elements()] for part in parts]
    assert rows == [[[0, 1, 2], [3, 8, 9], [10, 11]], [[4, 5, 6], [7]]]


def test_too_few_row_groups(tmp_path):
    dataset = Dataset.from_parquet(numbers(tmp_path, [4]), batch_size=2)
    assert allotted(dataset, Worker(2, 0)).policy is AutoShardPolicy.DATA
    strict = dataset.with_options(Options(AutoShardPolicy.FILE))
    with pytest.raises(ValueError, match=r"not enough files, 1 .*row groups count"):
        allotted(strict, Worker(2, 0))


# what is refused


def test_what_is_refused_when_it_is_made(tmp_path):
    good = write(tmp_path / "good.parquet", {"a": [1], "b": [1.0]})
    other = write(tmp_path / "other.parquet", {"a": [1.0], "b": [1.0]})
    nested = write(tmp_path / "nested.parquet", {"a": [[[1]]]})
    text = tmp_path / "text.parquet"
    text.write_text("a,b\n1,2\n")
    refused = [
        (ValueError, r"good\.parquet.*'c'", good, ["c"]),
        (ValueError, "`columns`", good, []),
        (ValueError, r"other\.parquet.*'double'", [good, other], None),
        (ValueError, r"text\.parquet", text, None),
        (TypeError, "'a'", nested, None),
        (ValueError, "`filenames`", [], None),
        (FileNotFoundError, "missing", tmp_path / "missing", None),
    ]
    for error, words, paths, columns in refused:
        with pytest.raises(error, match=words):
            Dataset.from_parquet(paths, columns)
    assert len(Dataset.from_parquet([good, other], ["b"])) == 2
    with pytest.raises(ValueError, match=r"`batch_size`.*\b1\b"):
        Dataset.from_parquet(good, batch_size=0)


def test_values_that_are_missing(tmp_path):
    path = write(tmp_path / "holes.parquet", {"a": [1, None], "b": ["x", None]})
    dataset = Dataset.from_parquet(path)
    with pytest.raises(ValueError, match=r"'a'.*\b0\b.*\b1\b"):
        list(dataset)
