"""The batches of replicas, and the common end of the data of all workers.

The elements of replicas are cut out of the batches of a dataset. A `Share` keeps
neighbouring rows together, so that a whole batch can be put on devices at once. It is
cut only where the pieces are uneven or not adjacent.

Law of shares: cutting copies no row, except where a piece extends over the end of a
batch, and it uses no thread and no device: a stream of batches in, a stream of shares
out.

Workers end together. Where each has other data (its own files, a dataset function),
some have less than others. A step needs all workers, so a worker without data continues
with empty elements as long as any other has some. The workers agree on that: once a
pass, if all of them know their number of steps, else in every step. If some have data
without an end, there are no further questions: the others continue with empty elements.
With the first question they also check that they are at the same pass of data that is
sharded among them in an order that changes from pass to pass.

Law: all workers make the same exchanges in the same order, in the thread that draws. So
the first exchange of a pass always happens, and all else follows from its result, which
is the same for all.
"""

from __future__ import annotations

import enum
import itertools
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, assert_never, final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.data import ShapePromise, not_batched
from zstrat.errors import OutOfRangeError
from zstrat.strategy.replica._per_replica import PerReplica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zstrat.data import Cut, Cutter, Elements, Span


@final
@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """The elements of the replicas of this process in one step.

    Args:
        sizes: Rows of the element of each replica; empty for elements that are not cut.
        rows: A pytree whose leaves hold the rows of all replicas in replica order, or
            None if the elements are not adjacent.
        apart: The elements, if they are not adjacent.
        is_fresh: Nothing else uses their memory, which may be given away.
    """

    sizes: tuple[int, ...]
    rows: Any = None
    apart: tuple[Any, ...] = ()
    is_fresh: bool = False

    @property
    def whole(self) -> Any:
        """A pytree with leaves ``[replicas * n, ...]`` if every replica gets ``n`` rows
        of them in turn, else None. The leaves are the dataset's own, or views."""
        return self.rows if len(set(self.sizes)) == 1 else None

    @property
    def parts(self) -> tuple[Any, ...]:
        """The element of each replica; one without data has no rows, and the dtypes and
        row shapes of the others."""
        if self.apart:
            return self.apart
        if len(self.sizes) == 1:
            return (self.rows,)
        ends = itertools.accumulate(self.sizes, initial=0)
        return tuple(
            sliced(self.rows, start, stop) for start, stop in itertools.pairwise(ends)
        )

    def emptied(self) -> Share:
        """Returns a share of the same kind without any data."""
        parts = tuple(map(empty_like, self.parts))
        return Share((0,) * len(parts), apart=parts)


def per_replica(share: Share) -> Any:
    """Returns the element itself for one replica, else one with a `PerReplica` at each
    leaf, of arrays where they are: for a strategy that does not put elements on
    devices."""
    return leaf_by_leaf(share.parts)


def leaf_by_leaf(parts: Sequence[Any]) -> Any:
    """Turns a pytree for each replica into a pytree of `PerReplica`; of one replica,
    returns the pytree."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: PerReplica(leaves), *parts)


def shares_of_batches(
    batches: Iterator[Any], cutter: Cutter, *, is_partial: bool, is_fresh: bool = False
) -> Iterator[Share]:
    """Cuts the batches for the replicas.

    Args:
        is_fresh: Nothing else uses their memory.
        is_partial: Whether a step is valid in which a replica has no rows; if not, it
            ends the data.

    Raises (while iterating):
        ValueError: A leaf is a scalar, or the leaves differ in their rows; a step in
            which a replica has no rows is not valid, and others follow it.
    """
    held: dict[int, Any] = {}
    uneven = 0
    """The rows of a batch that was not a step, and so has to be the last one."""
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
    """Gives each replica one element, as it is, until no pipeline has another one.

    Args:
        pipelines: One for each replica; the same one for several gives them its
            elements in turn.
        promise: Called after the first elements. As in TF, a last step with too few
            elements is valid, and the other replicas get empty elements, unless all
            elements are promised the same shapes.
        is_fresh: Nothing else uses their memory.
        before: Makes the elements of the pass that precede these.
    """
    nothing = object()
    shapes = _Shapes(promise, before)
    for several in itertools.zip_longest(*pipelines, fillvalue=nothing):
        found = [element for element in several if element is not nothing]
        shapes.see(found)
        if len(found) < len(several) and not shapes.make_step(found[0]):
            return
        parts = tuple(empty_like(found[0]) if x is nothing else x for x in several)
        yield Share((), apart=parts, is_fresh=is_fresh)


@final
class _Shapes:
    """The shapes of the elements of a pass, where they may decide about its last
    step."""

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
        """Returns whether this element, and others that are missing, are a step."""
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
        ValueError: There are no leaves, a leaf is a scalar, or they differ.
    """
    shapes = [np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)]
    if not shapes or () in shapes or len(set(shapes)) > 1:
        raise not_batched()
    return int(shapes[0][0])


def sliced(batch: Any, start: int, stop: int) -> Any:
    """Cuts the rows from ``start`` to ``stop`` out of every leaf; of numpy's arrays
    they are views."""
    return jax.tree.map(lambda leaf: leaf[start:stop], batch)


