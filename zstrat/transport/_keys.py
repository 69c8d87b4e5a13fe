"""Key folders: reading, creating and rotating keys.

A folder has one pair per role, ``<role>.secret`` and ``<role>.public``, created once by
`generate_keys` and copied to the machines. Tasks of a role may have their own pairs
instead, ``<role>-<index>.secret`` and ``.public``.

Keys are changed while all tasks run, in three steps (`rotate_keys`). After each step
the folder is copied to all machines, where the tasks notice and read it again.

1. ``next/`` gets new pairs. All tasks admit their owners from now on, and trust servers
   that have them, so that the order of machines in the second step does not matter.
2. The new pairs replace the old ones, whose public keys go to ``previous/``. Servers
   bind again with their new secret, and their peers reconnect.
3. ``previous/`` is removed: old secrets are no longer admitted.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq

from zstrat.errors import PermissionDeniedError
from zstrat.paths import explained
from zstrat.wire import Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from os import PathLike

NEXT: Final = "next"
PREVIOUS: Final = "previous"

_KEY_LENGTH: Final = 40  # characters of Z85
_NAME: Final = re.compile(rf"(?:{'|'.join(Job)})(?:-(?:0|[1-9][0-9]*))?", re.ASCII)

Owner = tuple[Job, "int | None"]
"""The role of a key, and the index of the only task that has the key; None: all tasks
of the role have it."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one task: its own pair, and the owner of each public key in the
    folder, keys in use first. ``stamp`` identifies the state of the files."""

    secret: str
    public: str
    owners: Mapping[str, Owner]
    stamp: object

    def of(self, job: Job, index: int | None) -> list[str]:
        """Returns the public keys that a task may have: its own ones if there are any,
        else those of its role."""
        own = [key for key, owner in self.owners.items() if owner == (job, index)]
        return own or [k for k, owner in self.owners.items() if owner == (job, None)]


class KeyFolder:
    """The key folder of a task, to be read; arguments as of `Security.load`."""

    def __init__(
        self, path: str | PathLike[str], job: Job, index: int | None, guarded: bool
    ) -> None:
        self.folder, self.job = Path(path), job
        self._index, self._guarded = index, guarded

    def stamp(self) -> object:
        """Returns a value that changes whenever the files may have changed."""
        return tuple(_states(self._folders()))

    def read(self) -> Keys:
        """Reads all files of the folder.

        Raises:
            ValueError, PermissionDeniedError: As `Security.load`.
        """
        stamp = self.stamp()  # first: later changes are then read the next time
        publics = _publics(self.folder)
        if not publics:
            problem = "holds no keys" if self.folder.is_dir() else "does not exist"
            if self.folder.is_file():
                raise ValueError(
                    f"key folder {self.folder} is a file: give the folder that "
                    "`zstrat keygen` has made"
                )
            raise ValueError(
                f"key folder {self.folder} {problem}: give the folder that `zstrat "
                "keygen` has made for this cluster, or a copy of it; where none was "
                f"made yet, make one with `zstrat keygen {self.folder}`"
            )
        own = f"{self.job}-{self._index}"
        name = own if own in publics else str(self.job)
        if name not in publics or len(set(publics.values())) != len(publics):
            raise ValueError(
                f"key folder {self.folder}: expected {name}.public and a different key "
                f"for each role and task, found {', '.join(publics)}: copy the "
                "folder again that `zstrat keygen` has made"
            )
        secret = self._secret(name)
        if zmq.curve_public(secret.encode()).decode() != publics[name]:
            raise ValueError(
                f"key folder {self.folder}: {name}.secret does not belong to "
                f"{name}.public: they come from two runs of `zstrat keygen`"
            )
        return Keys(secret, publics[name], self._owners(), stamp)

    def _secret(self, name: str) -> str:
        file = self.folder / f"{name}.secret"
        secret = _read(file)
        # After the read: a missing file gets the error that says so.
        if not self._guarded:
            check_private(file)
        return secret

    def _owners(self) -> dict[str, Owner]:
        owners: dict[str, Owner] = {}
        for folder in self._folders():
            for name, key in _publics(folder).items():
                if owners.setdefault(key, _owner(name)) != _owner(name):
                    raise ValueError(
                        f"{folder / name}.public is the key of another role or task: "
                        f"remove {folder}, and copy it again"
                    )
        return owners

    def _folders(self) -> tuple[Path, ...]:
        return self.folder, self.folder / NEXT, self.folder / PREVIOUS


def generate_keys(
    path: str | PathLike[str], tasks: Mapping[Job, int] | None = None
) -> list[Path]:
    """Creates a key folder (mode 0700) with a pair of keys for each role.

    Args:
        tasks: Number of tasks, by role, that get their own pairs, from index 0.

    Returns:
        The paths of the written files; those of secrets have mode 0600.

    Raises:
        FileExistsError: The folder has keys already; nothing was written.
        OSError: The keys cannot be written; the error says why.

    After an error or Ctrl-C no file is left.
    """
    folder, is_new = Path(path), not os.path.lexists(path)
    written: list[Path] = []
    try:
        _make_folder(folder)
        _write_pairs(folder, _names(tasks or {}), written)
    except BaseException:  # to the caller: incomplete keys are useless
        for file in written:
            file.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):  # there is none, or others use it
                folder.rmdir()
        raise
    return written


def _make_folder(folder: Path) -> None:
    """Creates the key folder, unless it exists; fails if it has keys."""
    with explained("key folder", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    present = sorted(
        file.name for kind in ("secret", "public") for file in folder.glob(f"*.{kind}")
    )
    if present:
        raise FileExistsError(
            f"{folder} holds keys already ({', '.join(present)}): a running cluster "
            "may need them; remove them, or choose another folder"
        )


def _write_pairs(folder: Path, names: Iterable[str], written: list[Path]) -> None:
    """Writes new pairs of keys; adds each file to ``written`` before it exists."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in names:
        public, secret = zmq.curve_keypair()
        for suffix, key, mode in (("public", public, 0o644), ("secret", secret, 0o600)):
            file = folder / f"{name}.{suffix}"
            written.append(file)
            try:
                # Created with its mode, then written: a secret is never readable for
                # others, not even for a moment.
                file.touch(mode=mode, exist_ok=False)
            except FileExistsError:  # written by another process
                written.remove(file)
                raise
            file.write_text(f"{key.decode()}\n", "ascii")


