"""Keys: which processes may join a cluster, and in which role.

`KeyFolder` reads the keys. A task needs the secret of its role, or its own, and the
public keys of all. Tasks of a role may have a pair each; then no task can impersonate
another one, and no parameter server can keep a backup for another one.

The authenticator answers libzmq when it asks whether a key may connect. It runs on the
loop of its endpoint, at an address that libzmq fixes per context. An error in the
authenticator refuses the key and never stops the authenticator. If its socket is
closed, `revive` opens another one; until then nobody is admitted, because the sockets
enforce their domain.

*Threats.* Any host that reaches a port may try to connect. CURVE proves which secret a
peer has, the authenticator admits exactly the public keys of the folder, and the role
of a connection is the role of its key, whatever its HELLO claims. A process that reads
a secret has its role, so a folder that others can enter is refused (`Secrecy`). CURVE
without an authenticator admits every key, and a socket that does not enforce its domain
admits every peer if the authenticator dies; `arm_server` turns both protections on
before the bind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils import z85

from zstrat.errors import PermissionDeniedError, ZstratError
from zstrat.wire import Job

from ._keys import KeyFolder, Keys
from ._pump import Pump

if TYPE_CHECKING:
    from os import PathLike

    from ._keys import Owner

DOMAIN: Final = "zstrat"
_TALKING: Final = (Job.CHIEF, Job.PS, Job.WORKER)
"""Roles whose tasks connect to tasks of the two other roles in this tuple."""

SETTLED: Final = 1.0
"""Seconds without a change of the folder until a missing key counts as removed: until
then, somebody may still be copying the folder."""


class Security:
    """The keys of one task: its own pair, and the public keys of all others, as the key
    folder had them at the last `refresh`."""

    def __init__(
        self,
        folder: KeyFolder,
        keys: Keys,
        clock: Callable[[], float],
    ) -> None:
        self._source, self._keys, self._clock = folder, keys, clock
        self._warned: object = None
        self._found: object = None
        self._since = 0.0
        """Time of the clock when the folder got the keys that it has now, one of the
        known keys missing among them."""
        self._rest_until = 0.0
        """Time of the clock until which `look_again` does nothing."""

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        job: str,
        index: int | None = None,
        *,
        guarded: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> Security:
        """Reads the keys of a task from a key folder: its own pair if there is one,
        else the pair of its role.

        Args:
            index: Index of the task in ``job``; None: it has no index.
            guarded: Do not check permissions, because something else protects the
                folder: for example an access control list, whose mask looks like
                permissions of the group.

        Raises:
            ValueError: The folder or a file is missing, or a file is not a key; the
                error names the path.
            PermissionDeniedError: Other users can read the secret.
        """
        folder = KeyFolder(path, Job(job), index, guarded)
        keys = folder.read()
        # Only here: a key that is removed later was revoked on purpose.
        known = {job for job, _ in keys.owners.values()}
        if missing := [f"{job}.public" for job in _TALKING if job not in known]:
            raise ValueError(
                f"key folder {path} lacks {', '.join(missing)}: copy all *.public "
                "files that `zstrat keygen` created; tasks whose key is missing are "
                "refused"
            )
        return cls(folder, keys, clock)

    def refresh(self) -> None:
        """Reads the key folder again if it has changed.

        If the folder cannot be read now, for example because it is being copied, logs
        the error and keeps the known keys. A missing key stays valid until the folder
        has not changed for `SETTLED` seconds, as the copy may not be complete.
        """
        stamp = self._source.stamp()
        if stamp == self._keys.stamp:
            return
        try:
            keys = self._source.read()
        except (OSError, ValueError, ZstratError) as error:
            folder = self._source.folder
            # Once for each state of the files: this runs at every beat.
            if stamp == self._warned:
                return
            if folder.exists():
                _LOG.warning("the keys in use stay in use: %s", error)
            else:  # a fleet removes the folder after the start
                _LOG.debug("%s is gone: the keys in use stay in use", folder)
            self._warned = stamp
            return
        if self._is_settled(keys):
            self._keys = keys
            _LOG.info("read the keys in %s again", self._source.folder)
        else:
            # New keys count at once, removed ones not yet; the stamp stays, so that the
            # next tick looks again.
            both = {**self._keys.owners, **keys.owners}
            self._keys = replace(self._keys, owners=both)

    def look_again(self) -> None:
        """Calls `refresh`, after a peer came with an unknown key. Skips calls so that
        refreshing takes at most a twentieth of the time, and strangers cannot keep the
        process busy."""
        began = self._clock()
        if began < self._rest_until:
            return
        self.refresh()
        ended = self._clock()
        self._rest_until = ended + 19 * (ended - began)

    def _is_settled(self, found: Keys) -> bool:
        """Returns whether ``found`` lacks no known key, or the folder has not changed
        for `SETTLED` seconds."""
        if self._keys.owners.keys() <= found.owners.keys():
            return True
        now = self._clock()
        if found.owners != self._found:
            self._found, self._since = found.owners, now
        return now - self._since >= SETTLED

    @property
    def job(self) -> Job:
        """Role of the task that has these keys."""
        return self._source.job

    @property
    def keys(self) -> Keys:
        """Keys that the folder had when it was last read."""
        return self._keys

    def owner_of(self, key: str) -> Owner | None:
        """Returns the owner of a public key; None if it is not in the key folder."""
        return self._keys.owners.get(key)

    @property
    def index(self) -> int | None:
        """Index of the only task with this secret; None: all tasks of the role have the
        secret."""
        owner = self.owner_of(self._keys.public)
        return None if owner is None else owner[1]

    def arm_server(self, socket: zmq.Socket[bytes]) -> None:
        """Makes ``socket`` accept only keys that the authenticator admits. Call before
        the bind."""
        socket.curve_server = True
        socket.curve_secretkey = self._keys.secret.encode()
        socket.zap_domain = DOMAIN.encode()
        socket.zap_enforce_domain = True

    def arm_client(
        self,
        socket: zmq.Socket[bytes],
        server: Job,
        index: int | None,
        failed: int = 0,
    ) -> None:
        """Makes ``socket`` connect only to a task that has a key of the given server.

        Args:
            index: Index of the server; None: any task with the key of the role.
            failed: Number of failed handshakes so far. While keys are rotated, a server
                may have one of several keys; each is tried in turn.

        Raises:
            ValueError: The folder has no key of that task or its role.
        """
        # The link may be older than the present keys of its task.
        self.refresh()
        server_keys = self._keys.of(server, index)
        if not server_keys:
            raise ValueError(
                f"key folder {self._source.folder}: {server}.public is missing"
            )
        socket.curve_serverkey = server_keys[failed % len(server_keys)].encode()
        socket.curve_publickey = self._keys.public.encode()
        socket.curve_secretkey = self._keys.secret.encode()

    def denied(self, target: str) -> PermissionDeniedError:
        """Returns the error of a client whose key the task ``target`` has refused."""
        return PermissionDeniedError(
            f"{target} refused the key of the role {self.job} from "
            f"{self._source.folder}: the task there has the keys of another cluster; "
            "run `zstrat keygen` once and copy the same folder to all machines"
        )


_ADDRESS: Final = "inproc://zeromq.zap.01"
_LOG: Final = logging.getLogger("zstrat.transport")

Admits = Callable[[str], bool]


class Authenticator:
    """Answers libzmq's questions whether to admit a peer: admits CURVE keys (Z85), and
    passwords of sockets that need one, for which ``admits`` returns true. Create it
    before the bind."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admits: Admits) -> None:
        self._context, self._admits = context, admits
        self._pump: Pump | None = None
        self.revive()

    def revive(self) -> None:
        """Opens the socket that receives libzmq's questions again, if it is closed."""
        if self._pump is not None and not self._pump.is_closed:
            return
        socket: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        socket.linger = 0
        try:
            socket.bind(_ADDRESS)
        except zmq.ZMQError:  # the previous one is still closing: at the next call
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
            verdict = b"400", b"this key is not in the key folder", b""
        else:
            verdict = b"200", b"", key.encode()
        # The key becomes the User-Id of each frame, by which `Endpoint` knows the peer.
        self._pump.send((b"1.0", request, *verdict, b""))

    def _admitted(self, parts: list[bytes]) -> str | None:
        match parts:
            case [b"1.0", _, domain, _, _, b"CURVE", raw] if domain == DOMAIN.encode():
                word = z85.encode(raw)
            # Passwords of data connections in a cluster without keys.
            case [b"1.0", _, domain, _, _, b"PLAIN", _, word] if (
                domain == DOMAIN.encode()
            ):
                pass
            case _:
                return None
        try:
            key = word.decode("ascii", "replace")  # from a stranger: any bytes
            return key if self._admits(key) else None
        except Exception:  # to the log, and to the client as a refusal
            _LOG.exception("the check of a key failed: it is refused")
            return None
