"""Keys: who may join a cluster, and as what.

A key folder holds one pair per role, ``<role>.secret`` and ``<role>.public``, made once
by `generate_keys` and copied to the machines: each needs the secret of its own role
and the public halves of all. Tasks of a role may have a pair each instead,
``<role>-<index>.secret`` and ``.public``: then no holder of one can pass for another,
and no parameter server can keep a second copy for another.

The authenticator answers libzmq's question whether a key may connect. It sits on the
loop of its endpoint, at an address that libzmq fixes per context. Whatever goes wrong
in it is a refusal, never an end: what it cannot decide it denies, and should its socket
be gone, `revive` opens another one; in between nobody is admitted, because the sockets
enforce their domain.

*Threats.* Everybody who reaches a port may try to talk: CURVE proves who has which
secret, the authenticator admits exactly the public keys of the folder, and the role of
a connection is that of its key, whatever its HELLO says. Whoever reads a secret has its
role: a folder that others can enter is refused (`Secrecy`). CURVE without an
authenticator admits every key, and one whose domain is not enforced admits all when it
dies; `arm_server` sets both, before the socket is bound.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85

from zstrat.errors import PermissionDeniedError
from zstrat.wire import Job

from ._pump import Pump
from ._secrecy import check_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

DOMAIN: Final = "zstrat"
_KEY_LENGTH: Final = 40  # characters of Z85
_NAME: Final = re.compile(rf"(?:{'|'.join(Job)})(?:-(?:0|[1-9][0-9]*))?", re.ASCII)


class Security:
    """The keys of one task: its own pair, and the public keys of all others, by the
    name of their files."""

    def __init__(
        self, folder: Path, job: Job, secret: str, public: str, publics: dict[str, str]
    ) -> None:
        self.folder, self.job = folder, job
        self._secret, self._public, self._publics = secret, public, publics
        self._owners = {key: _owner(name) for name, key in publics.items()}

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        job: str,
        index: int | None = None,
        *,
        guarded: bool = False,
    ) -> Security:
        """Reads the keys that a task needs from a key folder: its own pair if there is
        one, else that of its role.

        Args:
            index: Of the task in ``job``; None: one that has no index.
            guarded: Somebody else keeps others out of the folder, say by an access
                control list, whose mask looks like permissions of the group.

        Raises:
            ValueError: The folder or a file in it is missing or no key; names it.
            PermissionDeniedError: Others than its owner can read the secret.
        """
        folder, role = Path(path), Job(job)
        publics = {name: _read(folder / f"{name}.public") for name in key_names(folder)}
        own = f"{role}-{index}"
        name = own if own in publics else str(role)
        if name not in publics or len(set(publics.values())) != len(publics):
            raise ValueError(
                f"key folder {folder}: expected {name}.public and a different key for "
                f"each role and task, found {', '.join(publics) or 'none'}: make one "
                f"with `zstrat keygen {folder}`"
            )
        secret_file = folder / f"{name}.secret"
        secret = _read(secret_file)
        if not guarded:
            check_private(secret_file)
        public = zmq.curve_public(secret.encode()).decode()
        if public != publics[name]:
            raise ValueError(
                f"key folder {folder}: {name}.secret does not belong to {name}.public: "
                "they come from two runs of `zstrat keygen`"
            )
        return cls(folder, role, secret, public, publics)

    def role_of(self, key: str) -> Job | None:
        """The role of a public key, None if it is not one of the cluster's."""
        owner = self._owners.get(key)
        return None if owner is None else owner[0]

    def index_of(self, key: str) -> int | None:
        """The index of the only task that has the key; None: all of its role do."""
        owner = self._owners.get(key)
        return None if owner is None else owner[1]

    @property
    def index(self) -> int | None:
        """That of the only task with this secret; None: all of its role have it."""
        return self.index_of(self._public)

    def arm_server(self, socket: zmq.Socket[bytes]) -> None:
        """Lets ``socket`` take only whom the authenticator admits. Before bind."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret.encode()
        socket.zap_domain = DOMAIN.encode()
        socket.zap_enforce_domain = True

    def arm_client(self, socket: zmq.Socket[bytes], server: Job, index: int) -> None:
        """Lets ``socket`` talk only to a task with the key of that server.

        Raises:
            ValueError: The folder has no key of that task or role.
        """
        key = self._publics.get(f"{server}-{index}") or self._publics.get(server)
        if key is None:
            raise ValueError(f"key folder {self.folder}: {server}.public is missing")
        socket.curve_serverkey = key.encode()
        socket.curve_publickey = self._public.encode()
        socket.curve_secretkey = self._secret.encode()

    def denied(self, target: str) -> PermissionDeniedError:
        """The words for a client whose key ``target`` did not admit."""
        return PermissionDeniedError(
            f"{target} refused the key of the role {self.job} from {self.folder}: the "
            "task there has the keys of another cluster; run `zstrat keygen` once and "
            "copy the same folder to all machines"
        )


def generate_keys(
    path: str | PathLike[str], tasks: Mapping[Job, int] | None = None
) -> list[Path]:
    """Makes a key folder (mode 0700) with a pair of keys for each role.

    Args:
        tasks: Roles of which each task, so many from 0 on, gets a pair of its own.

    Returns:
        The files written: secrets have mode 0600.

    Raises:
        FileExistsError: There are keys already; nothing was written.
    """
    folder = Path(path)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    there = sorted(
        file.name for kind in ("secret", "public") for file in folder.glob(f"*.{kind}")
    )
    if there:
        raise FileExistsError(
            f"{folder} holds keys already ({', '.join(there)}): a running cluster may "
            "need them; remove them, or choose another folder"
        )
    written = []
    for name in _names(tasks or {}):
        public, secret = zmq.curve_keypair()
        for suffix, key, mode in (("public", public, 0o644), ("secret", secret, 0o600)):
            file = folder / f"{name}.{suffix}"
            file.touch(mode=mode, exist_ok=False)
            file.write_text(f"{key.decode()}\n", "ascii")
            written.append(file)
    return written


def key_names(folder: Path) -> list[str]:
    """Whose public keys are in a folder: "chief", "ps", "worker-3"."""
    names = [file.stem for file in folder.glob("*.public")]
    return sorted(name for name in names if _NAME.fullmatch(name))


def _names(tasks: Mapping[Job, int]) -> Iterator[str]:
    for role in Job:
        if role in tasks:
            yield from (f"{role}-{index}" for index in range(tasks[role]))
        else:
            yield str(role)


def _owner(name: str) -> tuple[Job, int | None]:
    role, _, index = name.partition("-")
    return Job(role), int(index) if index else None


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


_ADDRESS: Final = "inproc://zeromq.zap.01"
_LOG: Final = logging.getLogger("zstrat.transport")

Admits = Callable[[str], bool]


class Authenticator:
    """Admits the CURVE keys (Z85) that ``admits`` says yes to. Before the bind."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admits: Admits) -> None:
        self._context, self._admits = context, admits
        self._pump: Pump | None = None
        self.refused = 0
        self.revive()

    def revive(self) -> None:
        """Makes sure that somebody answers."""
        if self._pump is not None and not self._pump.is_closed:
            return
        socket: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        socket.linger = 0
        try:
            socket.bind(_ADDRESS)
        except zmq.ZMQError:  # the one before is not quite gone: at the next revival
            socket.close()
            return
        self._pump = Pump(socket, self._asked)

    def close(self) -> None:
        if self._pump is not None:
            self._pump.close(0)

    def _asked(self, frames: list[zmq.Frame]) -> None:
        assert self._pump is not None
        parts = [frame.bytes for frame in frames]
        request = parts[1] if len(parts) > 1 else b""
        key = self._admitted(parts)
        if key is None:
            self.refused += 1
            verdict = b"400", b"this key is not one of the cluster's", b""
        else:
            verdict = b"200", b"", key.encode()
        self._pump.send((b"1.0", request, *verdict, b""))

    def _admitted(self, parts: list[bytes]) -> str | None:
        match parts:
            case [b"1.0", _, domain, _, _, b"CURVE", raw] if domain == DOMAIN.encode():
                pass
            case _:
                return None
        try:
            key = z85.encode(raw).decode()
            return key if self._admits(key) else None
        except (
            Exception
        ):  # to the log and to the client as a refusal; the next one counts
            _LOG.exception("the check of a key failed: it is refused")
            return None