def empty_like(element: Any) -> Any:
    """Returns the element without rows. A scalar leaf becomes zero, as in TF; a random
    key stays, as no key means nothing."""

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
    found = [sliced(held[span.batch], span.start, span.stop) for span in piece]
    return found[0] if len(found) == 1 else jax.tree.map(_concatenated, *found)


def _concatenated(*leaves: Any) -> Any:
    on_device = any(isinstance(leaf, jax.Array) for leaf in leaves)
    return (jnp if on_device else np).concatenate(leaves)


def _is_full(cut: Cut) -> bool:
    return all(any(span.stop > span.start for span in piece) for piece in cut)


AllMax: TypeAlias = "Callable[[Sequence[int]], list[int]]"
"""Number by number the largest of all workers; each worker gives as many numbers."""

_NEVER: Final = 2**31 - 1
"""Steps of a pass without an end, where the least of all counts. Some collectives
reduce in 32 bits."""


@final
@dataclass(frozen=True, slots=True)
class PassLength:
    """The known length of the passes of a worker, before they begin.

    Args:
        steps: None: unknown.
        is_infinite: The data are repeated without an end.
        is_common: All workers that set this have the same length.
    """

    steps: int | None = None
    is_infinite: bool = False
    is_common: bool = False


class _EndRule(enum.Enum):
    OWN = "each to its own end"
    FOREVER = "without an end"
    COUNTED = "so many steps"
    ASKED = "asking before each step"


@final
class SynchronizedPass:
    """The pass of one worker, which is as long as that of any worker.

    Args:
        elements: The pass over its own data.
        all_max: Exchanges numbers with the other workers.
        length: What is known of the length of the pass.
        empty: Makes the elements that follow its own last one.
        is_partial: Whether there are such elements; if not, all workers stop where the
            first one does.
        order: Describes the order of the pass; all workers that have one need the same.
    """

    def __init__(
        self,
        elements: Elements[Any],
        all_max: AllMax,
        *,
        length: PassLength,
        empty: Callable[[], Any],
        is_partial: bool,
        order: str = "",
    ) -> None:
        self._elements: Final = elements
        self._all_max: Final = all_max
        self._length: Final = length
        self._empty: Final = empty
        self._order: Final = order
        # The largest of negative numbers is that of the worker that stops first.
        self._sign: Final = 1 if is_partial else -1
        self._end_rule: _EndRule | None = None
        """None: the workers have not agreed yet."""
        self._is_endless = False
        self._left = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._end_rule is None:
            self._end_rule = self._agreed()
        match self._end_rule:
            case _EndRule.OWN:
                return next(self._elements)
            case _EndRule.FOREVER:
                pass
            case _EndRule.COUNTED:
                if not self._left:
                    raise StopIteration
                self._left -= 1
            case _EndRule.ASKED:
                if not self._all_max([self._sign * self._has_more()])[0]:
                    # From now on nothing is left, and no worker asks again.
                    self._end_rule = _EndRule.COUNTED
                    raise StopIteration
            case _:
                assert_never(self._end_rule)
        return self._own_or_empty()

    def close(self) -> None:
        """Ends the pass of this worker; the others are not notified."""
        self._elements.close()

    def _agreed(self) -> _EndRule:
        length, sign = self._length, self._sign
        steps = length.steps
        if length.is_infinite:
            # An empty dataset, repeated without an end, is empty: then there are no
            # steps.
            self._is_endless = self._has_more()
            steps = _NEVER if self._is_endless else 0
        # The largest digest and the largest of their negatives show whether all are
        # equal. A worker without an order gives numbers that count in neither.
        digest = zlib.crc32(self._order.encode()) & _NEVER if self._order else None
        apart, forever, unknown, most, high, low = self._all_max(
            [
                not length.is_common,
                sign * self._is_endless,
                steps is None,
                sign * (steps or 0),
                0 if digest is None else digest,
                -_NEVER if digest is None else -digest,
            ]
        )
        # First: under any rule the workers would read on, each in another order.
        if high > -low:
            raise _unlike(self._order)
        # All passes are equally long, so nobody has to ask.
        if not apart:
            return _EndRule.OWN
        if sign * forever:
            return _EndRule.FOREVER
        if unknown:
            return _EndRule.ASKED
        self._left = sign * most
        return _EndRule.COUNTED

    def _own_or_empty(self) -> Any:
        if self._has_more():
            return self._elements.draw()
        if self._is_endless:
            raise ValueError(
                "the data of this worker were to be repeated without an end, on which "
                "the others rely, and have ended: repeat() needs a source that can be "
                "read again (a function that makes a generator, not one generator)"
            )
        return self._empty()

    def _has_more(self) -> bool:
        try:
            self._elements.peek()
        except OutOfRangeError:
            return False
        return True


def _unlike(order: str) -> ValueError:
    """Makes the error of workers whose passes have different orders."""
    here = f"; this one begins {order} (distribution.pass)" if order else ""
    return ValueError(
        "several workers shard a dataset, and do not all begin the same pass of its "
        f"shuffle{here}. Each would read it in another order: some rows twice, others "
        "not at all. Distribute the dataset and begin its passes (iter()) equally "
        "often in all processes; after reform() with a restarted process make the "
        "dataset again in all of them, from shuffle() on, and distribute it again"
    )
