"""Writes one safetensors file as its bytes become available.

The header is known before the first element is there, so nothing is ever held in
memory: a table of 100 GB goes through a buffer of the caller's. Not for several
threads at once, but for any thread.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zstrat.wire import raw

from ._append import AppendedFile
from ._digest import Digest
from ._disk import blamed, bytes_of, sync_folder
from ._header import encode_header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from zstrat.wire import Buffer

    from ._header import TensorInfo


class TensorWriter:
    """A new file with these tensors, whose elements follow in this order.

    Used as a context manager it aborts what was not finished.

    Args:
        path: Must not exist: who creates the file is the only one that writes it.
        metadata: Texts for ``__metadata__``.

    Raises:
        ValueError: Names are double or dtypes unknown; no file is created.
        AlreadyExistsError: The file exists.
        NotFoundError: The folder does not exist.
        ResourceExhaustedError: The disk is full; also in `write` and `finish`, and the
            file is removed.
        OSError: Anything else that the system says; the file is removed.
    """

    def __init__(
        self,
        path: str,
        tensors: Sequence[TensorInfo],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header, self.size = encode_header(tensors, metadata or {})
        self.path = path
        self._sizes = [info.nbytes for info in tensors]
        self._missing = sum(self._sizes)
        self._digests: list[str] = []
        self._digest = Digest()
        self._left = 0
        """Bytes that the tensor in work lacks."""
        self._file = AppendedFile(path, self.size)
        self._begin()
        self._put(header)

    def write(self, data: Buffer) -> None:
        """The next elements, in C order and little endian: bytes, or a contiguous
        array or memoryview of bytes; may end one tensor and begin the next.

        Raises:
            ValueError: More bytes than the tensors have.
        """
        view = bytes_of(data)
        if view.nbytes > self._missing:
            raise ValueError(
                f"{self.path}: {view.nbytes} bytes are given, and only "
                f"{self._missing} are missing"
            )
        self._put(view)
        self._missing -= view.nbytes
        while view:
            part = view[: self._left]
            self._digest.update(part)
            self._left -= part.nbytes
            view = view[part.nbytes :]
            if not self._left:
                self._end()

    def write_array(self, array: np.ndarray) -> None:
        """`write` for an array of any dtype of the wire, in any layout."""
        self.write(raw(array))

    def finish(self) -> list[str]:
        """Brings all to the disk; returns the digest of each tensor, in order.

        Raises:
            ValueError: Elements are missing.
        """
        if self._missing or not self._file.is_open:
            raise ValueError(f"{self.path}: {self._missing} bytes are missing")
        self._file.finish()
        with blamed(self.path, "writing"):
            sync_folder(os.path.dirname(self.path))
        return list(self._digests)

    def abort(self) -> None:
        """Removes the file, unless it was finished; may be called again."""
        self._file.abort()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    # ---- private ---------------------------------------------------------------------

    def _put(self, data: Buffer) -> None:
        if not self._file.is_open:
            raise ValueError(f"{self.path}: finished or aborted already")
        self._file.append(data)

    def _begin(self) -> None:
        """The next tensor that has elements; those without are complete."""
        for size in self._sizes[len(self._digests) :]:
            self._left = size
            if size:
                return
            self._digests.append(self._digest.hex())

    def _end(self) -> None:
        self._digests.append(self._digest.hex())
        self._digest = Digest()
        self._begin()