def rotate_keys(path: str | PathLike[str]) -> str:
    """Takes the next of the three steps of a key rotation, or completes an interrupted
    one. If pairs were added after the first step, repeats the first step for these
    pairs, so that the second step replaces all.

    Returns:
        What was done: `NEXT` if the folder ``next/`` was created, `PREVIOUS` if the
            keys in use went to ``previous/``, "" after the last step.

    Raises:
        FileNotFoundError: The folder has no keys.
    """
    folder = Path(path)
    following, previous = folder / NEXT, folder / PREVIOUS
    names = key_names(folder)
    if not names:
        raise FileNotFoundError(
            f"{folder} holds no keys: make some with `zstrat keygen {folder}`"
        )
    making = folder / f".{NEXT}"
    shutil.rmtree(making, ignore_errors=True)
    if following.exists():
        late = set(names).difference(key_names(following))
        if previous.exists() or not late:
            _switch(folder, following, previous)
            return PREVIOUS
        # Pairs added since: the first step, for these. The public file comes last, as
        # it makes the pair valid.
        added: list[Path] = []
        _write_pairs(making, sorted(late), added)
        for file in reversed(added):
            file.replace(following / file.name)
        making.rmdir()
        return NEXT
    if previous.exists():
        shutil.rmtree(previous)
        return ""
    # Made elsewhere and renamed: tasks read the folder at any time, and must not find
    # half of it.
    _write_pairs(making, names, [])
    making.rename(following)
    return NEXT


def _switch(folder: Path, following: Path, previous: Path) -> None:
    """Takes the second step of a key rotation. At any time each public key is in one of
    the folders."""
    if not previous.exists():
        making = folder / f".{PREVIOUS}"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(mode=0o700)
        for name in key_names(folder):
            shutil.copy(folder / f"{name}.public", making)
        # Complete before any pair is replaced: a key that is in neither folder is
        # revoked.
        making.rename(previous)
    for file in sorted(following.iterdir()):
        file.replace(folder / file.name)
    following.rmdir()


def key_names(folder: Path) -> list[str]:
    """Returns the names of the public keys in a folder: "chief", "ps", "worker-3"."""
    names = [file.stem for file in folder.glob("*.public")]
    return sorted(name for name in names if _NAME.fullmatch(name))


