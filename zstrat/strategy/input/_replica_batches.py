"""Divides the batches of a dataset among the replicas.

A `Share` keeps neighbouring rows together, so that a whole batch can be put on devices
at once. Rows are separated only where the pieces are uneven or not adjacent.

Law of shares: dividing copies no row, except where a piece extends over the end of a
batch, and it uses no thread and no device: a stream of batches in, a stream of shares
out.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.data import ShapePromise, not_batched
from zstrat.strategy.replica._per_replica import PerReplica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zstrat.data import Cut, Cutter, Span


@final
@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The elements of the replicas of this process in one step.

    Args:
        sizes: Number of rows of each replica's element; empty if each element is a
            whole one of the dataset.
        rows: A pytree whose leaves hold the rows of all replicas in replica order, or
            None if the elements are not adjacent.
        apart: The elements, if they are not adjacent.
        is_fresh: Whether nothing else uses the memory of the elements, so that it may
            be passed to jax.
    """

    sizes: tuple[int, ...]
    rows: Any = None
    apart: tuple[Any, ...] = ()
    is_fresh: bool = False

    @property
    def whole(self) -> Any:
        """A pytree with leaves ``[replicas * n, ...]`` in which each replica in turn
        has ``n`` rows; None if the shares are not equal. The leaves are the dataset's
        own, or views."""
        return self.rows if len(set(self.sizes)) == 1 else None

    @property
    def parts(self) -> tuple[Any, ...]:
        """The element of each replica. A replica without data gets one without rows,
        with the dtypes and row shapes of the others."""
        if self.apart:
            return self.apart
        if len(self.sizes) == 1:
            return (self.rows,)
        ends = itertools.accumulate(self.sizes, initial=0)
        return tuple(
            sliced(self.rows, start, stop) for start, stop in itertools.pairwise(ends)
        )

    def emptied(self) -> Share:
        """Returns a share for the same replicas whose elements have no rows."""
        parts = tuple(map(empty_like, self.parts))
        return Share((0,) * len(parts), apart=parts)


def per_replica(share: Share) -> Any:
    """Returns the element itself if there is one replica, otherwise one with a
    `PerReplica` at each leaf, whose arrays are not moved: for a strategy that does not
    put elements on devices."""
    return leaf_by_leaf(share.parts)


