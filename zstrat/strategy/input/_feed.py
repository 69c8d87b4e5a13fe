"""A pass over a distributed dataset: source, cut, place, prefetch, pace.

Law of the file: a pass begins in the thread that asks for it, so that passes begin in
the order in which they are asked for; sources are read, cut and placed on the prefetch
thread of their pass, and agreed upon in the thread that draws.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from zstrat.data import Elements, Prefetcher, ending
from zstrat.program.trace import words
from zstrat.strategy.replica._per_replica import PerReplica
from zstrat.variables import NarrowingWarning, is_cut, what_is_lost

from ._epoch_sync import PassLength, SynchronizedPass
from ._replica_batches import Share, leaf_by_leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ._epoch_sync import WorkerAgreement
    from ._input_options import InputOptions

    Where = tuple[str, int]
    Place = Callable[[Share], Any]
    Shares = Callable[[], "BegunPass"]

_NAME: Final = "a distributed dataset"


@final
@dataclass(frozen=True, slots=True)
class BegunPass:
    """A pass over the sources.

    Args:
        order: See `SynchronizedPass`.
    """

    shares: Iterator[Share]
    order: str = ""


@final
@dataclass(slots=True)
class KnownElementSpec:
    """What the elements of a dataset look like, once one of its passes has made one."""

    spec: Any = None


@final
@dataclass(frozen=True, slots=True)
class DatasetFeed:
    """How to begin a pass of one distributed dataset.

    Args:
        shares: Begins a pass over the sources; reads nothing.
        where: The user's line that asked for the dataset.
    """

    where: Where
    shares: Shares
    place: Place
    options: InputOptions
    accord: WorkerAgreement | None
    is_partial: bool
    length: PassLength = field(default_factory=PassLength)
    described: KnownElementSpec = field(default_factory=KnownElementSpec)

    def begin(self) -> DatasetPass:
        return DatasetPass(self)


@final
class DatasetPass:
    """One pass: its elements as they are drawn, and what they look like."""

    def __init__(self, feed: DatasetFeed) -> None:
        begun = feed.shares()
        maker = _Maker(begun.shares, feed)
        self._maker: Final = maker
        size = feed.options.experimental_per_replica_buffer_size
        self._elements: Final[Elements[Any]] = Elements(
            Prefetcher(maker.elements(), size), _NAME
        )
        self._drawn: Elements[Any] | SynchronizedPass = self._elements
        if feed.accord is not None:
            self._drawn = SynchronizedPass(
                self._elements,
                feed.accord,
                length=feed.length,
                empty=maker.empty,
                is_partial=feed.is_partial,
                order=begun.order,
            )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._drawn)

    def spec(self) -> Any:
        """What an element looks like; may make the first one for that.

        Raises:
            OutOfRangeError: There is none.
        """
        if self._maker.first is None:
            self._elements.peek()
        return self._maker.spec()

    def close(self) -> None:
        """Ends it and what it reads from."""
        self._drawn.close()


@final
class _Maker:
    """Makes the elements of a pass, and keeps the first share to describe them."""

    def __init__(self, shares: Iterator[Share], feed: DatasetFeed) -> None:
        self._shares: Final = shares
        self._place: Final = feed.place
        self._described: Final = feed.described
        self._where: Final = feed.where
        self.first: Share | None = None
        """Without its rows."""
        self._spec: Any = None

    def elements(self) -> Iterator[Any]:
        with ending(self._shares) as shares:
            for share in shares:
                placed = self._place(share)
                if self.first is None:
                    self._spec = _spec_of(share, placed)
                    if self._described.spec is None:
                        self._described.spec = self._spec
                        _tell(share, placed, self._where)
                    self.first = share.emptied()
                yield placed
                # The reader may be their only owner while the next are made.
                del share, placed

    def spec(self) -> Any:
        return self._spec

    def empty(self) -> Any:
        """What a worker draws that has no more data.

        Raises:
            ValueError: It never had any, so nobody knows what it looks like.
        """
        if self.first is None:
            raise ValueError(
                "this worker has no element at all while others have some, so it does "
                "not know what an empty one looks like: give every worker at least one "
                "batch, or set the auto_shard_policy to DATA"
            )
        return self._place(self.first)


def _tell(share: Share, placed: Any, where: Where) -> None:
    """Says which leaves have lost bits when they were put on the devices: floats, as
    integers that do not fit stay on the host. They are looked at in the first element
    of a dataset alone, because those of a kind are alike.

    Warns:
        NarrowingWarning: One for each leaf.
    """
    made = jax.tree.leaves(placed, is_leaf=_is_parts)
    given = tree_flatten_with_path(share.parts[0])[0]
    for (path, leaf), other in zip(given, made, strict=True):
        was_cut = is_cut(leaf) and leaf.dtype != _dtype_of(other)
        if was_cut and (lost := what_is_lost(leaf)) is not None:
            said = words(f"element{keystr(path)} of {_NAME}", leaf, lost)
            warnings.warn_explicit(said, NarrowingWarning, *where)


def _spec_of(share: Share, placed: Any) -> Any:
    """The shapes are those of the share. The dtypes are those of the element, for jax
    keeps 32 of 64 bits unless it is told otherwise."""
    seen = [_dtype_of(leaf) for leaf in jax.tree.leaves(placed, is_leaf=_is_parts)]
    return leaf_by_leaf([_shaped(part, seen) for part in share.parts])


def _is_parts(node: object) -> bool:
    return isinstance(node, PerReplica)


def _dtype_of(leaf: Any) -> Any:
    one = leaf
    if isinstance(leaf, PerReplica):
        one = leaf.values[0] if leaf.whole is None else leaf.whole
    return one.dtype if isinstance(one, jax.Array) else np.asarray(one).dtype


def _shaped(part: Any, dtypes: Sequence[Any]) -> Any:
    made: Any = jax.ShapeDtypeStruct  # untyped
    treedef: Any  # its stubs lack what we call
    leaves, treedef = jax.tree.flatten(part)
    shaped = [made(np.shape(x), dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
    return treedef.unflatten(shaped)
