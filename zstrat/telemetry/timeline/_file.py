"""The file of a time line: which format it has, and how it comes to be there whole.

What can be wrong with the place is found before anything is measured. What is written
gets its name when it is complete, so that a full disk leaves what was there before.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, cast

from ._json import write_json
from ._otlp import write_otlp
from ._protobuf import write_protobuf

if TYPE_CHECKING:
    from ._picture import Timeline

SUFFIXES: Final = (".json", ".json.gz", ".pftrace", ".otlp.json")


def check_place(path: str | os.PathLike[str]) -> Path:
    """Where the file will be, in full; its folder is made if it is not there.

    Raises:
        ValueError: The name says no format.
        OSError: No file can be made there.
    """
    place = Path(path).absolute()
    if not place.name.endswith(SUFFIXES):
        raise ValueError(
            f"a time line is written to a file *{', *'.join(SUFFIXES)} (JSON, the same "
            "compressed, Perfetto's protobuf, OpenTelemetry's JSON); got "
            f"{os.fspath(path)!r}"
        )
    if place.is_dir():
        raise IsADirectoryError(f"{place} is a folder: name a file in it")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=place.parent):
        pass
    return place


def write_timeline(timeline: Timeline, place: Path) -> int:
    """Writes the file in the format that its name says; returns its bytes.

    Raises:
        OSError: It cannot be written; what was there before is there still.
    """
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            _write(timeline, place.name, file)
        os.replace(part, place)
    except BaseException:  # to the caller
        part.unlink(missing_ok=True)
        raise
    return place.stat().st_size


def _write(timeline: Timeline, name: str, file: BinaryIO) -> None:
    if name.endswith(".pftrace"):
        write_protobuf(timeline, file)
        return
    packed = gzip.GzipFile(fileobj=file, mode="wb") if name.endswith(".gz") else None
    with packed or contextlib.nullcontext(file) as raw:
        text = io.TextIOWrapper(cast("BinaryIO", raw), "utf-8", write_through=True)
        if name.endswith((".otlp.json", ".otlp.json.gz")):
            write_otlp(timeline, text, time.time() - time.monotonic())
        else:
            write_json(timeline, text)
        text.detach()
