"""The files of a state: one with arrays, and a small one that says that the arrays are
complete.

    STATE/ps-0.5f0c12.safetensors   the arrays
    STATE/ps-0.json                 which file that is, the digests of all its arrays

The small file gets its name last, by a rename, and is removed first. Law of the file:
**a state exists while its small file does, and a removed state never comes back**, not
even after a power cut. Files of arrays that no small file names were left by a process
that was killed while it wrote.

A state contains code, too (of optimizers), so a folder that other users may write to is
refused. For any thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.checkpoint import TensorReader, digest_of, replace_file, sync_folder
from zstrat.errors import DataLossError, PermissionDeniedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

FORMAT: Final = "zstrat.ps.state"
VERSION: Final = 2

_WRITABLE: Final = 0o022
"""The bits of a folder's mode that let other users than the owner write."""


@final
class StateReader:
    """A state that exists: its facts (data of JSON), and its arrays, which are read by
    number as bytes."""

    def __init__(
        self, facts: Any, reader: TensorReader, digests: Sequence[str]
    ) -> None:
        self.facts = facts
        self._reader, self._digests = reader, digests

    def read(self, number: int) -> bytes:
        """Returns the bytes of a whole array.

        Raises:
            NotFoundError: No array has the number.
            DataLossError: The array is damaged.
        """
        return b"".join(map(bytes, self.parts(number)))

    def parts(self, number: int) -> Iterator[memoryview]:
        """Yields the bytes of an array, a few MiB at a time. Each part is overwritten
        by the next one. The array is known to be intact only after the last part.

        Raises: As `read`.
        """
        return self._reader.checked(str(number), self._digests[number])


@final
class StateFiles:
    """The state files of the parameter server ``index`` in ``folder``, which is created
    if need be.

    Raises:
        PermissionDeniedError: Other users may write to the folder.
        OSError: The folder cannot be created.
    """

    def __init__(self, folder: Path, index: int) -> None:
        self.folder = folder.absolute()
        self._name = f"ps-{index}"
        self.path = str(self.folder / f"{self._name}.json")
        """The path of the small file."""
        try:
            os.makedirs(self.folder, 0o700, exist_ok=True)
            found = os.stat(self.folder)
        except OSError as error:
            words = f"state folder {self.folder} cannot be made: {error.strerror}"
            raise OSError(error.errno, words) from error
        # Root may write everywhere, and prepares the folder on many systems.
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & _WRITABLE:
            raise PermissionDeniedError(
                f"state folder {self.folder} (mode {stat.S_IMODE(found.st_mode):04o}, "
                f"user {found.st_uid}) can be written by others, and the code of "
                "optimizers is loaded from there: let it belong to the user of the "
                "parameter server, chmod 700"
            )

    def new_path(self) -> str:
        """Returns an unused path for a new file of arrays."""
        mark = secrets.token_hex(4)
        return str(self.folder / f"{self._name}.{mark}.safetensors")

    def commit(self, arrays: str, digests: Sequence[str], facts: object) -> None:
        """Writes the small file, which makes the state exist.

        Args:
            arrays: The path of the file of arrays, which is complete. Its arrays are
                called "0", "1" and so on.
            digests: The digests of the arrays, in this order.
            facts: Further data to write, as JSON.

        Raises:
            ResourceExhaustedError: The disk is full.
            OSError: Any other error of the system.
        """
        said = {
            "format": FORMAT,
            "version": VERSION,
            "arrays": os.path.basename(arrays),
            "digests": list(digests),
            "facts": facts,
        }
        # A digest of the text itself, so that reading need not encode it the same way.
        text = json.dumps(said)
        whole = json.dumps({"digest": digest_of([text.encode()]), "state": text})
        replace_file(self.path, whole.encode(), mark=secrets.token_hex(4))

    @contextlib.contextmanager
    def open(self) -> Iterator[StateReader | None]:
        """Opens the state for reading in the body; yields None if there is no state.

        Raises:
            DataLossError: The state is damaged, or of another version.
            NotFoundError, OSError: A file cannot be read.
        """
        try:
            with open(self.path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            yield None
            return
        said = self._checked(data)
        # The name alone: a state that was changed must not name a file of another
        # folder.
        path = str(self.folder / os.path.basename(said["arrays"]))
        with TensorReader(path) as reader:
            yield StateReader(said["facts"], reader, said["digests"])

    def remove(self) -> None:
        """Removes the state, if there is one.

        Raises:
            OSError: The state cannot be removed.
        """
        # The small file first: arrays without it are ignored, but it must not name what
        # is gone.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        # Now, and not when the system likes: a power cut must not bring it back.
        sync_folder(str(self.folder))
        self._sweep()

    def _sweep(self) -> None:
        """Removes all files of arrays; called when there is no state, so none is in
        use."""
        endings = r"(\.[0-9a-f]{8}\.safetensors|\.json\.[0-9a-f]+\.tmp)"
        ours = re.compile(re.escape(self._name) + endings)
        for name in os.listdir(self.folder):
            if ours.fullmatch(name):
                # Another sweep, or somebody who cleans up, may be faster.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.folder / name)

    def _checked(self, data: bytes) -> Mapping[str, Any]:
        try:
            whole = json.loads(data)
            text = whole["state"]
            # Before it is parsed any further: a damaged text may still be JSON.
            if digest_of([text.encode()]) != whole["digest"]:
                raise DataLossError(
                    self.path, "", "its bytes changed since they were written"
                )
            said: Mapping[str, Any] = json.loads(text)
            kind = said["format"], said["version"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataLossError(self.path, "", "it is not a state") from None
        if kind != (FORMAT, VERSION):
            raise DataLossError(
                self.path, "", f"it is {kind}, and this process reads {FORMAT, VERSION}"
            )
        return said
