"""Tensor files: what goes in comes out, and what is damaged is named."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from zstrat.checkpoint import TensorInfo, TensorReader, TensorWriter, digest_of
from zstrat.errors import (
    AlreadyExistsError,
    DataLossError,
    NotFoundError,
    ResourceExhaustedError,
)
from zstrat.testing import full_disk
from zstrat.wire import DTYPES, raw

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES)), shapes),
    max_size=5,
)


def filled(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Any bytes, but for booleans; compared as bytes."""
    size = int(np.prod(shape, dtype=int)) * DTYPES[dtype].itemsize
    raw = np.random.default_rng(seed).integers(0, 2, size, np.uint8)
    return raw.view(DTYPES[dtype]).reshape(shape)


def written(path, arrays) -> list[str]:
    infos = [TensorInfo(n, a.dtype.name, a.shape) for n, a in arrays.items()]
    with TensorWriter(str(path), infos) as writer:
        for array in arrays.values():
            writer.write(raw(array))
        digests = writer.finish()
    assert path.stat().st_size == writer.size
    return digests


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@given(tensors)
def test_what_goes_in_comes_out(tmp_path_factory, specs):
    path = tmp_path_factory.mktemp("t") / "a.safetensors"
    arrays = {
        name: filled(*spec, seed=n) for n, (name, spec) in enumerate(specs.items())
    }
    digests = written(path, arrays)
    with TensorReader(str(path)) as reader:
        for (name, array), digest in zip(arrays.items(), digests, strict=True):
            assert same(reader.read(name), array)
            assert digest == digest_of([array.tobytes()])
            reader.verify(name, digest)
            if array.ndim:
                for start in range(array.shape[0] + 1):
                    rows = reader.read(name, start, array.shape[0])
                    assert same(rows, array[start:])


def test_the_format_is_that_of_the_library(tmp_path):
    path = tmp_path / "a.safetensors"
    arrays = {
        "a/b": np.arange(6, dtype="f4").reshape(2, 3),
        "ü": np.array(7, dtype="i8"),
        "none": np.zeros((0, 4), "u2"),
    }
    written(path, arrays)
    read = load_file(path)
    assert set(read) == set(arrays)
    assert all(same(read[name], array) for name, array in arrays.items())
    odd = tmp_path / "odd.safetensors"
    written(odd, {"c": np.ones((2, 2), complex), "f": filled("float8_e4m3", (3,))})
    assert load_file(odd)["c"].shape == (2, 2, 2)  # pairs: no name for complex128


def test_bytes_in_any_portions(tmp_path):
    array = np.arange(1000, dtype="f8")
    infos = [TensorInfo("a", "float64", (600,)), TensorInfo("b", "float64", (400,))]
    data = memoryview(array).cast("B")
    for step in (1, 7, 4096, 8000):
        with TensorWriter(str(tmp_path / f"{step}"), infos) as writer:
            for at in range(0, len(data), step):
                writer.write(data[at : at + step])
            whole = [digest_of([data[:4800]]), digest_of([data[4800:]])]
            assert writer.finish() == whole


def test_the_writer_refuses(tmp_path):
    info = TensorInfo("a", "float32", (2,))
    path = str(tmp_path / "a")
    with TensorWriter(path, [info]) as writer:
        with pytest.raises(ValueError, match="only 8 are missing"):
            writer.write(b"123456789")
        with pytest.raises(ValueError, match="8 bytes are missing"):
            writer.finish()
        with pytest.raises(AlreadyExistsError):
            TensorWriter(path, [info])
    assert not (tmp_path / "a").exists()  # not finished: aborted
    with pytest.raises(NotFoundError):
        TensorWriter(str(tmp_path / "no" / "a"), [info])
    for wrong in (
        [info, info],
        [TensorInfo("b", "float33", ())],
        [TensorInfo("", "int8", ())],
    ):
        with pytest.raises(ValueError, match="tensor"):
            TensorWriter(path, wrong)
    assert not (tmp_path / "a").exists()


