"""Operations on whole passes: random orders, kept elements, values of all elements.

Law of shuffles: the order of a repeat is made of the seed, the number of its pass and
its own number alone. Workers that deal one dataset out among themselves rely on that:
they prefetch at their own pace, and still have to see the same rows in the same places.

A cache keeps the elements of a pass for later ones, in memory or in a file. Law: only a
whole pass is kept. One that was given up leaves nothing, and of several at once the
first that comes to its end is kept. What stands before the cache is always passed over
as in its first pass, so all passes, of all processes, see the shuffles there in one
order, whichever of them filled the cache.

A file has arrays as they are in memory, each element after a line that says what
follows. No pickles: reading a file runs no code. What has no place in it is refused
when it is written: named tuples, dtypes of several fields or of other libraries.

`folded` makes one value of all elements, and `looked_at` finds out what the first looks
like. Both close their pass, whatever comes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import secrets
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self, final

import numpy as np

from zstrat.errors import OutOfRangeError

from ._leaves import ending
from ._passes import Derived, PassThrough, Recipe, Reordered
from ._spec import kept, lost, spec_of
from ._tree import as_element, is_record, leaves, mapped, own, owned, with_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._leaves import Element
    from ._spec import Spec


@final
class PassCounter:
    """Numbers the passes over one `Shuffled`, so that each has a different order.

    A copy begins at the first pass again: what a dataset yields where it was shipped to
    does not depend on earlier reads.

    Args:
        first: What the numbers of all passes here begin with.
    """

    __slots__ = ("_branches", "_counting", "_first", "_last")

    def __init__(self, first: tuple[int, ...] = ()) -> None:
        self._first: Final = first
        self._last = 0
        self._counting: Final = threading.Lock()
        self._branches: Final = itertools.count(1)

    def next(self) -> tuple[int, ...]:
        with self._counting:
            self._last += 1
            return (*self._first, self._last)

    def one(self) -> tuple[int, ...]:
        """Returns the number of the first pass, whether it was begun or not."""
        return (*self._first, 1)

    def note(self, order: tuple[int, ...]) -> None:
        """Notes that a pass of this number, as `next` gives it, was begun in another
        process."""
        with self._counting:
            self._last = max(self._last, order[-1])

    def branch(self) -> PassCounter:
        """Returns a separate count, of which the passes here know nothing."""
        return PassCounter((*self._first, next(self._branches)))

    def __reduce__(self) -> tuple[type[PassCounter], tuple[tuple[int, ...]]]:
        return PassCounter, (self._first,)


@final
@dataclass(frozen=True, slots=True)
class Shuffled(Reordered):
    """Draws at random from a buffer of the next ``buffer_size`` items. Passes are in
    another order each unless ``reshuffle`` is false, which needs a seed.

    Args:
        order: The number of the pass, then those of the repeats within it, the
            outermost first. They and the seed make the order; a shared count that
            repeats advance would make it depend on how far other passes have come.
        is_drawn: The seed was drawn in this process: others have another one.
    """

    source: Recipe
    buffer_size: int
    seed: int | None
    reshuffle: bool
    passes: PassCounter = field(default_factory=PassCounter)
    order: tuple[int, ...] = ()
    is_drawn: bool = False

    @property
    def is_the_same_everywhere(self) -> bool:
        """Whether every process that makes this dataset sees the same order."""
        return self.seed is not None and not self.is_drawn

    def begun(self) -> Recipe:
        fresh = replace(self.of(self.source.begun()), order=self.passes.next())
        if fresh.seed is not None:
            return fresh
        # Of this pass alone; it can be passed over again.
        return replace(fresh, seed=secrets.randbits(63), is_drawn=True)

    def ordered(self, seed: int | None, order: tuple[int, ...]) -> Shuffled:
        """Returns the pass of this number; ``seed``: what was drawn for it, if it
        was."""
        if order == self.order and seed in (None, self.seed):
            return self  # a cache after it stays the one of this recipe
        if seed is None:
            return replace(self, order=order)
        return replace(self, order=order, seed=seed, is_drawn=True)

    def chance(self) -> str:
        if self.seed is None:
            return (
                "a shuffle before `cache`, or in the function of `interleave`, has no "
                "seed. Give it one: shuffle(buffer_size, seed=...)"
            )
        return self.source.chance()

    def apart(self) -> Recipe:
        fresh = self.of(self.source.apart())
        return replace(fresh, passes=self.passes.branch())

    def first(self) -> Recipe:
        fresh = self.of(self.source.first())
        return replace(fresh, order=self.passes.one())

    def again(self, number: int) -> Recipe:
        fresh = self.of(self.source.again(number))
        return replace(fresh, order=(*self.order, number))

    def items(self) -> Iterator[Any]:
        order = self.order if self.reshuffle else ()
        # A text seeds the same way in every process; None: from the operating system.
        text = " ".join(map(str, (self.seed, *order)))
        chance = random.Random(None if self.seed is None else text)
        with ending(self.source.items()) as items:
            buffer = list(itertools.islice(items, self.buffer_size))
            for item in items:
                place = int(chance.random() * len(buffer))
                yield buffer[place]
                buffer[place] = item
        chance.shuffle(buffer)
        yield from buffer


_START: Final = b"zstrat elements 1\n"
_END: Final = b"end\n"
_PLAIN: Final = "biufcSUmM"
"""Kinds of dtypes whose name says all about them."""


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
        """Returns the cache of another recipe, whose elements are kept apart."""
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
        """Returns the cache of one worker among several, which has a separate
        file."""
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
            yield from _read_elements(self.path)
            return
        part = Path(f"{self.path}.{os.getpid()}-{secrets.token_hex(4)}.part")
        with ending(self.source.elements()) as elements:
            try:
                with part.open("xb") as file:
                    file.write(_START)
                    for element in elements:
                        _write_element(file, element, self.path)
                        yield element
                    file.write(_END)
                part.replace(self.path)
            finally:  # it has another name, or is not a whole pass
                with contextlib.suppress(FileNotFoundError):
                    part.unlink()


def _fixed(leaf: Any) -> Any:
    """Makes an array read-only: it is yielded again in the next pass."""
    leaf = own(leaf)
    if isinstance(leaf, np.ndarray):
        leaf.flags.writeable = False
    return leaf


def _write_element(file: BinaryIO, element: Element, path: str) -> None:
    """Appends one element.

    Raises:
        TypeError: It has something that has no place in a file; says what.
        OSError: It cannot be written.
    """
    blobs: list[bytes] = []
    head = json.dumps(_head(element, blobs, path))
    file.write(head.encode() + b"\n")
    file.writelines(blobs)


def _read_elements(path: str) -> Iterator[Element]:
    """Yields the elements of a file, in the order in which they were written.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is not a file of a `cache`, or ends too early; names it.
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
            except ValueError as error:
                raise ValueError(
                    f"{path} is damaged or cut off: remove it, and the next pass "
                    "writes it again"
                ) from error
            yield element


