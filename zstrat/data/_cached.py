"""The operation `cache`: keeps the elements of one pass for later passes, in memory or
in a file.

Law: only a complete pass is kept. A pass that is abandoned leaves nothing, and of
several passes at once the first that reaches its end is kept. The operations before the
cache always run as in their first pass, so all passes of all processes see the shuffles
there in one order, whichever pass filled the cache.

A file has arrays in the format that they have in memory, each element after a line that
describes what follows. There are no pickles in the file, so reading it runs no code.
Values that this format cannot describe are refused when the file is written: named
tuples, dtypes with several fields or from other libraries.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self, final

import numpy as np

from ._elements import ending
from ._passes import PassThrough, Recipe
from ._tree import is_record, mapped, own

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._leaves import Element


_START: Final = b"zstrat elements 1\n"
_END: Final = b"end\n"
_PLAIN: Final = "biufcSUmM"
"""Kinds of dtypes that are fully described by their name."""
_MALFORMED: Final = (ValueError, TypeError, AttributeError, LookupError, OverflowError)
"""Errors that decoding a damaged file may raise: a flipped bit may leave JSON that
describes no element."""


@final
class WholePass:
    """Holds the elements of one complete pass, None before there was one. A pickled
    copy holds none."""

    __slots__ = ("elements",)

    def __init__(self) -> None:
        self.elements: list[Element] | None = None

    def __reduce__(self) -> tuple[type[WholePass], tuple[()]]:
        return WholePass, ()


@final
@dataclass(frozen=True, slots=True)
class Cached(PassThrough):
    """Keeps the elements of its source, so that they are made only once.

    Args:
        path: Path of the file; while a pass runs, it writes another file beside that
            one. "": keep elements in memory; their arrays cannot be written to.
    """

    source: Recipe
    path: str = ""
    kept: WholePass = field(default_factory=WholePass, compare=False)

    def with_source(self, source: Recipe) -> Self:
        """Returns the cache of another source; its elements are kept separately."""
        if source is self.source:
            return self
        return replace(self, source=source, kept=WholePass())

    # Whichever pass fills it, the others see its elements: so all begin with the first.
    def begin_pass(self) -> Recipe:
        return replace(self, source=self.source.first_pass())

    def first_pass(self) -> Recipe:
        return self.begin_pass()

    def as_repeat(self, number: int) -> Recipe:
        del number
        return self

    def shared(self, parts: int, index: int) -> Cached:
        """Returns the cache of worker ``index`` among ``parts`` workers, which uses a
        separate file."""
        # The count of parts, too: another number of workers has other elements.
        path = f"{self.path}-{index:05}-of-{parts:05}" if self.path else ""
        return replace(self, path=path, kept=WholePass())

    def items(self) -> Iterator[Element]:
        return self._filed() if self.path else self._remembered()

    def _remembered(self) -> Iterator[Element]:
        if self.kept.elements is not None:
            yield from self.kept.elements
            return
        found: list[Element] = []
        with ending(self.source.elements()) as elements:
            for element in elements:
                found.append(mapped(_fixed, element))
                yield found[-1]
        # Passes may fill it side by side. The first whole one stays, as later passes
        # may have begun to yield it.
        if self.kept.elements is None:
            self.kept.elements = found

    def _filed(self) -> Iterator[Element]:
        if os.path.exists(self.path):
            yield from _read_elements(self.path)
            return
        # A name of this pass alone: other passes, of other processes, too, may write
        # theirs at the same time, and the last one that is whole stays.
        part = Path(f"{self.path}.{os.getpid()}-{secrets.token_hex(4)}.part")
        with ending(self.source.elements()) as elements:
            try:
                with part.open("xb") as file:
                    file.write(_START)
                    for element in elements:
                        _write_element(file, element, self.path)
                        yield element
                    file.write(_END)
                # Renamed when it is closed: a file of this name is always a whole pass.
                part.replace(self.path)
            finally:  # it has another name, or is not a whole pass
                with contextlib.suppress(FileNotFoundError):
                    part.unlink()


def _fixed(leaf: Any) -> Any:
    """Makes an array read-only, because it is yielded again in the next pass."""
    leaf = own(leaf)
    if isinstance(leaf, np.ndarray):
        leaf.flags.writeable = False
    return leaf


def _write_element(file: BinaryIO, element: Element, path: str) -> None:
    """Appends one element to the file.

    Raises:
        TypeError: The element has a value that the file format cannot describe; says
            which.
        OSError: The file cannot be written.
    """
    blobs: list[bytes] = []
    head = json.dumps(_head(element, blobs, path))
    file.write(head.encode() + b"\n")
    file.writelines(blobs)


def _read_elements(path: str) -> Iterator[Element]:
    """Yields the elements of a file, in the order in which they were written.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file was not written by `cache`, or ends too early; names the
            file.
    """
    with open(path, "rb") as file:
        if file.readline() != _START:
            raise ValueError(
                f"{path} was not written by a `cache` of zstrat: give "
                "another name, or remove it"
            )
        while (line := file.readline()) != _END:
            try:
                element = _element(json.loads(line), file)
            except _MALFORMED as error:
                raise ValueError(
                    f"{path} is damaged or cut off: remove it, and the next pass "
                    "writes it again"
                ) from error
            yield element


def _head(element: Element, blobs: list[bytes], path: str) -> Any:
    if element is None:
        return None
    if isinstance(element, dict):
        # JSON would make text of any key, and the element would come back changed.
        if not all(isinstance(key, str) for key in element):
            raise _refused(
                f"a dict with keys that are not text ({list(element)})", path
            )
        return {"dict": {k: _head(v, blobs, path) for k, v in element.items()}}
    if isinstance(element, tuple):
        if type(element) is not tuple:
            raise _refused(f"a named tuple ({type(element).__name__})", path)
        return {"tuple": [_head(item, blobs, path) for item in element]}
    if is_record(element):
        blobs.append(element)
        return {"record": len(element)}
    if isinstance(element, np.ndarray | np.generic):
        return _array_head(element, blobs, path)
    raise _refused(f"a {type(element).__name__}", path)


def _array_head(leaf: Any, blobs: list[bytes], path: str) -> Any:
    array = np.asarray(leaf)
    if array.dtype.kind == "O":
        # Text and records beside each other, with None where one is missing.
        texts = list(array.flat)
        encoded = [text.encode() if isinstance(text, str) else text for text in texts]
        blobs += [blob for blob in encoded if blob is not None]
        sizes = [None if blob is None else len(blob) for blob in encoded]
        is_text = [isinstance(text, str) for text in texts]
        return {"texts": [list(array.shape), sizes, is_text]}
    if array.dtype.kind not in _PLAIN:
        raise _refused(f"an array of dtype {array.dtype}", path)
    blobs.append(array.tobytes())
    kind = "array" if isinstance(leaf, np.ndarray) else "scalar"
    return {kind: [array.dtype.str, list(array.shape)]}


def _element(head: Any, file: BinaryIO) -> Element:
    if head is None:
        return None
    ((kind, what),) = head.items()
    match kind:
        case "dict":
            return {key: _element(item, file) for key, item in what.items()}
        case "tuple":
            return tuple([_element(item, file) for item in what])
        case "record":
            return _read(file, what)
        case "texts":
            return _texts(what, file)
        case "array":
            return _array(what, file)
        case "scalar":
            return _array(what, file)[()]
    raise ValueError(f"unknown kind {kind!r}")


def _texts(what: Any, file: BinaryIO) -> np.ndarray:
    shape, sizes, is_text = what
    found = np.empty(len(sizes), object)
    for at, size in enumerate(sizes):
        blob = None if size is None else _read(file, size)
        found[at] = blob.decode() if blob is not None and is_text[at] else blob
    return found.reshape(shape)


def _array(what: Any, file: BinaryIO) -> np.ndarray:
    name, shape = what
    dtype = np.dtype(name)
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(_read(file, count * dtype.itemsize), dtype).reshape(shape)


def _read(file: BinaryIO, size: int) -> bytes:
    blob = file.read(size)
    if len(blob) != size:
        raise ValueError(f"{size} bytes expected, {len(blob)} found")
    return blob


def _refused(what: str, path: str) -> TypeError:
    return TypeError(
        f"cache({path!r}): an element has {what} in it, which is not kept in files: "
        "map it to dicts, tuples and plain arrays first, or use cache() in memory"
    )