def test_a_full_disk_leaves_no_file(tmp_path):
    info = TensorInfo("a", "uint8", (100_000,))
    with full_disk(50_000):
        writer = TensorWriter(str(tmp_path / "a"), [info])
        with pytest.raises(ResourceExhaustedError, match="free some space"):
            writer.write(bytes(100_000))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="finished or aborted"):
        writer.write(b"1")


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.safetensors"
    arrays = {"a": np.arange(8, dtype="f4"), "b": np.arange(4, dtype="i8")}
    return path, dict(zip(arrays, written(path, arrays), strict=True))


@pytest.mark.slow
def test_every_cut_is_found(good):
    path, _ = good
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(DataLossError, match=r"cut short|damaged"):
            TensorReader(str(path))
    path.write_bytes(data + b"x")
    with pytest.raises(DataLossError):
        TensorReader(str(path))
    path.write_bytes(data[:-1])
    with pytest.raises(DataLossError) as caught:
        TensorReader(str(path))
    assert caught.value.tensor == "b"
    assert caught.value.file == str(path)


@pytest.mark.slow
def test_every_flipped_bit_is_found(good):
    path, digests = good
    data = path.read_bytes()
    infos = {"a": TensorInfo("a", "float32", (8,)), "b": TensorInfo("b", "int64", (4,))}
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        found = []
        try:
            with TensorReader(str(path)) as reader:
                for name, digest in digests.items():
                    if reader.info(name) != infos[name]:
                        found.append(name)
                    try:
                        reader.verify(name, digest)
                    except DataLossError as error:
                        found.append(error.tensor)
        except (DataLossError, NotFoundError):
            found.append("header")
        padding = data[at : at + 1] == b" "
        assert found or padding, f"byte {at}"
        if at >= len(data) - 64:
            assert found == ["a" if at < len(data) - 32 else "b"]


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"nonsense", "damaged header"),
        (b"[" * 200_000, "damaged header"),
        (b"[1]", "not an object"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}', "damaged header"),
        ({"a": 1}, "damaged header"),
        ({"a": {**ENTRY, "dtype": "F33"}}, "not known here"),
        ({"a": {**ENTRY, "shape": [-2]}}, "damaged header"),
        ({"a": {**ENTRY, "shape": [2.0]}}, "damaged header"),
        ({"a": {**ENTRY, "shape": [True]}}, "damaged header"),
        ({"a": {**ENTRY, "shape": [2**64]}}, "damaged header"),
        ({"a": {**ENTRY, "shape": [2**62]}}, r"\b8\b"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, r"\b8\b"),
        ({"a": {**ENTRY, "data_offsets": [1, 9]}}, r"\b1\b.*\b0\b"),
        ({"a": ENTRY, "b": ENTRY}, r"\b0\b.*\b8\b"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [9, 17]}}, r"\b9\b.*\b8\b"),
        ({"a": {**ENTRY, "data_offsets": [0, 8, 9]}}, "damaged header"),
        ({"a": ENTRY, "__metadata__": {"x": 1}}, "must be texts"),
        ({"a": ENTRY, "__metadata__": {"zstrat.dtype.a": "int8"}}, "damaged header"),
        ({"a": ENTRY, "__metadata__": {"zstrat.dtype.a": "object"}}, "damaged header"),
        ({}, "too long"),
    ],
)
def test_hostile_headers(tmp_path, header, says):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "bad"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(DataLossError, match=says):
        TensorReader(str(path))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 99_999_999])
def test_a_header_is_not_believed_how_long_it_is(tmp_path, length):
    path = tmp_path / "bad"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(DataLossError, match=r"claims|cut short"):
        TensorReader(str(path))


def test_the_reader_refuses(good, tmp_path):
    path, _ = good
    with pytest.raises(NotFoundError):
        TensorReader(str(tmp_path / "none"))
    with TensorReader(str(path)) as reader:
        with pytest.raises(NotFoundError, match="'c'"):
            reader.read("c")
        for start, stop in ((-1, 2), (3, 2), (0, 9)):
            with pytest.raises(ValueError, match="has no rows"):
                reader.read("a", start, stop)
        with pytest.raises(ValueError, match="ends before"):
            reader.read_into("a", 7, np.empty(2, "f4"))
        with pytest.raises(ValueError, match="into int32"):
            reader.read_into("a", 0, np.empty(2, "i4"))
        path.write_bytes(path.read_bytes()[:-8])  # cut while it is open
        with pytest.raises(DataLossError):
            reader.read("b")