def _head(element: Element, blobs: list[bytes], path: str) -> Any:
    if element is None:
        return None
    if isinstance(element, dict):
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


def folded(
    elements: Iterator[Element],
    initial: Any,
    function: Callable[[Any, Any], Any],
) -> Element:
    """Reduces the elements to one state by ``function``, and returns the last state.

    Raises:
        TypeError: The state became something else; says after which element.
    """
    state = first = owned(initial)
    wanted = {path: _dtype(leaf) for path, leaf in leaves(first)}
    with ending(elements):
        for number, element in enumerate(elements):
            state = _alike(owned(function(state, element)), first, wanted, number)
    return state


def _alike(
    state: Element, first: Element, wanted: dict[str, Any], number: int
) -> Element:
    """Returns the state in the dtypes of the first one, which are ``wanted``."""
    found = dict(leaves(state))
    if found.keys() != wanted.keys():
        raise TypeError(
            f"`reduce_func` returned another structure than `initial_state` has, at "
            f"element {number}: {spec_of(state)!r}, after {spec_of(first)!r}"
        )
    cast = {p: _cast(leaf, wanted[p], p, number) for p, leaf in found.items()}
    if all(cast[path] is leaf for path, leaf in found.items()):
        return state
    return with_leaves(state, cast.values())


def _cast(leaf: Any, dtype: Any, path: str, number: int) -> Any:
    kind = _dtype(leaf)
    if kind == dtype:
        return leaf
    cast = None
    if kind.kind == dtype.kind or np.can_cast(kind, dtype, "same_kind"):
        cast = kept(np.asarray(leaf), dtype)
    if cast is None:
        raise TypeError(
            f"`reduce_func` returned {kind} at element {number}, where `initial_state` "
            f"has {dtype}{f' (component {path})' if path else ''}, "
            f"{lost(kind, dtype)}: begin with a value of {kind}, or convert the result"
        )
    return cast[()]


def _dtype(leaf: Any) -> Any:
    dtype = np.asarray(leaf).dtype
    return np.dtype(dtype.kind) if dtype.kind in "US" else dtype


def looked_at(recipe: Recipe) -> Spec:
    """Returns the spec of the dataset's first element, drawn from a separate pass
    that does not change the order of later passes.

    Raises:
        OutOfRangeError: There is no element.
    """
    with ending(_unshuffled(recipe.apart()).begun().elements()) as elements:
        for element in elements:
            return spec_of(as_element(element))
    raise OutOfRangeError(
        "End of sequence: the dataset has no element whose spec could be looked at"
    )


def _unshuffled(recipe: Recipe) -> Recipe:
    """Returns the recipe without its shuffles, which would fill their buffers for one
    element."""
    while isinstance(recipe, Shuffled):
        recipe = recipe.source
    if isinstance(recipe, Derived):
        return recipe.of(_unshuffled(recipe.source))
    return recipe
