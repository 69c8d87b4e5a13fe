"""Reads what a checkpoint's files have, and checks that it is what was written.

Rows of the tensors of one safetensors file are read by themselves. What the header says
is compared with the size of the file when it is opened, so a file that was cut short is
known before anything of it is used. Whether the elements are those that were written is
known from `TensorReader.verify` alone; a whole checkpoint is checked every byte of it.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.errors import DataLossError, NotFoundError
from zstrat.wire import DTYPES

from ._disk import Digest, blamed
from ._header import PREFIX, TensorInfo, decode_header, header_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ._manifest import Manifest, StoredPiece, StoredTensor

PIECE: Final = 4 * 2**20
"""Bytes read at a time to check them: stays in the cache between reading and hashing,
and is large beside the cost of a call."""


class TensorReader:
    """A file, open for reading; a context manager. For any thread, and for several:
    reading has no position.

    Raises:
        NotFoundError: The file does not exist.
        DataLossError: It was cut short, or is not a safetensors file.
        OSError: Anything else that the system says.
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
            self._header = decode_header(bytes(text), size, path)
        except BaseException:  # to the caller, who has no reader to close
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._header.places)

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._header.metadata

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._header.size

    def info(self, name: str) -> TensorInfo:
        """Returns the dtype and shape of a tensor.

        Raises:
            NotFoundError: The file has no such tensor.
        """
        place = self._header.places.get(name)
        if place is None:
            raise NotFoundError(f"{self.path} has no tensor {name!r}")
        return place.info

    def read(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> np.ndarray:
        """Returns rows ``[start, stop)`` of a tensor, all of it if they are left out.

        Raises:
            NotFoundError: The file has no such tensor.
            ValueError: It does not have these rows.
            DataLossError: The file became shorter meanwhile.
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
        """Fills ``out``, C-contiguous and of the tensor's dtype, with the rows from
        ``start`` on; of a scalar with its only element.

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
        self._fill(view, self._header.places[name].offset + offset, name)

    def parts(self, name: str) -> Iterator[memoryview]:
        """Yields the bytes of a tensor, a few MiB at a time; each part is overwritten
        by the next one.

        Raises: As `read`.
        """
        info = self.info(name)
        at, left = self._header.places[name].offset, info.nbytes
        buffer = memoryview(bytearray(min(PIECE, left)))
        # One buffer for all parts: a table of 100 GB is checked in 4 MiB of memory.
        while left:
            part = buffer[: min(PIECE, left)]
            self._fill(part, at, name)
            yield part
            at, left = at + len(part), left - len(part)

    def checked(self, name: str, digest: str) -> Iterator[memoryview]:
        """Yields what `parts` does, and compares all of it with a digest at the end.

        Raises:
            NotFoundError: The file has no such tensor.
            DataLossError: They differ from the digest of what was written.
        """
        found = Digest()
        for part in self.parts(name):
            found.update(part)
            yield part
        if found.hex() != digest:
            raise DataLossError(
                self.path,
                name,
                f"its bytes changed since they were written (digest {found.hex()}, "
                f"not {digest})",
            )

    def verify(self, name: str, digest: str) -> None:
        """Compares all bytes of a tensor with the digest of what was written.

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
    """The files of a checkpoint, each opened when it is first needed; a context manager
    that closes them. For one thread at a time."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: dict[str, TensorReader] = {}

    def __getitem__(self, file: str) -> TensorReader:
        """Returns the reader of a file. Raises: As `TensorReader`."""
        if file not in self._open:
            self._open[file] = TensorReader(os.path.join(self._folder, file))
        return self._open[file]

    def read(self, tensor: StoredTensor) -> np.ndarray:
        """Reads a tensor that is whole into memory. Raises: As `TensorReader`."""
        out = np.empty(tensor.shape, DTYPES[tensor.dtype])
        self.fill(out, tensor, 0)
        return out

    def fill(self, out: np.ndarray, tensor: StoredTensor, start: int) -> None:
        """Writes the rows from ``start`` on of a tensor, as many as ``out`` has; rows
        that no file has stay as they are. Raises: As `TensorReader`."""
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
        on_bytes: Told how many bytes were checked, tensor by tensor.

    Raises:
        DataLossError: Names the file and the tensor that differ.
        OSError: As the system says.
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
