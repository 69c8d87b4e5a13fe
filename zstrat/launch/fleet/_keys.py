"""The keys of one run: made for it, handed out by role, gone with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zstrat.transport import generate_keys

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class RunKeys:
    """A folder of fresh keys, a pair for each role, which the program itself uses. They
    are there from `make` on.

    Raises:
        FileExistsError: Something is in the folder already: it is removed with the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(
                f"{folder} is there already: keys of a run are removed at its end, "
                "with their folder; move it, or give another directory"
            )

    def make(self) -> None:
        """Makes them.

        Raises:
            OSError: They cannot be written; says why.
        """
        generate_keys(self.folder)

    def of(self, job: str) -> dict[str, str]:
        """The files that a task of that job needs: its secret, all public halves."""
        files = [self.folder / f"{job}.secret", *sorted(self.folder.glob("*.public"))]
        return {file.name: file.read_text("ascii") for file in files}


def write_keys(folder: Path, keys: Mapping[str, str]) -> None:
    """Makes a key folder (mode 0700, files 0600) of what a launch brought.

    Raises:
        ValueError: A name is no name of a key.
        FileExistsError: There is a folder already.
    """
    for name in keys:
        if "/" in name or not name.endswith((".secret", ".public")):
            raise ValueError(f"{name!r:.80} is no file of a key folder")
    folder.mkdir(mode=0o700)
    for name, text in keys.items():
        file = folder / name
        file.touch(mode=0o600)
        file.write_text(text, "ascii")
