"""Keys: who may join a cluster, and as what.

`KeyFolder` reads them. Each task needs the secret of its own role, or its own, and the
public halves of all. Tasks of a role may have a pair each: then no holder of one can
pass for another, and no parameter server can keep a second copy for another.

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

DOMAIN: Final = "zstrat"
_TALKING: Final = (Job.CHIEF, Job.PS, Job.WORKER)
"""Each of them talks with the two others."""

SETTLED: Final = 1.0
"""Seconds for which a folder has the same keys before one that is missing counts as
removed: until then they may be being copied."""


class Security:
    """The keys of one task: its own pair, and the public keys of all others. They are
    those that its folder had when it was read last (`refresh`)."""

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
        """Since when the folder has these, and not all that are valid."""
        self._rest_until = 0.0
        """Until when no stranger has us look."""

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
        folder = KeyFolder(path, Job(job), index, guarded)
        keys = folder.read()
        # Only here: a key that is removed later is one that nobody is to have any more.
        known = {job for job, _ in keys.owners.values()}
        if missing := [f"{job}.public" for job in _TALKING if job not in known]:
            raise ValueError(
                f"key folder {path} lacks {', '.join(missing)}: copy all *.public that "
                "`zstrat keygen` has made; tasks whose key is missing are refused"
            )
        return cls(folder, keys, clock)

    def refresh(self) -> None:
        """Reads the folder again if it has changed.

        If it cannot be used now, say because it is being copied, the log says so and
        the keys that are known stay. A key that is missing stays valid until the folder
        has had the same keys for `SETTLED` seconds, as it may still be copied there.
        """
        stamp = self._source.stamp()
        if stamp == self._keys.stamp:
            return
        try:
            found = self._source.read()
        except (OSError, ValueError, ZstratError) as error:
            folder = self._source.folder
            if stamp == self._warned:
                return
            if folder.exists():
                _LOG.warning("the keys in use stay in use: %s", error)
            else:  # a fleet removes it once it was read
                _LOG.debug("%s is gone: the keys in use stay in use", folder)
            self._warned = stamp
            return
        if self._is_settled(found):
            self._keys = found
            _LOG.info("read the keys in %s again", self._source.folder)
        else:
            both = {**self._keys.owners, **found.owners}
            self._keys = replace(self._keys, owners=both)

    def look_again(self) -> None:
        """Calls `refresh`, as somebody has come with a key that is not known; but for a
        twentieth of the time at most, so that strangers cannot keep us busy."""
        began = self._clock()
        if began < self._rest_until:
            return
        self.refresh()
        ended = self._clock()
        self._rest_until = ended + 19 * (ended - began)

    def _is_settled(self, found: Keys) -> bool:
        """Whether no known key is missing, or the same ones have been for `SETTLED`."""
        if self._keys.owners.keys() <= found.owners.keys():
            return True
        now = self._clock()
        if found.owners != self._found:
            self._found, self._since = found.owners, now
        return now - self._since >= SETTLED

    @property
    def job(self) -> Job:
        """Whose keys these are."""
        return self._source.job

    @property
    def keys(self) -> Keys:
        """What is in the folder, as far as it is known."""
        return self._keys

    def role_of(self, key: str) -> Job | None:
        """The role of a public key, None if it is not one of the cluster's."""
        owner = self._keys.owners.get(key)
        return None if owner is None else owner[0]

    def index_of(self, key: str) -> int | None:
        """The index of the only task that has the key; None: all of its role do."""
        owner = self._keys.owners.get(key)
        return None if owner is None else owner[1]

    @property
    def index(self) -> int | None:
        """The index of the only task that has this secret; None: all of its role have
        it."""
        return self.index_of(self._keys.public)

    def arm_server(self, socket: zmq.Socket[bytes]) -> None:
        """Lets ``socket`` take only whom the authenticator admits. Before bind."""
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
        """Lets ``socket`` talk only to a task with a key of that server.

        Args:
            index: None: any that has the key of the role.
            failed: Handshakes that failed with the keys tried before. While keys change
                a server has one of several; each has its turn.

        Raises:
            ValueError: The folder has no key of that task or role.
        """
        self.refresh()
        found = self._keys.of(server, index)
        if not found:
            raise ValueError(
                f"key folder {self._source.folder}: {server}.public is missing"
            )
        socket.curve_serverkey = found[failed % len(found)].encode()
        socket.curve_publickey = self._keys.public.encode()
        socket.curve_secretkey = self._keys.secret.encode()

    def denied(self, target: str) -> PermissionDeniedError:
        """The words for a client whose key ``target`` did not admit."""
        return PermissionDeniedError(
            f"{target} refused the key of the role {self.job} from "
            f"{self._source.folder}: the task there has the keys of another cluster; "
            "run `zstrat keygen` once and copy the same folder to all machines"
        )


_ADDRESS: Final = "inproc://zeromq.zap.01"
_LOG: Final = logging.getLogger("zstrat.transport")

Admits = Callable[[str], bool]


class Authenticator:
    """Admits the CURVE keys (Z85) that ``admits`` says yes to, and the passwords of
    sockets that demand one. Before the bind."""

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
                word = z85.encode(raw)
            case [b"1.0", _, domain, _, _, b"PLAIN", _, word] if (
                domain == DOMAIN.encode()
            ):
                pass
            case _:
                return None
        try:
            key = word.decode("ascii", "replace")  # a stranger's word
            return key if self._admits(key) else None
        except (
            Exception
        ):  # to the log and to the client as a refusal; the next one counts
            _LOG.exception("the check of a key failed: it is refused")
            return None
