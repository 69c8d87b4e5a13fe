"""One pass over a distributed dataset: reads sources, divides batches among replicas,
puts them on devices, prefetches, and synchronizes the end with other workers.

Law of the file: a pass begins in the thread that requests it, so passes begin in the
order of the requests. The prefetch thread of a pass reads its sources, divides batches
and puts them on devices; the workers agree on the end in the thread that draws.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from zstrat.data import MOST_DRAWN, Elements, Position, Prefetcher, ending, plain_place
from zstrat.errors import InvalidArgumentError, OutOfRangeError
from zstrat.program.trace import downcast_message
from zstrat.strategy.replica._per_replica import PerReplica
from zstrat.variables import DowncastWarning, downcast_loss, is_downcast

from ._replica_batches import Share, leaf_by_leaf
from ._synchronized_pass import PassLength, SynchronizedPass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from zstrat.data import Allotment, Recipe
    from zstrat.strategy._options import InputOptions

    from ._synchronized_pass import AllMax

    Where = tuple[str, int]
    Place = Callable[[Share], Any]

_NAME: Final = "a distributed dataset"


class BegunPass(NamedTuple):
    """A pass over the sources that has begun.

    Args:
        shares: The shares of the replicas, one for each step.
        recipes: The passes of the sources.
        order: Describes the order of the data; see `SynchronizedPass`.
    """

    shares: Iterator[Share]
    recipes: tuple[Recipe, ...]
    order: str = ""


@final
@dataclass(frozen=True, slots=True)
class FeedPosition:
    """A position in a pass over a distributed dataset.

    Args:
        steps: Number of steps before the position.
        passes: For each source, which of its passes this is.
        split: See `FeedSources.split`: positions with another split count other steps.
    """

    steps: int
    passes: tuple[Position, ...]
    split: tuple[int, ...]

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> FeedPosition:
        """Makes a position from the dictionary that `plain` returned.

        Raises:
            InvalidArgumentError: ``plain`` is not such a dictionary.
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
            "this is not a position of the iterator of a distributed dataset: "
            f"{plain!r:.200}"
        )

    @property
    def plain(self) -> dict[str, Any]:
        return plain_place(self)


@final
@dataclass(frozen=True, slots=True)
class FeedSources:
    """The sources of a distributed dataset, and how to begin a pass over them.

    Args:
        begin: Function that begins a pass, or the rest of one after a position; it
            reads no data yet.
        made: For each source the part that this process reads.
        split: The number of input pipelines, or of pipelines and replicas, if steps
            depend on these numbers.
        are_alike: Whether all processes apply the same operations.
    """

    begin: Callable[[FeedPosition | None], BegunPass]
    made: tuple[Allotment, ...]
    split: tuple[int, ...]
    are_alike: bool = False

    def misfit(self, position: FeedPosition) -> str:
        """Returns why a position does not belong to these sources; "" if it does."""
        if position.split != self.split:
            return (
                f"its steps are those of {_split(position.split)}, and here are "
                f"{_split(self.split)}"
            )
        if len(position.passes) != len(self.made):
            return (
                f"it has {len(position.passes)} sources, and there are {len(self.made)}"
            )
        found = (
            each.misfit(source.recipe)
            for each, source in zip(position.passes, self.made, strict=True)
        )
        return next(filter(None, found), "")


def _split(split: tuple[int, ...]) -> str:
    names = ("input pipelines", "replicas in each")
    words = [f"{n} {name}" for n, name in zip(split, names, strict=False)]
    return " and ".join(words) or "any number of input pipelines"


@final
@dataclass(slots=True)
class DatasetFeed:
    """One distributed dataset, over which passes can begin.

    Args:
        where: The user's line that distributed the dataset, for warnings.
        spec: The shapes and dtypes of its elements, once a pass has made an element.
    """

    where: Where
    sources: FeedSources
    place: Place
    options: InputOptions
    all_max: AllMax | None
    is_partial: bool
    length: PassLength = field(default_factory=PassLength)
    spec: Any = None

    def begin(self, position: FeedPosition | None = None) -> DatasetPass:
        """Begins a new pass, or the rest of one after a position."""
        return DatasetPass(self, position)


