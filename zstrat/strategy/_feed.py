"""A pass over a distributed dataset: source, cut, place, prefetch, pace.

Law of the file: sources are read, cut and placed on the prefetch thread of their pass,
and agreed upon in the thread that draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import jax
import numpy as np

from zstrat.data import Elements, Prefetcher, ending

from ._pace import Paced
from ._shares import Share, leaf_by_leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._input_options import InputOptions
    from ._pace import Accord

    Place = Callable[[Share], Any]
    Shares = Callable[[], Iterator[Share]]

_NAME: Final = "a distributed dataset"


@final
@dataclass(frozen=True, slots=True)
class Feed:
    """How to begin a pass of one distributed dataset."""

    shares: Shares
    place: Place
    options: InputOptions
    accord: Accord | None
    is_partial: bool
    steps: int | None = None

    def begin(self) -> _Pass:
        return _Pass(self)


@final
class _Pass:
    """One pass: its elements as they are drawn, and what they look like."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        maker = _Maker(feed.shares, feed.place)
        self._maker: Final = maker
        size = feed.options.experimental_per_replica_buffer_size
        self._elements: Final[Elements[Any]] = Elements(
            Prefetcher(maker.elements(), size), _NAME
        )
        self._drawn: Elements[Any] | Paced = self._elements
        if feed.accord is not None:
            self._drawn = Paced(
                self._elements,
                feed.accord,
                steps=feed.steps,
                empty=maker.empty,
                is_partial=feed.is_partial,
            )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._drawn)

    def spec(self) -> Any:
        if self._maker.first is None:
            self._elements.peek()
        return self._maker.spec()

    def close(self) -> None:
        self._drawn.close()


@final
class _Maker:
    """Makes the elements of a pass, and keeps the first share to describe them."""

    def __init__(self, shares: Shares, place: Place) -> None:
        self._shares: Final = shares
        self._place: Final = place
        self.first: Share | None = None
        """Without its rows."""
        self._spec: Any = None

    def elements(self) -> Iterator[Any]:
        with ending(self._shares()) as shares:
            for share in shares:
                if self.first is None:
                    self._spec = _spec_of(share)
                    self.first = share.emptied()
                yield self._place(share)
                del share  # the reader may be its only owner while the next is made

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


def _spec_of(share: Share) -> Any:
    return leaf_by_leaf([jax.tree.map(_leaf_spec, part) for part in share.parts])


def _leaf_spec(leaf: Any) -> Any:
    made: Any = jax.ShapeDtypeStruct  # untyped
    dtype = leaf.dtype if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype
    return made(np.shape(leaf), dtype)
