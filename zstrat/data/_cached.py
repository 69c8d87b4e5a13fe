"""The elements of a pass, kept for the passes after it: in memory or in a file.

Law of the file: only a whole pass is kept. One that was given up leaves nothing, and
of several at once the first that comes to its end is kept. What stands before the cache
is always passed over as in its first pass, so all passes, of all processes, see the
shuffles there in one order, whichever of them filled the cache.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np

from ._elements import ending
from ._passes import PassThrough, Recipe
from ._tree import mapped, own
from .files import read_elements, write_element, write_end, write_start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._leaves import Element


@final
class WholePass:
    """The elements of one whole pass, once there was one. A copy has none."""

    __slots__ = ("elements",)

    def __init__(self) -> None:
        self.elements: list[Element] | None = None

    def __reduce__(self) -> tuple[type[WholePass], tuple[()]]:
        return WholePass, ()


@final
@dataclass(frozen=True, slots=True)
class Cached(PassThrough):
    """The elements of its source, made once.

    Args:
        path: Of a file, beside which a pass writes another one until it is whole; "":
            in memory. Arrays in memory cannot be written to.
    """

    source: Recipe
    path: str = ""
    kept: WholePass = field(default_factory=WholePass, compare=False)

    def of(self, source: Recipe) -> Self:
        """The cache of another recipe, whose elements are kept apart."""
        if source is self.source:
            return self
        return replace(self, source=source, kept=WholePass())

    def begun(self) -> Recipe:
        return replace(self, source=self.source.first())

    def first(self) -> Recipe:
        return self.begun()

    def again(self, number: int) -> Recipe:
        del number
        return self

    def shared(self, parts: int, index: int) -> Cached:
        """The cache of one worker among several, which has a file of its own."""
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
        if self.kept.elements is None:
            self.kept.elements = found

    def _filed(self) -> Iterator[Element]:
        if os.path.exists(self.path):
            yield from read_elements(self.path)
            return
        part = Path(f"{self.path}.{os.getpid()}-{secrets.token_hex(4)}.part")
        with ending(self.source.elements()) as elements:
            try:
                with part.open("xb") as file:
                    write_start(file)
                    for element in elements:
                        write_element(file, element, self.path)
                        yield element
                    write_end(file)
                part.replace(self.path)
            finally:  # it has another name, or is no whole pass
                with contextlib.suppress(FileNotFoundError):
                    part.unlink()


def _fixed(leaf: Any) -> Any:
    """What nobody can write to: it is yielded again in the next pass."""
    leaf = own(leaf)
    if isinstance(leaf, np.ndarray):
        leaf.flags.writeable = False
    return leaf
