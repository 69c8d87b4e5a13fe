"""The files of one checkpoint while it is written, and what earlier writers left there.

A writer draws a *mark* and puts it into every name that it makes, so a new checkpoint
never touches the files of the one that it replaces: until the manifest is committed the
old one is whole, and from then on the new one is. What no manifest names is garbage,
and is removed by the next writer that holds the lock.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from typing import Final

from zstrat.errors import BusyError, DataLossError, NotFoundError

from ._disk import blamed, create, sync_folder
from ._lock import FolderLock
from ._manifest import MANIFEST, Manifest

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
        NotFoundError: The folder above it does not exist.
        OSError: As the system says.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.mark = secrets.token_hex(4)
        self._is_new = False
        with blamed(path, "creating"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
                self._is_new = True
        self._lock = FolderLock(os.path.join(path, LOCK))
        if self._is_new:
            sync_folder(os.path.dirname(path))
        else:
            self._sweep()

    def part(self, name: str) -> str:
        """File name of a part: not in use, and not to be by anybody else."""
        return f"part-{name}-{self.mark}.safetensors"

    def path_of(self, file: str) -> str:
        return os.path.join(self.path, file)

    def show(self) -> str:
        """Path of a new empty file, which only who shares this folder can see."""
        path = self.path_of(f"seen-{self.mark}")
        with blamed(path, "writing"):
            os.close(create(path))
        return path

    def commit(self, manifest: Manifest) -> None:
        """From now on the folder is this checkpoint, also after a crash.

        Raises: As `Manifest.commit`.
        """
        manifest.commit(self.path, self.mark)

    def close(self) -> None:
        """Removes what no manifest names, and lets the next writer in."""
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
            return  # somebody may want to look at it; a new manifest makes it garbage
        _remove(self.path, keep)


def sweep(path: str) -> bool:
    """Removes a folder that is no checkpoint, unless it is being written; files that no
    writer made stay, and so does their folder. Whether it is gone: what the system does
    not let us remove stays, too.
    """
    if os.path.exists(os.path.join(path, MANIFEST)):
        return False
    return remove(path)


def remove(path: str) -> bool:
    """Removes a checkpoint, its manifest first: it is never half of one. As `sweep`."""
    try:
        with FolderLock(os.path.join(path, LOCK)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, MANIFEST))
                sync_folder(path)
            _remove(path, {LOCK})
        os.rmdir(path)
    except (BusyError, NotFoundError, FileNotFoundError):
        return False
    except OSError:  # not empty, because somebody keeps other files there, or not ours
        return not os.path.exists(path)
    return True


def _remove(path: str, keep: set[str]) -> None:
    for name in os.listdir(path):
        if name not in keep and _OURS.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
