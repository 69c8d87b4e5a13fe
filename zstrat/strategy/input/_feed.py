"""A pass over a distributed dataset: source, cut, place, prefetch, pace.

Law of the file: a pass begins in the thread that asks for it, so that passes begin in
the order in which they are asked for; sources are read, cut and placed on the prefetch
thread of their pass, and agreed upon in the thread that draws.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, final

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from zstrat.data import MOST_DRAWN, Elements, Position, Prefetcher, ending, plain_place
from zstrat.errors import InvalidArgumentError, OutOfRangeError
from zstrat.program.trace import words
from zstrat.strategy.replica._per_replica import PerReplica
from zstrat.variables import DowncastWarning, downcast_loss, is_downcast

from ._epoch_sync import PassLength, SynchronizedPass
from ._replica_batches import Share, leaf_by_leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zstrat.data import Allotment, Recipe

    from ._epoch_sync import WorkerAgreement
    from ._input_options import InputOptions

    Where = tuple[str, int]
    Place = Callable[[Share], Any]

_NAME: Final = "a distributed dataset"


@final
@dataclass(frozen=True, slots=True)
class BegunPass:
    """A pass over the sources.

    Args:
        recipes: Of the sources, begun.
        order: See `SynchronizedPass`.
    """

    shares: Iterator[Share]
    recipes: tuple[Recipe, ...]
    order: str = ""


@final
@dataclass(frozen=True, slots=True)
class FeedPosition:
    """A place in the passes of a distributed dataset.

    Args:
        steps: How many steps come before it.
        passes: Of each source, the pass; what was drawn there is counted in steps.
        split: What the meaning of a step depends on.
    """

    steps: int
    passes: tuple[Position, ...]
    split: tuple[int, ...]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> FeedPosition:
        """The inverse of `plain`.

        Raises:
            InvalidArgumentError: It is something else.
        """
        match plain:
            case {
                "steps": int(steps),
                "passes": [*passes],
                "split": [*split],
            } if 0 <= steps <= MOST_DRAWN:
                listed = tuple(map(Position.from_plain, passes))
                return cls(steps, listed, tuple(split))
        raise InvalidArgumentError(
            f"this is no place of the iterator of a distributed dataset: {plain!r:.200}"
        )

    @property
    def plain(self) -> dict[str, Any]:
        return plain_place(self)


@final
@dataclass(frozen=True, slots=True)
class FeedSources:
    """What passes go over.

    Args:
        begin: Begins a pass, or the rest of one behind a place; reads nothing.
        made: Of each source, what is read here.
        split: Input pipelines, or input pipelines and replicas, where others would make
            other steps of the same sources.
        are_alike: All processes have the same operations.
    """

    begin: Callable[[FeedPosition | None], BegunPass]
    made: tuple[Allotment, ...]
    split: tuple[int, ...]
    are_alike: bool = False

    def misfit(self, place: FeedPosition) -> str:
        """Why it is no place in the passes; "" if it is one."""
        if place.split != self.split:
            return (
                f"its steps are those of {_split(place.split)}, and here there are "
                f"{_split(self.split)}"
            )
        if len(place.passes) != len(self.made):
            return f"it has {len(place.passes)} sources, and there are {len(self.made)}"
        found = (
            each.misfit(source.recipe)
            for each, source in zip(place.passes, self.made, strict=True)
        )
        return next(filter(None, found), "")


def _split(split: tuple[int, ...]) -> str:
    names = ("input pipelines", "replicas in each")
    words = [f"{n} {name}" for n, name in zip(split, names, strict=False)]
    return " and ".join(words) or "any number of input pipelines"


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
        where: The user's line that asked for the dataset.
    """

    where: Where
    sources: FeedSources
    place: Place
    options: InputOptions
    accord: WorkerAgreement | None
    is_partial: bool
    length: PassLength = field(default_factory=PassLength)
    described: KnownElementSpec = field(default_factory=KnownElementSpec)

    def begin(self, place: FeedPosition | None = None) -> DatasetPass:
        """A fresh pass, or the rest of one behind a place."""
        return DatasetPass(self, place)


