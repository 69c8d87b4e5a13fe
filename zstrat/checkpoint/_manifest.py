"""The manifest of a checkpoint: one logical tensor for each variable, and the files
that hold its pieces.

A checkpoint is a folder with part files and `manifest.json`. The manifest is written
last, and by rename: a folder without a manifest is not a checkpoint, whatever else it
holds, and files that the manifest does not name are garbage. The manifest carries a
digest of itself, so that damage to it is detected.

Law of the file: what `Manifest.decode` returns is consistent. Every piece is in a file
that the manifest names, files are names in its own folder, and no row of a tensor is in
two of its pieces.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zstrat.errors import DataLossError, NotFoundError
from zstrat.wire import DTYPES

from ._disk import blamed, digest_of, replace_file
from ._header import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST: Final = "manifest.json"
FORMAT: Final = "zstrat.checkpoint"
VERSION: Final = 1

_BEGINNING: Final = b'{"digest":"'
_HEAD: Final = _BEGINNING + b'%s","manifest":'
_TAIL: Final = b"}\n"


class StoredPiece(NamedTuple):
    """One piece of a logical tensor: its rows ``[start, stop)``, stored as the tensor
    ``name`` in ``file``."""

    file: str
    name: str
    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The tensor of one variable or optimizer slot, and its pieces.

    ``by_rows``: the pieces are consecutive rows of the tensor. Otherwise each piece is
    a whole tensor of this shape, which belongs to rows ``[start, stop)`` of a variable
    (a count that an optimizer keeps for each part of a variable). Rows of slots that no
    gradient has reached may be in no piece.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]
    by_rows: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether the pieces cover all rows of the tensor."""
        starts = [0, *(piece.stop for piece in self.pieces)]
        joined = all(p.start == s for p, s in zip(self.pieces, starts, strict=False))
        return joined and (not self.shape or starts[-1] == self.shape[0])

    def info(self, piece: StoredPiece) -> TensorInfo:
        """Returns the name, dtype and shape under which a piece is stored in its
        file."""
        shape = self.shape
        if self.by_rows and shape:
            shape = (piece.stop - piece.start, *shape[1:])
        return TensorInfo(piece.name, self.dtype, shape)

    def within(self, start: int, stop: int) -> list[tuple[StoredPiece, int, int]]:
        """Returns the pieces that have any of rows ``[start, stop)``, each with the
        range ``[first, last)`` of its own rows. A piece that has no rows to select is
        returned with the range (0, 0)."""
        if not self.by_rows:
            # A row that no gradient had reached is in no piece: it takes what the first
            # one has.
            around = (p for p in self.pieces if p.start <= start < p.stop)
            return [(next(around, self.pieces[0]), 0, 0)]
        if not self.shape or not self.shape[0]:
            return [(piece, 0, 0) for piece in self.pieces[:1]]
        found = []
        for piece in self.pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                found.append((piece, first - piece.start, last - piece.start))
        return found

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint without the elements of its tensors.

    ``files``: sizes in bytes by name. ``objects``: data that the writer of the
    checkpoint reads again when it restores, as plain JSON; ``metadata``: plain JSON for
    people.
    """

    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, int]
    objects: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        body = json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "metadata": self.metadata,
                "objects": self.objects,
                "files": self.files,
                "tensors": {name: _plain(each) for name, each in self.tensors.items()},
            },
            ensure_ascii=False,
            separators=(",", ":"),
        ).encode()
        return _HEAD % digest_of([body]).encode() + body + _TAIL

    @staticmethod
    def decode(data: bytes, file: str) -> Manifest:
        """Decodes the bytes of `encode`.

        Raises:
            DataLossError: The manifest is damaged; the error names ``file`` and the
                fault.
        """
        head = len(_HEAD % (b"0" * 32))
        body = data[head : -len(_TAIL)]
        # Byte by byte, before any of it is parsed: what is damaged may be JSON all the
        # same.
        if data != _HEAD % digest_of([body]).encode() + body + _TAIL:
            raise DataLossError(file, "", "damaged or cut short: its digest differs")
        try:
            plain = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DataLossError(file, "", f"no JSON: {error}") from None
        match plain:
            case {"format": "zstrat.checkpoint", "version": int(version)} if (
                version != VERSION
            ):
                raise DataLossError(
                    file,
                    "",
                    f"it has format {version}, and this zstrat reads format {VERSION}",
                )
            case {
                "format": "zstrat.checkpoint",
                "metadata": dict(metadata),
                "objects": dict(objects),
                "files": dict(files),
                "tensors": dict(tensors),
            }:
                pass
            case _:
                raise DataLossError(file, "", "not the manifest of a checkpoint")
        for name, size in files.items():
            # The digest is against damage, not against an attacker, who could name
            # files anywhere.
            if not _is_plain_name(name) or not _is_number(size):
                raise DataLossError(file, "", f"names the file {name!r:.80} ({size!r})")
        found = {
            name: _tensor(name, each, files, file) for name, each in tensors.items()
        }
        return Manifest(found, files, objects, metadata)

    def commit(self, folder: str, mark: str) -> None:
        """Writes the manifest to a folder, which makes the folder a checkpoint;
        replaces the checkpoint that the folder was before.

        Args:
            mark: A text in file names that distinguishes temporary files of this writer
                from files of other writers.

        Raises:
            ResourceExhaustedError: The disk is full; nothing changed.
            NotFoundError: The folder does not exist.
            OSError: Any other error of the system; nothing changed.
        """
        replace_file(os.path.join(folder, MANIFEST), self.encode(), mark=mark)

    @staticmethod
    def of(folder: str) -> Manifest:
        """Reads the manifest of the checkpoint in ``folder``, and checks that its files
        exist with their sizes.

        Raises:
            NotFoundError: The folder is not a checkpoint.
            DataLossError: The manifest is damaged, or a file is missing or has another
                size.
        """
        path = os.path.join(folder, MANIFEST)
        try:
            with blamed(path, "reading"), open(path, "rb") as file:
                data = file.read()
        except NotFoundError:
            words = "no such folder"
            if os.path.isdir(folder):
                words = f"it has no {MANIFEST}, which is written when all else is"
            elif os.path.exists(folder):
                words = "it is a file, and a checkpoint is a folder: give the path "
                words += "that `save` returned"
            raise NotFoundError(f"{folder} is not a checkpoint: {words}") from None
        manifest = Manifest.decode(data, path)
        # Sizes alone, which cost a call a file: digests are compared by `verify`.
        manifest._require_files(folder)
        return manifest

    def _require_files(self, folder: str) -> None:
        for name, size in self.files.items():
            path = os.path.join(folder, name)
            try:
                found = os.stat(path).st_size
            except FileNotFoundError:
                raise DataLossError(path, "", "the file is gone") from None
            if found != size:
                what = "cut short" if found < size else "too long"
                raise DataLossError(path, "", f"{what}: {found} bytes, not {size}")


def is_foreign(folder: str) -> bool:
    """Returns whether the manifest in a folder is that of another program. A damaged
    manifest counts as ours if its beginning looks like ours."""
    path = os.path.join(folder, MANIFEST)
    with blamed(path, "reading"), contextlib.suppress(FileNotFoundError):
        with open(path, "rb") as file:
            found = file.read(len(_BEGINNING))
        return not _BEGINNING.startswith(found)
    return False


def _plain(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "by_rows": tensor.by_rows,
        "pieces": tensor.pieces,
    }


def _tensor(name: str, plain: Any, files: Mapping[str, int], file: str) -> StoredTensor:
    match plain:
        case {
            "dtype": str(dtype),
            "shape": [*shape],
            "by_rows": bool(by_rows),
            "pieces": [_, *_] as listed,
        } if dtype in DTYPES and all(map(_is_number, shape)):
            pass
        case _:
            raise DataLossError(file, name, f"damaged entry: {plain!r:.80}")
    pieces = tuple(_piece(name, each, files, file) for each in listed)
    tensor = StoredTensor(dtype, tuple(shape), pieces, by_rows)
    ends = [0, *(piece.stop for piece in pieces)]
    grows = all(p.start >= end for p, end in zip(pieces, ends, strict=False))
    # The last one ends within the tensor; as they grow, so do all others.
    if by_rows:
        grows &= pieces[-1].stop <= (shape[0] if shape else 0)
        grows &= bool(shape) or len(pieces) == 1
    if not grows:
        rows = list(itertools.chain(*((p.start, p.stop) for p in pieces)))
        raise DataLossError(file, name, f"pieces {rows!r:.80} are not {tensor}")
    return tensor


def _piece(name: str, plain: Any, files: Mapping[str, int], file: str) -> StoredPiece:
    match plain:
        case [str(where), str(stored), int(start), int(stop), str(digest)] if (
            where in files and 0 <= start <= stop
        ):
            return StoredPiece(where, stored, start, stop, digest)
    raise DataLossError(file, name, f"damaged piece: {plain!r:.80}")


def _is_plain_name(name: str) -> bool:
    """Returns whether the name is that of a file in the folder itself, not a path to
    somewhere else."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _is_number(value: Any) -> bool:
    # Not `isinstance`: True is an int to it. Files are smaller than 2**63 bytes.
    return type(value) is int and 0 <= value < 2**63
