"""Writes systemd units with the paths of this installation.

The templates are package data of the daemons; ``ExecStart`` must be an absolute path.
"""

from __future__ import annotations

import importlib.resources
from typing import TYPE_CHECKING

from zstrat.paths import explained

if TYPE_CHECKING:
    from pathlib import Path

BINDIR = "@BINDIR@"
CONFIG = "@CONFIG@"


def write_units(bindir: Path, to: Path, config: Path) -> list[Path]:
    """Writes the units into ``to``, for programs in ``bindir``; returns their paths.

    ``config`` is the folder of ``cluster.toml`` and ``keys/`` on the machines.

    Raises:
        ValueError: A program is missing in ``bindir``, or a path is relative or has
            characters that are special in a unit file.
        OSError: The units cannot be written.
    """
    # These end a word of a unit file, or are expanded in it; quoting would have to be
    # right for ExecStart and for all other keys.
    for path in (bindir, config):
        if not path.is_absolute() or any(
            c.isspace() or c in "%\"'\\$" for c in str(path)
        ):
            raise ValueError(
                f"{path}: expected an absolute path without spaces or %$\"'\\"
            )
    # systemd would say so only on the machine, when the unit is started.
    for program in ("zstrat-evaluator", "zstrat-ps", "zstrat-worker"):
        if not (bindir / program).is_file():
            raise ValueError(
                f"{bindir / program} does not exist: expected the folder of the "
                "installed programs of zstrat"
            )
    with explained("folder of units", to):
        to.mkdir(parents=True, exist_ok=True)
    written = []
    for name, template in templates().items():
        path = to / name
        text = template.replace(BINDIR, str(bindir)).replace(CONFIG, str(config))
        path.write_text(text, "utf-8")
        written.append(path)
    return written


def templates() -> dict[str, str]:
    """Returns the text of each template by the name of its unit."""
    folder = importlib.resources.files("zstrat.daemons") / "systemd"
    units = sorted(folder.iterdir(), key=lambda unit: unit.name)
    return {unit.name: unit.read_text("utf-8") for unit in units}
