"""Keys: who may join a cluster, and as what.

A key folder holds one pair per role, ``<role>.secret`` and ``<role>.public``, made once
by `generate_keys` and copied to the machines: each needs the secret of its own role
and the public halves of all.

*Threats.* Everybody who reaches a port may try to talk: CURVE proves who has which
secret, `_zap` admits exactly the public keys of the folder, and the role of a
connection is that of its key, whatever its HELLO says. Whoever reads a secret has its
role: a folder that others can enter is refused. CURVE without an authenticator admits
every key, and one whose domain is not enforced admits all when it dies; `arm_server`
sets both, before the socket is bound.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq

from zstrat.errors import PermissionDeniedError
from zstrat.wire import Job

if TYPE_CHECKING:
    from os import PathLike

DOMAIN: Final = "zstrat"
_KEY_LENGTH: Final = 40  # characters of Z85


class Security:
    """The keys of one task: its own pair, and the public keys of all roles."""

    def __init__(
        self, folder: Path, job: Job, secret: str, publics: dict[Job, str]
    ) -> None:
        self.folder, self.job = folder, job
        self._secret, self._publics = secret, publics
        self._roles = {key: role for role, key in publics.items()}

    @classmethod
    def load(
        cls, path: str | PathLike[str], job: str, *, guarded: bool = False
    ) -> Security:
        """Reads the keys that a task of ``job`` needs from a key folder.

        Args:
            guarded: Somebody else keeps others out of the folder, say by an access
                control list, whose mask looks like permissions of the group.

        Raises:
            ValueError: The folder or a file in it is missing or no key; names it.
            PermissionDeniedError: Others than its owner can read the secret.
        """
        folder, role = Path(path), Job(job)
        secret_file = folder / f"{role}.secret"
        publics = {
            each: _read(folder / f"{each}.public")
            for each in Job
            if (folder / f"{each}.public").exists()
        }
        if role not in publics or len(set(publics.values())) != len(publics):
            raise ValueError(
                f"key folder {folder}: expected {role}.public and a different key for "
                f"each role, found {', '.join(publics) or 'none'}: make one with "
                f"`zstrat keygen {folder}`"
            )
        secret = _read(secret_file)
        if not guarded:
            _check_private(secret_file)
        if zmq.curve_public(secret.encode()).decode() != publics[role]:
            raise ValueError(
                f"key folder {folder}: {role}.secret does not belong to {role}.public: "
                "they come from two runs of `zstrat keygen`"
            )
        return cls(folder, role, secret, publics)

    def role_of(self, key: str) -> Job | None:
        """The role of a public key, None if it is not one of the cluster's."""
        return self._roles.get(key)

    def arm_server(self, socket: zmq.Socket[bytes]) -> None:
        """Lets ``socket`` take only whom the authenticator admits. Before bind."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret.encode()
        socket.zap_domain = DOMAIN.encode()
        socket.zap_enforce_domain = True

    def arm_client(self, socket: zmq.Socket[bytes], server: Job) -> None:
        """Lets ``socket`` talk only to a task with the key of ``server``.

        Raises:
            ValueError: The folder has no key of that role.
        """
        if server not in self._publics:
            raise ValueError(f"key folder {self.folder}: {server}.public is missing")
        socket.curve_serverkey = self._publics[server].encode()
        socket.curve_publickey = self._publics[self.job].encode()
        socket.curve_secretkey = self._secret.encode()

    def denied(self, target: str) -> PermissionDeniedError:
        """The words for a client whose key ``target`` did not admit."""
        return PermissionDeniedError(
            f"{target} refused the key of the role {self.job} from {self.folder}: the "
            "task there has the keys of another cluster; run `zstrat keygen` once and "
            "copy the same folder to all machines"
        )


def generate_keys(path: str | PathLike[str]) -> list[Path]:
    """Makes a key folder (mode 0700) with a pair of keys for each role.

    Returns:
        The files written: secrets have mode 0600.

    Raises:
        FileExistsError: There are keys already; nothing was written.
    """
    folder = Path(path)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    there = sorted(each.name for role in Job for each in folder.glob(f"{role}.*"))
    if there:
        raise FileExistsError(
            f"{folder} holds keys already ({', '.join(there)}): a running cluster may "
            "need them; remove them, or choose another folder"
        )
    written = []
    for role in Job:
        public, secret = zmq.curve_keypair()
        for suffix, key, mode in (("public", public, 0o644), ("secret", secret, 0o600)):
            file = folder / f"{role}.{suffix}"
            file.touch(mode=mode, exist_ok=False)
            file.write_text(f"{key.decode()}\n", "ascii")
            written.append(file)
    return written


def _read(file: Path) -> str:
    try:
        key = file.read_text("ascii").strip()
    except OSError as error:
        raise ValueError(f"cannot read the key {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        key = ""
    if len(key) != _KEY_LENGTH:
        raise ValueError(f"{file} is no key: expected {_KEY_LENGTH} characters of Z85")
    return key


def _check_private(file: Path) -> None:
    for each in (file, file.parent):
        mode = stat.S_IMODE(each.stat().st_mode)
        if mode & 0o077:
            raise PermissionDeniedError(
                f"{each} has mode {mode:04o}: whoever reads the secret can act as this "
                f"task; run `chmod {'700' if each.is_dir() else '600'} {each}`"
            )