@final
class DatasetPass:
    """One pass: its elements as they are drawn, and what they look like."""

    def __init__(self, feed: DatasetFeed, place: FeedPosition | None = None) -> None:
        self.feed: Final = feed
        begun = feed.sources.begin(place)
        whole = None if place is None else replace(place, steps=0)
        self._recipes: Final = begun.recipes
        length = feed.length
        if place is not None and length.steps is not None:
            left = max(0, length.steps - place.steps)
            length = replace(length, steps=left)
        maker = _Maker(begun.shares, feed, whole)
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
                length=length,
                empty=maker.empty,
                is_partial=feed.is_partial,
                order=begun.order,
            )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._drawn)

    def place(self, steps: int) -> FeedPosition:
        """The place behind so many steps of the whole pass.

        Raises:
            InvalidArgumentError: Another pass may have another order.
        """
        passes = [Position.of(recipe, 0) for recipe in self._recipes]
        if self.feed.accord is not None:
            are_alike = self.feed.sources.are_alike
            passes = [each.of_all(are_alike=are_alike) for each in passes]
        return FeedPosition(steps, tuple(passes), self.feed.sources.split)

    def spec(self) -> Any:
        """What an element looks like; may make the first one for that.

        Raises:
            OutOfRangeError: There is none.
        """
        if self._maker.first is None:
            try:
                self._elements.peek()
            except OutOfRangeError:
                if not self._maker.has_looked_back():
                    raise
        return self._maker.spec

    def close(self) -> None:
        """Ends it and what it reads from."""
        self._drawn.close()


@final
class _Maker:
    """Makes the elements of a pass, and keeps the first share to describe them.

    Args:
        whole: Where the pass begins of which this is the rest; None: here.
    """

    def __init__(
        self, shares: Iterator[Share], feed: DatasetFeed, whole: FeedPosition | None
    ) -> None:
        self._shares: Final = shares
        self._feed: Final = feed
        self._whole: Final = whole
        self.first: Share | None = None
        """Without its rows."""
        self.spec: Any = None

    def elements(self) -> Iterator[Any]:
        with ending(self._shares) as shares:
            for share in shares:
                placed = self._feed.place(share)
                if self.first is None:
                    self._describe(share, placed)
                yield placed
                # The reader may be their only owner while the next are made.
                del share, placed

    def _describe(self, share: Share, placed: Any) -> None:
        self.spec = _spec_of(share, placed)
        if self._feed.described.spec is None:
            self._feed.described.spec = self.spec
            _tell(share, placed, self._feed.where)
        self.first = share.emptied()

    def has_looked_back(self) -> bool:
        """Whether an element before the rest, in which there is none, describes all."""
        if self._whole is None:
            return False
        with ending(self._feed.sources.begin(self._whole).shares) as shares:
            share = next(shares, None)
            if share is not None:
                self._describe(share, self._feed.place(share))
        return share is not None

    def empty(self) -> Any:
        """What a worker draws that has no more data.

        Raises:
            ValueError: It never had any, so nobody knows what it looks like.
        """
        if self.first is None:
            self.has_looked_back()
        if self.first is None:
            raise ValueError(
                "this worker has no element at all while others have some, so it does "
                "not know what an empty one looks like: give every worker at least one "
                "batch, or set the auto_shard_policy to DATA"
            )
        return self._feed.place(self.first)


def _tell(share: Share, placed: Any, where: Where) -> None:
    """Says which leaves have lost bits when they were put on the devices: floats, as
    integers that do not fit stay on the host. They are looked at in the first element
    of a dataset alone, because those of a kind are alike.

    Warns:
        DowncastWarning: One for each leaf.
    """
    made = jax.tree.leaves(placed, is_leaf=_is_parts)
    given = tree_flatten_with_path(share.parts[0])[0]
    for (path, leaf), other in zip(given, made, strict=True):
        was_cut = is_downcast(leaf) and leaf.dtype != _dtype_of(other)
        if was_cut and (lost := downcast_loss(leaf)) is not None:
            said = words(f"element{keystr(path)} of {_NAME}", leaf, lost)
            warnings.warn_explicit(said, DowncastWarning, *where)


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
