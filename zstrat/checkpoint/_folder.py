"""The files of a checkpoint while it is written, and the one writer that has the lock.

A writer draws a *mark* and puts it into every name that it makes, so a new checkpoint
never touches the files of the one that it replaces: until the manifest is committed the
old one is whole, and from then on the new one is. What no manifest names is garbage,
left by earlier writers, and is removed by the next writer that holds the lock.

There is one writer at a time, and its name is there for the others. The lock is the
kernel's (``flock``), so it ends with its process however that ends: after kill -9
nothing is left to clear away. The text in the file is for people: it says who holds the
lock, and means nothing when nobody does.

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
import re
import secrets
import socket
import sys
import weakref
from datetime import UTC, datetime
from typing import Final

from zstrat.errors import AlreadyExistsError, BusyError, DataLossError, NotFoundError

from ._disk import blamed, create, sync_folder, write_all
from ._manifest import MANIFEST, Manifest, is_foreign

log = logging.getLogger("zstrat.checkpoint")

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_TRIES: Final = 100
"""Each lost race means that another writer came and went; so many are a fault."""


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
        # Not __del__: at the end of the interpreter modules may be gone.
        self._end = weakref.finalize(self, _unlocked, path, descriptor)
        self._descriptor = descriptor
        _held.add(self)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
            os.ftruncate(descriptor, 0)
            write_all(descriptor, json.dumps(_myself()).encode())

    def release(self) -> None:
        """Releases the lock. May be called again; deleting the `FolderLock` releases
        it, too."""
        self._end()

    def forget(self) -> None:
        """Closes the descriptor in a forked process, which does not have the lock."""
        # Closed, not unlocked: the lock is of the open file, which the parent shares.
        if self._end.detach() is not None:
            os.close(self._descriptor)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_held: Final[weakref.WeakSet[FolderLock]] = weakref.WeakSet()


def _forget() -> None:
    """Closes all locks in the child of a fork: the parent holds them as long as it
    lives, and the child would hold them for longer."""
    for lock in list(_held):
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def _unlocked(path: str, descriptor: int) -> None:
    # Before it is unlocked: waiters for the old file see that it is gone.
    with contextlib.suppress(OSError):
        os.unlink(path)
    os.close(descriptor)


def _locked(path: str) -> int:
    for _ in range(_TRIES):
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            _lock(descriptor, path)
            # A lock on a file without a name would keep nobody out.
            if _is_still(path, descriptor):
                return descriptor
        except BaseException:  # to the caller who wants the lock
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
                is_own = pid == os.getpid() and host == socket.gethostname()
                who = "this process itself" if is_own else f"process {pid} on {host}"
                return f"{who} ({program}) since {since}"
    except ValueError:  # taken this moment, or on a full disk: it has no name yet
        pass
    return "another program"


LOCK: Final = ".writing.lock"

_OURS: Final = re.compile(
    r"part-[\w-]+\.safetensors|seen-\w+|manifest\.json(\.\w+\.tmp)?|\.writing\.lock"
)
"""Names that a writer makes. Nothing else is ever removed."""


class CheckpointFolder:
    """A folder that becomes a checkpoint, or stays the one that it was; a context
    manager that removes what was not committed.

    Raises:
        BusyError: Another writer is at work in it; says which.
        AlreadyExistsError: It has a manifest of another program.
        NotFoundError: The folder above it does not exist.
        OSError: As the system says.
    """

    def __init__(self, path: str) -> None:
        if is_foreign(path):
            raise AlreadyExistsError(
                f"{os.path.join(path, MANIFEST)} is another program's, and a "
                "checkpoint would replace it: save to another folder"
            )
        self.path = path
        self.mark = secrets.token_hex(4)
        # Only the last folder: a misspelt path above it is an error of the user.
        with blamed(path, "creating"), contextlib.suppress(FileExistsError):
            os.mkdir(path)
        # Swept under the lock: parts of a writer that is at work look like garbage.
        self._lock = FolderLock(os.path.join(path, LOCK))
        self._sweep()

    def part(self, name: str) -> str:
        """Returns the file name of a part that no other writer uses or will use."""
        return f"part-{name}-{self.mark}.safetensors"

    def path_of(self, file: str) -> str:
        return os.path.join(self.path, file)

    def show(self) -> str:
        """Returns the path of a new empty file, which only users of this folder can
        see."""
        path = self.path_of(f"seen-{self.mark}")
        with blamed(path, "writing"):
            os.close(create(path))
        return path

    def commit(self, manifest: Manifest) -> None:
        """Commits the manifest: once this returns, the folder is this checkpoint, even
        after a crash.

        Raises: As `Manifest.commit`.
        """
        # The process that made the folder may have been killed before it did this. Here
        # it costs little: with the files the disk got most names. Where no folder can
        # be made, as above a mount point, it was there for long.
        above = os.path.dirname(self.path) or os.curdir
        if os.access(above, os.W_OK):
            with blamed(self.path, "writing"):
                sync_folder(above)
        manifest.commit(self.path, self.mark)

    def close(self) -> None:
        """Removes what no manifest names, and lets the next writer in."""
        # After a commit this removes the files of the checkpoint before; after an error
        # those of this one.
        with contextlib.suppress(OSError):
            self._sweep()
        self._lock.release()
        with contextlib.suppress(OSError):  # a folder that is a checkpoint is not empty
            os.rmdir(self.path)

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sweep(self) -> None:
        try:
            keep = {MANIFEST, LOCK, *Manifest.of(self.path).files}
        except NotFoundError:
            keep = {LOCK}
        except DataLossError:
            return  # a user may want to look at it; a new manifest makes it garbage
        _remove(self.path, keep)


def sweep(path: str) -> bool:
    """Removes a folder that is not a checkpoint, unless it is being written; files
    that no writer made stay, and so does their folder. Returns whether it is gone: what
    the system does not let us remove stays, too.
    """
    if os.path.exists(os.path.join(path, MANIFEST)):
        return False
    return remove(path)


def remove(path: str) -> bool:
    """Removes a checkpoint, its manifest first: it is never half of one. As `sweep`;
    what another program has made stays."""
    if is_foreign(path):
        return False
    try:
        with FolderLock(os.path.join(path, LOCK)):
            # The manifest first, and on the disk: a crash leaves no checkpoint without
            # its files.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, MANIFEST))
                sync_folder(path)
            _remove(path, {LOCK})
        os.rmdir(path)
    except (BusyError, NotFoundError, FileNotFoundError):
        return False
    except OSError:  # not empty, because a user keeps other files there, or not ours
        return not os.path.exists(path)
    return True


def _remove(path: str, keep: set[str]) -> None:
    for name in os.listdir(path):
        if name not in keep and _OURS.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
