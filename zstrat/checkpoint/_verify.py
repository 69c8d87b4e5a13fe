"""Whether a checkpoint is what was written, every byte of it."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

from zstrat.errors import DataLossError, NotFoundError

from ._reader import TensorReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._manifest import Manifest, StoredPiece, StoredTensor


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
