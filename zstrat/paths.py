"""Errors of the system about a path that a program gave, in words: what is there, and
what to do about it. They stay what they are."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def explained(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """``what`` says for people what is to be at ``path``, or below it.

    Raises:
        OSError: That of the block, of the same type and number, in our words.
    """
    try:
        yield
    except OSError as error:
        place = os.path.abspath(os.fspath(path))
        raise OSError(error.errno, f"{what} {place}: {_why(error, place)}") from error


def file_above(path: str) -> str:
    """What is no folder of those that the path leads through."""
    while (above := os.path.dirname(path)) != path and not os.path.lexists(above):
        path = above
    return above


def _why(error: OSError, path: str) -> str:
    folder = os.path.dirname(path)
    match error.errno:
        case errno.ENOTDIR | errno.EEXIST:
            is_file = os.path.isfile(path)
            return (
                f"{path if is_file else file_above(path)} is a file, and has to be a "
                "folder: give another path, or move that file"
            )
        case errno.EISDIR:
            return "it is a folder: name a file in it"
        case errno.ENOENT if not os.path.isdir(folder):
            return f"the folder {folder} is not there: make it, or give another path"
        case errno.ENOENT | errno.EACCES | errno.EPERM | errno.EROFS:
            words = os.strerror(error.errno)
            return f"this user can make no file there ({words}): give another path"
    return error.strerror or str(error)