def leaf_by_leaf(parts: Sequence[Any]) -> Any:
    """Converts one pytree for each replica to a pytree of `PerReplica`; for one replica
    returns its pytree."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: PerReplica(leaves), *parts)


def shares_of_batches(
    batches: Iterator[Any], cutter: Cutter, *, is_partial: bool, is_fresh: bool = False
) -> Iterator[Share]:
    """Divides a stream of batches among the replicas: yields a share for each step.

    Args:
        is_fresh: Whether nothing else uses the memory of the batches.
        is_partial: Whether a step in which a replica has no rows is valid; if not, such
            a step ends the data.

    Raises (while iterating):
        ValueError: A leaf is a scalar, or the leaves differ in their rows; a step in
            which a replica has no rows is not valid, and further batches follow it.
    """
    held: dict[int, Any] = {}
    uneven = 0
    """Number of rows of a batch that was not a valid step, so it must be the last
    batch."""
    for number, batch in enumerate(batches):
        rows = batch_rows(batch)
        if uneven and rows:
            raise _not_the_last(uneven)
        held[number] = batch
        for cut in cutter.take(rows):
            if is_partial or _is_full(cut):
                yield _share(cut, held, is_fresh)
            else:
                uneven = rows
        for old in [n for n in held if n < cutter.oldest]:
            del held[old]
        del batch  # the reader may be its only owner while the next is made
    for cut in cutter.finish():
        if is_partial or _is_full(cut):
            yield _share(cut, held, is_fresh)


def shares_of_elements(
    pipelines: Sequence[Iterator[Any]],
    promise: Callable[[], ShapePromise],
    *,
    is_fresh: bool = False,
    before: Callable[[], Iterable[Any]] = tuple,
) -> Iterator[Share]:
    """Yields shares in which each replica has one whole element, until no pipeline has
    another element.

    Args:
        pipelines: One for each replica; the same one for several gives them its
            elements in turn.
        promise: Function, called after the first elements, that returns what is known
            of the shapes of elements. As in TF, a last step with too few elements is
            valid, and the other replicas get empty elements, unless all elements are
            known to have the same shapes.
        is_fresh: Whether nothing else uses the memory of the elements.
        before: Function that makes the elements of the pass that precede these.
    """
    nothing = object()
    shapes = _Shapes(promise, before)
    for several in itertools.zip_longest(*pipelines, fillvalue=nothing):
        elements = [element for element in several if element is not nothing]
        shapes.see(elements)
        if len(elements) < len(several) and not shapes.make_step(elements[0]):
            return
        parts = tuple(empty_like(elements[0]) if x is nothing else x for x in several)
        yield Share((), apart=parts, is_fresh=is_fresh)


@final
class _Shapes:
    """Records the shapes of the elements of a pass, if they may decide whether its
    last, incomplete step is valid."""

    def __init__(
        self, promise: Callable[[], ShapePromise], before: Callable[[], Iterable[Any]]
    ) -> None:
        self._promise: Final = promise
        self._before: Final = before
        self._first: list[tuple[int, ...]] | None = None
        self._may_decide: bool | None = None
        self._differ = False

    def see(self, elements: Iterable[Any]) -> None:
        if self._may_decide is None:
            # A promise that is not known yet may decide.
            fixed = (ShapePromise.SAME, ShapePromise.NONE)
            self._may_decide = self._promise() not in fixed
        if not self._may_decide:
            return
        for element in elements:
            shapes = _shapes_of(element)
            if self._first is None:
                self._first = shapes
            self._differ |= shapes != self._first

    def make_step(self, element: Any) -> bool:
        """Returns whether a last step that has this element, but not one for each
        replica, is valid."""
        match self._promise():
            case ShapePromise.AS_MADE:
                if not self._differ:
                    self.see(self._before())
                return self._differ
            case ShapePromise.ROWS:
                return any(_shapes_of(element))
            case promise:
                return promise is ShapePromise.NONE


def _shapes_of(element: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(element)]


def batch_rows(batch: Any) -> int:
    """Returns the number of rows of a batch: the first axis of all its leaves.

    Raises:
        ValueError: There are no leaves, a leaf is a scalar, or leaves differ in their
            number of rows.
    """
    shapes = [np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)]
    if not shapes or () in shapes or len(set(shapes)) > 1:
        raise not_batched()
    return int(shapes[0][0])


def sliced(batch: Any, start: int, stop: int) -> Any:
    """Returns a batch of the rows from ``start`` to ``stop`` of every leaf; of numpy
    arrays these are views."""
    return jax.tree.map(lambda leaf: leaf[start:stop], batch)


def empty_like(element: Any) -> Any:
    """Returns an element like this one without rows. A scalar leaf becomes zero, as in
    TF; a random key is kept, as there is no empty key."""

    def empty(leaf: Any) -> Any:
        if np.ndim(leaf):
            return leaf[:0]
        dtype = getattr(leaf, "dtype", None)
        is_key = dtype is not None and not isinstance(dtype, np.dtype)
        return leaf if is_key else np.zeros((), np.asarray(leaf).dtype)

    return jax.tree.map(empty, element)


def _not_the_last(rows: int) -> ValueError:
    return ValueError(
        f"a batch of {rows} rows leaves a replica without any, where all need the same "
        "shapes, and other batches follow: choose a global batch size that is a "
        "multiple of the number of replicas, and leave shorter batches out, "
        "batch(size, drop_remainder=True), or repeat() before batch()"
    )


def _share(cut: Cut, held: dict[int, Any], is_fresh: bool) -> Share:
    sizes = tuple(sum(span.stop - span.start for span in piece) for piece in cut)
    spans = [span for piece in cut for span in piece]
    if not _are_neighbours(spans):
        parts = tuple(_joined(piece, held) for piece in cut)
        return Share(sizes, apart=parts, is_fresh=is_fresh)
    first, last = spans[0], spans[-1]
    batch = held[first.batch]
    # A batch that is taken whole is not sliced, so that its own memory can be given
    # away.
    if (first.start, last.stop) != (0, batch_rows(batch)):
        batch = sliced(batch, first.start, last.stop)
    return Share(sizes, batch, is_fresh=is_fresh)


def _are_neighbours(spans: Sequence[Span]) -> bool:
    return all(
        one.batch == other.batch and one.stop == other.start
        for one, other in itertools.pairwise(spans)
    )


def _joined(piece: Sequence[Span], held: dict[int, Any]) -> Any:
    pieces = [sliced(held[span.batch], span.start, span.stop) for span in piece]
    return pieces[0] if len(pieces) == 1 else jax.tree.map(_concatenated, *pieces)


def _concatenated(*leaves: Any) -> Any:
    on_device = any(isinstance(leaf, jax.Array) for leaf in leaves)
    return (jnp if on_device else np).concatenate(leaves)


def _is_full(cut: Cut) -> bool:
    return all(any(span.stop > span.start for span in piece) for piece in cut)
