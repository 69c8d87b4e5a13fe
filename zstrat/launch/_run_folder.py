"""The folder of a run, of a `LocalCluster` or a `Fleet`: sockets, keys and logs."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from zstrat.config import checked_transport
from zstrat.paths import explained
from zstrat.transport import generate_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


LONGEST_SOCKET_PATH: Final = 100
"""The most bytes in the path of an ``ipc://`` address; the kernel allows 107."""


def addresses_in(folder: Path, transport: str) -> Callable[[str], str]:
    """Returns a function that makes the address of a daemon from its name: a socket in
    the folder, which need not exist yet, or a free loopback port.

    Raises:
        ValueError: The transport is unknown, or the path is too long for its sockets.
    """
    checked_transport(transport)
    # The longest name that a cluster on one machine may have.
    fits = len(os.fsencode(folder / "worker-1000")) <= LONGEST_SOCKET_PATH
    is_possible = os.name == "posix" and fits
    if transport == "tcp" or (transport == "auto" and not is_possible):
        return lambda name: "127.0.0.1:0"
    if not fits:
        raise ValueError(
            f"{folder}: the path is too long for ipc sockets (over "
            f"{LONGEST_SOCKET_PATH} bytes): use a shorter folder (directory=, or the "
            "variable TMPDIR), or transport='tcp' (--transport tcp)"
        )
    return lambda name: f"ipc://{folder / name}"


@final
class RunFolder:
    """The folder of a run: the given one, or a new temporary one. Its path is known
    before it exists, so that its owner can remove it after Ctrl-C.

    Raises:
        ValueError: ``directory`` is an empty string, as of an unset variable.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._is_new = directory is None
        if directory is None:
            # Not `mkdtemp`: after Ctrl-C in it nobody would know the name. Eight random
            # characters cannot be guessed, and `make` refuses a folder that exists.
            name = f"zstrat-{secrets.token_urlsafe(6)}"
            self.path = Path(tempfile.gettempdir(), name).absolute()
        elif not os.fspath(directory):
            raise ValueError("directory='': expected a folder or None")
        else:
            self.path = Path(os.fsdecode(directory)).absolute()

    def make(self) -> None:
        """Creates the folder with mode 0700, unless a given one exists.

        Raises:
            OSError: The folder cannot be created.
        """
        with explained("directory", self.path):
            self.path.mkdir(0o700, parents=True, exist_ok=not self._is_new)


class RunKeys:
    """A folder with new keys for one run, a pair for each role. `make` creates them.

    Raises:
        FileExistsError: The folder has files already. They would be removed with it at
            the end of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(
                f"{folder} is not empty, and the keys of a run are removed together "
                "with their folder: move it, or pass another directory"
            )

    def make(self) -> None:
        """Generates the keys.

        Raises:
            OSError: They cannot be written.
        """
        generate_keys(self.folder)

    def of(self, job: str) -> dict[str, str]:
        """Reads the files that a task of ``job`` needs: its secret key and all public
        keys."""
        files = [self.folder / f"{job}.secret", *sorted(self.folder.glob("*.public"))]
        return {file.name: file.read_text("ascii") for file in files}


def write_keys(folder: Path, keys: Mapping[str, str]) -> None:
    """Writes received keys, by file name, to a new folder (mode 0700, files 0600).

    Raises:
        ValueError: A name is not that of a key file.
        FileExistsError: The folder exists already.
    """
    for name in keys:
        if "/" in name or not name.endswith((".secret", ".public")):
            raise ValueError(f"{name!r:.80}: expected a name *.secret or *.public")
    folder.mkdir(mode=0o700)
    for name, text in keys.items():
        file = folder / name
        # Closed to others before it has contents.
        file.touch(mode=0o600)
        file.write_text(text, "ascii")