@final
class DatasetPass:
    """One pass over a distributed dataset: yields elements, and knows their shapes and
    dtypes."""

    def __init__(self, feed: DatasetFeed, position: FeedPosition | None = None) -> None:
        self.feed: Final = feed
        begun = feed.sources.begin(position)
        # The start of the whole pass, of which this is the rest.
        whole = None if position is None else replace(position, steps=0)
        self._recipes: Final = begun.recipes
        length = feed.length
        if position is not None and length.steps is not None:
            left = max(0, length.steps - position.steps)
            length = replace(length, steps=left)
        maker = _Maker(begun.shares, feed, whole)
        self._maker: Final = maker
        size = feed.options.experimental_per_replica_buffer_size
        self._elements: Final[Elements[Any]] = Elements(
            Prefetcher(maker.elements(), size), _NAME
        )
        self._drawn: Elements[Any] | SynchronizedPass = self._elements
        if feed.all_max is not None:
            self._drawn = SynchronizedPass(
                self._elements,
                feed.all_max,
                length=length,
                empty=maker.empty,
                is_partial=feed.is_partial,
                order=begun.order,
            )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._drawn)

    def position(self, steps: int) -> FeedPosition:
        """Returns the position after this number of steps of the whole pass.

        Raises:
            InvalidArgumentError: The position cannot be saved, because another pass may
                have another order.
        """
        passes = [Position.of(recipe, 0) for recipe in self._recipes]
        if self.feed.all_max is not None:
            are_alike = self.feed.sources.are_alike
            passes = [each.of_all(are_alike=are_alike) for each in passes]
        return FeedPosition(steps, tuple(passes), self.feed.sources.split)

    def spec(self) -> Any:
        """Returns the shapes and dtypes of an element; may have to make the first
        element.

        Raises:
            OutOfRangeError: The pass has no elements.
        """
        if self._maker.first is None:
            try:
                self._elements.peek()
            except OutOfRangeError:
                if not self._maker.has_looked_back():
                    raise
        return self._maker.spec

    def close(self) -> None:
        """Closes the pass and the iterator that it reads from."""
        self._drawn.close()


@final
class _Maker:
    """Makes the elements of a pass, and keeps the first share as their description.

    Args:
        whole: The start of the whole pass, if this one is only the rest of it; None if
            this one is whole.
    """

    def __init__(
        self, shares: Iterator[Share], feed: DatasetFeed, whole: FeedPosition | None
    ) -> None:
        self._shares: Final = shares
        self._feed: Final = feed
        self._whole: Final = whole
        self.first: Share | None = None
        """The first share of the pass, without its rows."""
        self.spec: Any = None

    def elements(self) -> Iterator[Any]:
        with ending(self._shares) as shares:
            for share in shares:
                placed = self._feed.place(share)
                if self.first is None:
                    self._describe(share, placed)
                yield placed
                # The reader should be their only owner while the next ones are made.
                del share, placed

    def _describe(self, share: Share, placed: Any) -> None:
        self.spec = _spec_of(share, placed)
        if self._feed.spec is None:
            self._feed.spec = self.spec
            _warn_of_lost_bits(share, placed, self._feed.where)
        self.first = share.emptied()

    def has_looked_back(self) -> bool:
        """Makes an element from the beginning of the whole pass to describe the
        elements, if the rest has none. Returns whether the whole pass had one."""
        if self._whole is None:
            return False
        with ending(self._feed.sources.begin(self._whole).shares) as shares:
            share = next(shares, None)
            if share is not None:
                self._describe(share, self._feed.place(share))
        return share is not None

    def empty(self) -> Any:
        """Makes an element without rows, for a worker that has no more data.

        Raises:
            ValueError: The worker never had an element, so the shapes are unknown.
        """
        # The rest of a pass may be empty where the whole pass was not.
        if self.first is None:
            self.has_looked_back()
        if self.first is None:
            raise ValueError(
                "this worker has no element at all while others have some, so the "
                "shapes of an empty one are unknown: give every worker at least one "
                "batch, or set the auto_shard_policy to DATA"
            )
        return self._feed.place(self.first)


def _warn_of_lost_bits(share: Share, placed: Any, where: Where) -> None:
    """Warns of leaves of an element whose floats lost bits when they were put on the
    devices. (Integers that do not fit stay on the host.) Only the first element of a
    dataset is checked, because its elements are alike.

    Warns:
        DowncastWarning: One warning for each such leaf.
    """
    leaves = jax.tree.leaves(placed, is_leaf=_is_parts)
    given = tree_flatten_with_path(share.parts[0])[0]
    for (path, leaf), other in zip(given, leaves, strict=True):
        was_cut = is_downcast(leaf) and leaf.dtype != _dtype_of(other)
        if was_cut and (lost := downcast_loss(leaf)) is not None:
            said = downcast_message(f"element{keystr(path)} of {_NAME}", leaf, lost)
            warnings.warn_explicit(said, DowncastWarning, *where)


def _spec_of(share: Share, placed: Any) -> Any:
    """Returns the shapes and dtypes of an element: shapes of the share, and dtypes of
    the ``placed`` element, as jax keeps 32 of 64 bits unless it is configured
    otherwise."""
    seen = [_dtype_of(leaf) for leaf in jax.tree.leaves(placed, is_leaf=_is_parts)]
    return leaf_by_leaf([_shaped(part, seen) for part in share.parts])


def _is_parts(node: object) -> bool:
    return isinstance(node, PerReplica)


def _dtype_of(leaf: Any) -> Any:
    one = leaf
    if isinstance(leaf, PerReplica):
        # An array over the devices, without making the views of the replicas.
        one = leaf.values[0] if leaf.whole is None else leaf.whole
    return one.dtype if isinstance(one, jax.Array) else np.asarray(one).dtype


def _shaped(part: Any, dtypes: Sequence[Any]) -> Any:
    made: Any = jax.ShapeDtypeStruct  # untyped
    treedef: Any  # its stubs lack what we call
    leaves, treedef = jax.tree.flatten(part)
    shaped = [made(np.shape(x), dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
    return treedef.unflatten(shaped)
