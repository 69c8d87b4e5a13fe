"""Reads tensors from a checkpoint's files, and verifies them against their digests.

A reader of a safetensors file can read some rows of a tensor alone. It compares the
header with the size of the file when it opens the file, so a truncated file is detected
before any element is used. Only `TensorReader.verify` tells whether the elements are
those that were written; `verify` checks every byte of a whole checkpoint.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from zstrat.errors import DataLossError, NotFoundError
from zstrat.wire import DTYPES

from ._disk import blamed
from ._header import PREFIX, TensorInfo, decode_header, header_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._manifest import Manifest, StoredPiece, StoredTensor

PIECE: Final = 4 * 2**20
"""Bytes read at a time when they are verified: few enough to stay in the processor's
cache between reading and hashing, and enough that the cost of a call does not
matter."""


class TensorReader:
    """Reads tensors of one open file; a context manager. Several threads may use it at
    once, because reading has no position.

    Raises:
        NotFoundError: The file does not exist.
        DataLossError: The file was truncated, or is not a safetensors file.
        OSError: Any other error of the system.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with blamed(path, "reading"):
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(self._file).st_size
            prefix = os.pread(self._file, PREFIX.size, 0)
            length = header_length(prefix, size, path)
            # At most the bytes of the file: no header makes this allocate more.
            text = bytearray(length)
            self._fill(memoryview(text), PREFIX.size, "")
            self._places = decode_header(bytes(text), size, path)
        except BaseException:  # to the caller, who has no reader to close
            self.close()
            raise

    def info(self, name: str) -> TensorInfo:
        """Returns the dtype and shape of a tensor.

        Raises:
            NotFoundError: The file has no such tensor.
        """
        place = self._places.get(name)
        if place is None:
            raise NotFoundError(f"{self.path} has no tensor {name!r}")
        return place.info

    def read(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> np.ndarray:
        """Returns rows ``[start, stop)`` of a tensor; without ``start`` and ``stop``,
        all rows.

        Raises:
            NotFoundError: The file has no such tensor.
            ValueError: The tensor does not have these rows.
            DataLossError: The file became shorter after it was opened.
        """
        info = self.info(name)
        if start is None and stop is None:
            array = np.empty(info.shape, info.numpy_dtype)
            self.read_into(name, 0, array)
            return array
        rows = info.shape[0] if info.shape else 0
        first, last = start or 0, rows if stop is None else stop
        if not 0 <= first <= last <= rows or not info.shape:
            raise ValueError(
                f"{self.path}: {name!r} ({info}) has no rows {start}:{stop}"
            )
        array = np.empty((last - first, *info.shape[1:]), info.numpy_dtype)
        self.read_into(name, first, array)
        return array

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        """Fills ``out``, which is C-contiguous and of the tensor's dtype, with rows of
        the tensor from ``start`` on; for a scalar, with its only element.

        Raises: As `read`.
        """
        info = self.info(name)
        if out.dtype != info.numpy_dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"{self.path}: {name!r} ({info}) cannot be read into "
                f"{out.dtype.name}{out.shape} with strides {out.strides}: expected its "
                "own dtype, C-contiguous"
            )
        offset = start * info.row_bytes
        if start < 0 or offset + out.nbytes > info.nbytes:
            raise ValueError(
                f"{self.path}: {name!r} ({info}) ends before that: {out.nbytes} bytes "
                f"from row {start} on are wanted, and it has {info.nbytes} in all"
            )
        # As bytes: arrays of bfloat16 and its kin have no buffer protocol.
        view = out.reshape(-1).view(np.uint8).data
        self._fill(view, self._places[name].offset + offset, name)

    def parts(self, name: str) -> Iterator[memoryview]:
        """Yields the bytes of a tensor, a few MiB at a time. Each part is overwritten
        by the next one.

        Raises: As `read`.
        """
        info = self.info(name)
        at, left = self._places[name].offset, info.nbytes
        buffer = memoryview(bytearray(min(PIECE, left)))
        # One buffer for all parts: a table of 100 GB is checked in 4 MiB of memory.
        while left:
            part = buffer[: min(PIECE, left)]
            self._fill(part, at, name)
            yield part
            at, left = at + len(part), left - len(part)

    def checked(self, name: str, digest: str) -> Iterator[memoryview]:
        """Yields the same parts as `parts`, and after the last one compares them with a
        digest.

        Raises:
            NotFoundError: The file has no such tensor.
            DataLossError: The bytes do not match the digest.
        """
        found = xxhash.xxh3_128()
        for part in self.parts(name):
            found.update(part)
            yield part
        if (now := found.hexdigest()) != digest:
            raise DataLossError(
                self.path,
                name,
                f"its bytes changed since they were written (digest {now}, not "
                f"{digest})",
            )

    def verify(self, name: str, digest: str) -> None:
        """Compares all bytes of a tensor with the digest that was computed when it was
        written.

        Raises: As `checked`.
        """
        for _ in self.checked(name, digest):
            pass

    def close(self) -> None:
        """Closes the file; may be called again."""
        if self._file >= 0:
            descriptor, self._file = self._file, -1
            os.close(descriptor)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, out: memoryview, at: int, name: str) -> None:
        with blamed(self.path, "reading"):
            while out:
                # One call gives at most 2 GiB.
                try:
                    got = os.preadv(self._file, [out], at)
                except OSError as error:
                    if error.errno != errno.EIO:
                        raise
                    # A block that the disk cannot read is damage, as a flipped bit is.
                    raise DataLossError(
                        self.path, name, f"at byte {at}: {error}"
                    ) from None
                if not got:
                    raise DataLossError(
                        self.path, name, f"cut short: it ends at byte {at}"
                    )
                out, at = out[got:], at + got


