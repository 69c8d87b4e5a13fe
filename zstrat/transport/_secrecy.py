"""Who can read the secret of a key folder, or put keys into it: decided by its modes.

A folder that ``zstrat keygen`` made belongs to one user alone. Where an engine lays the
keys out, a Secret of Kubernetes for one, it looks otherwise: a folder of mode 1777 with
links, files 0440 with a group that the pod alone has. That is as safe if

- nothing can be written there (a read-only mount), because whoever adds a public key to
  a folder may join the cluster; and
- the secret cannot be read by "others", and its group is one of this process in which
  the system knows nobody else.

Whoever reads files as another user of this group, or as root, is one that the engine
has let in: both are true for the keys of one user, too.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zstrat.errors import PermissionDeniedError

if TYPE_CHECKING:
    from pathlib import Path

_OTHERS: Final = 0o077
"""What anybody else than the owner may do."""
_READ_BY_GROUP: Final = 0o040


@dataclass(frozen=True, slots=True)
class Secrecy:
    """What decides: modes of the file and of its folder, whether nothing can be written
    there, and whether the file's group is this process's own."""

    file: int
    folder: int
    is_read_only: bool
    is_own_group: bool

    @property
    def file_is_private(self) -> bool:
        """Whether nobody else reads or writes the secret."""
        others = self.file & _OTHERS
        return not others or (
            others == _READ_BY_GROUP and self.is_read_only and self.is_own_group
        )

    @property
    def folder_is_private(self) -> bool:
        """Whether nobody else comes by the secret, or puts keys beside it."""
        return not self.folder & _OTHERS or self.is_read_only


def check_private(file: Path) -> None:
    """Refuses a secret that others can read, and a folder that they can enter.

    Raises:
        PermissionDeniedError: Names what is open, and what to do.
    """
    seen = _look(file)
    for each, mode, fine in (
        (file, seen.file, seen.file_is_private),
        (file.parent, seen.folder, seen.folder_is_private),
    ):
        if not fine:
            raise PermissionDeniedError(
                f"{each} has mode {mode:04o}: whoever reads the secret can act as this "
                f"task; {_advice(each, seen)}"
            )


def _advice(path: Path, seen: Secrecy) -> str:
    if not seen.is_read_only:
        return f"run `chmod {'700' if path.is_dir() else '600'} {path}`"
    if seen.file & _OTHERS == _READ_BY_GROUP:
        return (
            "its group is none of this process, or has other members: give the pod an "
            "fsGroup that nobody else has"
        )
    return "it is mounted, so say there who reads it: `defaultMode: 0400` of a Secret"


def _look(file: Path) -> Secrecy:
    state = file.stat()
    return Secrecy(
        stat.S_IMODE(state.st_mode),
        stat.S_IMODE(file.parent.stat().st_mode),
        # Of both: a link may lead to another file system.
        all(os.statvfs(each).f_flag & os.ST_RDONLY for each in (file, file.parent)),
        _is_own(state.st_gid),
    )


def _is_own(group: int) -> bool:
    """Whether this process is in the group, and nobody else is known to be."""
    if group not in (os.getegid(), *os.getgroups()):
        return False
    mine = os.geteuid()
    try:
        members = {pwd.getpwnam(name).pw_uid for name in grp.getgrgid(group).gr_mem}
    except KeyError:  # a number without a name: given by the engine
        members = set()
    members |= {each.pw_uid for each in pwd.getpwall() if each.pw_gid == group}
    return members <= {mine}
