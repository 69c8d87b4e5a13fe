"""The folder of a checkpoint while it is written, and the lock that admits one writer.

A writer draws a *mark* and puts it into every name that it makes, so a new checkpoint
never touches the files of the checkpoint that it replaces: until the manifest is
committed the old checkpoint is complete, and from then on the new one is. Files that no
manifest names are garbage of earlier writers, which the next writer that holds the lock
removes.

There is one writer at a time, and others can read its name in the file of the lock. The
kernel keeps the lock (``flock``), so the lock ends with its process however the process
ends: after kill -9 nothing is left to clean up. The text in the file is for people: it
says which process holds the lock, and means nothing when no process does.

File systems without locks (some network mounts) are written to without a lock, and a
warning is given: every writer uses new names, so two writers waste space but damage
nothing.
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
"""Attempts to take a lock. Each attempt that loses a race means that another writer
came and went; so many lost races mean a fault."""


class FolderLock:
    """A lock, held from construction until `release`, on what the file ``path`` guards;
    a context manager.

    Args:
        path: The file of the lock, in the guarded folder or next to it. `release`
            removes the file; a process that is killed leaves it.

    Raises:
        BusyError: Another writer holds the lock; the error says which.
        NotFoundError: The folder does not exist.
        OSError: Any other error of the system.
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
        """Releases the lock. May be called again; garbage collection of the
        `FolderLock` releases the lock, too."""
        self._end()

    def forget(self) -> None:
        """Closes the descriptor of the lock in a forked process, without releasing the
        lock of its parent."""
        # Closed, not unlocked: the lock is of the open file, which the parent shares.
        if self._end.detach() is not None:
            os.close(self._descriptor)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_held: Final[weakref.WeakSet[FolderLock]] = weakref.WeakSet()


def _forget() -> None:
    """Closes the descriptors of all locks in the child of a fork: the parent holds the
    locks, and the child would keep them locked after the parent has ended."""
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
"""Matches file names that a writer of checkpoints makes. No other file is ever
removed."""


class CheckpointFolder:
    """Writes a checkpoint to a folder: when the context ends, the folder is the
    checkpoint that was committed, or else the one that it was before. A context manager
    that removes files of no committed checkpoint.

    Raises:
        BusyError: Another writer is at work in the folder; the error says which.
        AlreadyExistsError: The folder has a manifest of another program.
        NotFoundError: The parent of the folder does not exist.
        OSError: Any other error of the system.
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
        """Returns the file name for the part ``name``: no other writer uses or will use
        it."""
        return f"part-{name}-{self.mark}.safetensors"

    def path_of(self, file: str) -> str:
        return os.path.join(self.path, file)

    def show(self) -> str:
        """Creates an empty file in the folder and returns its path. A process that sees
        the file shares this folder."""
        path = self.path_of(f"seen-{self.mark}")
        with blamed(path, "writing"):
            os.close(create(path))
        return path

    def commit(self, manifest: Manifest) -> None:
        """Commits the manifest: once this returns, the folder holds this checkpoint,
        even after a crash.

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
        """Removes files that no manifest names, and releases the lock for the next
        writer."""
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
    """Removes a folder that is not a checkpoint, unless a writer is at work in it.
    Files that no writer made stay, and so does their folder. Returns whether the folder
    is gone; False also if the system refuses to remove a file."""
    if os.path.exists(os.path.join(path, MANIFEST)):
        return False
    return remove(path)


def remove(path: str) -> bool:
    """Removes a checkpoint: its manifest first, so that no partial checkpoint can be
    seen, then as `sweep` does. A checkpoint of another program stays."""
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