class CheckpointFiles:
    """The files of a checkpoint. Opens each file when it is first needed; a context
    manager that closes all of them. For one thread at a time."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: dict[str, TensorReader] = {}

    def __getitem__(self, file: str) -> TensorReader:
        """Returns the reader of a file, opened on first use. Raises: As
        `TensorReader`."""
        if file not in self._open:
            self._open[file] = TensorReader(os.path.join(self._folder, file))
        return self._open[file]

    def read(self, tensor: StoredTensor) -> np.ndarray:
        """Reads a whole tensor (see `StoredTensor.is_whole`) into memory. Raises: As
        `TensorReader`."""
        out = np.empty(tensor.shape, DTYPES[tensor.dtype])
        self.fill(out, tensor, 0)
        return out

    def fill(self, out: np.ndarray, tensor: StoredTensor, start: int) -> None:
        """Fills ``out`` with rows of a tensor from ``start`` on. Rows that are in no
        file stay as they are in ``out``. Raises: As `TensorReader`."""
        # A count or a scalar is not cut: the piece for the first row has it.
        if not (tensor.by_rows and tensor.shape):
            piece, _, _ = tensor.within(start, start)[0]
            self[piece.file].read_into(piece.name, 0, out)
            return
        for piece, first, last in tensor.within(start, start + len(out)):
            at = piece.start + first - start
            part = out[at : at + last - first]
            self[piece.file].read_into(piece.name, first, part)

    def close(self) -> None:
        """Closes all files; may be called again."""
        for reader in self._open.values():
            reader.close()

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def verify(
    folder: str,
    manifest: Manifest,
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> None:
    """Reads all files of a checkpoint and compares them with its manifest.

    Args:
        on_bytes: Called with the number of bytes that were checked, once for each
            tensor.

    Raises:
        DataLossError: A file is damaged; the error names the file and the tensor.
        OSError: Any other error of the system.
    """
    # File by file, so that each is opened once.
    by_file: dict[str, list[tuple[StoredTensor, StoredPiece]]] = defaultdict(list)
    for tensor in manifest.tensors.values():
        for piece in tensor.pieces:
            by_file[piece.file].append((tensor, piece))
    for file, pieces in by_file.items():
        path = os.path.join(folder, file)
        try:
            with TensorReader(path) as reader:
                for tensor, piece in pieces:
                    on_bytes(_verify_piece(reader, tensor, piece))
        except NotFoundError as error:
            # The manifest named it when it was read.
            raise DataLossError(path, "", f"the file changed: {error}") from error


def _verify_piece(
    reader: TensorReader, tensor: StoredTensor, piece: StoredPiece
) -> int:
    found, wanted = reader.info(piece.name), tensor.info(piece)
    if found != wanted:
        raise DataLossError(
            reader.path, piece.name, f"it is {found}, and the manifest says {wanted}"
        )
    reader.verify(piece.name, piece.digest)
    return found.nbytes