def _names(tasks: Mapping[Job, int]) -> Iterator[str]:
    for role in Job:
        if role in tasks:
            yield from (f"{role}-{index}" for index in range(tasks[role]))
        else:
            yield str(role)


def _publics(folder: Path) -> dict[str, str]:
    return {name: _read(folder / f"{name}.public") for name in key_names(folder)}


def _states(folders: Iterable[Path]) -> Iterator[tuple[str, int, int, int]]:
    for folder in folders:
        try:
            with os.scandir(folder) as listed:
                files = sorted(listed, key=lambda file: file.name)
        except OSError:  # gone while it was listed, or no descriptor is left
            continue
        for file in files:
            try:
                state = file.stat()
            except OSError:  # gone meanwhile, or a link to nothing
                continue
            # `next` and `previous` are listed themselves.
            if not stat.S_ISDIR(state.st_mode):
                # Ctime: modes count, too.
                yield file.path, state.st_ino, state.st_size, state.st_ctime_ns


def _owner(name: str) -> Owner:
    role, _, index = name.partition("-")
    return Job(role), int(index) if index else None


def _read(file: Path) -> str:
    try:
        key = file.read_text("ascii").strip()
    except OSError as error:
        raise ValueError(
            f"cannot read the key {file}: {error.strerror}; copy it from the folder "
            "that `zstrat keygen` has made"
        ) from error
    except UnicodeDecodeError:
        key = ""
    if len(key) != _KEY_LENGTH:
        raise ValueError(
            f"{file} is not a key: expected {_KEY_LENGTH} characters of Z85"
        )
    return key


_OTHERS: Final = 0o077
"""Permissions of users other than the owner."""
_READ_BY_GROUP: Final = 0o040


@dataclass(frozen=True, slots=True)
class Secrecy:
    """Decides whether other users can read a secret, or add keys to its folder: by the
    modes of both, whether the file system is read-only, and whether the file's group is
    this process's own.

    A folder that ``zstrat keygen`` made belongs to one user alone. A folder that an
    engine provides, such as a Secret of Kubernetes, looks different: mode 1777, with
    links, to files of mode 0440 and a group that the pod alone has. That is as safe if
    nothing can be written there (a read-only mount), because a user who adds a public
    key to a folder may join the cluster; and if "others" cannot read the secret, and
    its group is one of this process in which the system knows nobody else. A process
    that reads the files as another user of this group, or as root, was let in by the
    engine; such a process could read a folder of one user, too.
    """

    file: int
    folder: int
    is_read_only: bool
    is_own_group: bool

    @property
    def file_is_private(self) -> bool:
        """Whether no other user can read or write the secret."""
        others = self.file & _OTHERS
        return not others or (
            others == _READ_BY_GROUP and self.is_read_only and self.is_own_group
        )

    @property
    def folder_is_private(self) -> bool:
        """Whether no other user can reach the secret, or add keys to the folder."""
        return not self.folder & _OTHERS or self.is_read_only


def check_private(file: Path) -> None:
    """Checks that other users cannot read the secret ``file``, nor add keys to its
    folder.

    Raises:
        PermissionDeniedError: They can; the error names the path and the remedy.
    """
    seen = _look(file)
    for each, mode, fine in (
        (file, seen.file, seen.file_is_private),
        (file.parent, seen.folder, seen.folder_is_private),
    ):
        if not fine:
            raise PermissionDeniedError(
                f"{each} has mode {mode:04o}: every user who reads the secret can act "
                f"as this task; {_advice(each, seen)}"
            )


def _advice(path: Path, seen: Secrecy) -> str:
    if not seen.is_read_only:
        return f"run `chmod {'700' if path.is_dir() else '600'} {path}`"
    if seen.file & _OTHERS == _READ_BY_GROUP:
        return (
            "its group is not one of this process, or has other members: give the pod "
            "an fsGroup that nothing else has"
        )
    return "it is mounted: set `defaultMode: 0400` of the Secret"


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
    """Returns whether this process is in the group, and no other user is."""
    if group not in (os.getegid(), *os.getgroups()):
        return False
    user_id = os.geteuid()
    try:
        members = {pwd.getpwnam(name).pw_uid for name in grp.getgrgid(group).gr_mem}
    except KeyError:  # a number without a name: given by the engine
        members = set()
    # `gr_mem` leaves out users whose primary group it is.
    members |= {each.pw_uid for each in pwd.getpwall() if each.pw_gid == group}
    return members <= {user_id}
