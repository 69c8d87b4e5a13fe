"""One writer at a time, and its name for the others.

The lock is the kernel's (``flock``), so it ends with its process however that ends:
after kill -9 nothing is left to clear away. The text in the file is for people: it says
who holds the lock, and means nothing when nobody does.

File systems without locks (some network mounts) are written to all the same, with a
warning: every name there is new, so two writers waste space but damage nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import sys
import weakref
from datetime import UTC, datetime
from typing import Final

from zstrat.errors import BusyError

from ._disk import blamed, write_all

log = logging.getLogger("zstrat.checkpoint")

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_TRIES: Final = 100
"""Each lost race means that another writer came and went; so many are no chance."""


class FolderLock:
    """The right to write to what ``path`` guards, until `release`; a context manager.

    Args:
        path: A file beside or in what is guarded. It is removed in the end, and may be
            left by a process that was killed.

    Raises:
        BusyError: Another writer holds it; says which.
        NotFoundError: The folder does not exist.
        OSError: As the system says.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with blamed(path, "locking"):
            descriptor = _locked(path)
        # Not __del__: at the end of the interpreter that may find no modules any more.
        self._end = weakref.finalize(self, _unlocked, path, descriptor, os.getpid())
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
            os.ftruncate(descriptor, 0)
            write_all(descriptor, json.dumps(_myself()).encode())

    def release(self) -> None:
        """May be called again; dropping the lock does it too."""
        self._end()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _unlocked(path: str, descriptor: int, owner: int) -> None:
    # Before it is unlocked: whoever waits for the old file sees that it is gone. Not by
    # a forked child, whose parent holds the lock.
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            os.unlink(path)
    os.close(descriptor)


def _locked(path: str) -> int:
    for _ in range(_TRIES):
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            _lock(descriptor, path)
            if _is_still(path, descriptor):
                return descriptor
        except BaseException:  # to whoever wants the lock
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it between our open and our lock
    raise BusyError(f"{path}: other writers come and go too fast to get a turn")


def _lock(descriptor: int, path: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(
            f"{os.path.dirname(path)} is being written by {_holder(descriptor)}: give "
            "each program its own folder, or end that one"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        log.warning(
            "%s: this file system has no locks (%s), so nothing keeps a second "
            "program from saving to the same folder",
            path,
            error.strerror,
        )


def _is_still(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _myself() -> dict[str, object]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "program": os.path.basename(sys.argv[0] if sys.argv else "") or "python",
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _holder(descriptor: int) -> str:
    try:
        match json.loads(os.pread(descriptor, 4096, 0)):
            case {"host": host, "pid": pid, "program": program, "since": since}:
                mine = pid == os.getpid() and host == socket.gethostname()
                who = "this process itself" if mine else f"process {pid} on {host}"
                return f"{who} ({program}) since {since}"
    except ValueError:  # taken this moment, or on a full disk: it has no name yet
        pass
    return "another program"
