"""Adds explanations and remedies to errors of the operating system about a path. The
type and the number of the error do not change."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def explained(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds explanations to OSErrors that are raised in the block. The block uses
    ``path`` or files below it; ``what`` names the path in messages.

    Raises:
        OSError: The error of the block, with the same type and number.
    """
    try:
        yield
    except OSError as error:
        full = os.path.abspath(os.fspath(path))
        raise OSError(error.errno, f"{what} {full}: {_why(error, full)}") from error


def file_above(path: str) -> str:
    """Returns the nearest ancestor of the path that exists. If it is not a folder, it
    is why the path cannot be created."""
    while (above := os.path.dirname(path)) != path and not os.path.lexists(above):
        path = above
    return above


def _why(error: OSError, path: str) -> str:
    folder = os.path.dirname(path)
    match error.errno:
        case errno.ENOTDIR | errno.EEXIST:
            # Anything but a folder, such as /dev/null or a broken link.
            is_file = os.path.lexists(path) and not os.path.isdir(path)
            return (
                f"{path if is_file else file_above(path)} is a file, expected a "
                "folder: choose another path, or move that file"
            )
        case errno.EISDIR:
            return "is a folder: choose the path of a file"
        case errno.ENOENT if not os.path.isdir(folder):
            return f"no such folder {folder}: create it, or choose another path"
        case errno.ENOENT | errno.EACCES | errno.EPERM | errno.EROFS:
            words = os.strerror(error.errno)
            return f"cannot create a file ({words}): choose another path"
    return error.strerror or str(error)
