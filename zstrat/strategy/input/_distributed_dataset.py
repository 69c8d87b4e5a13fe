"""Distributed datasets and their iterators, the objects that users get.

Law of the file: a distributed dataset can only be iterated and described; its elements
were determined when it was made (`_inputs`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

from zstrat.data import CheckpointableIterator, Dataset, require_fit
from zstrat.errors import ClosedError
from zstrat.program import StepDataset, StepIterator, require_untraced
from zstrat.strategy._frames import in_real_replica_context
from zstrat.variables import recorder

from ._feed import FeedPosition

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._feed import DatasetFeed, DatasetPass

_TRANSFORMATIONS: Final = frozenset(
    name
    for name, member in vars(Dataset).items()
    if not name.startswith("_") and callable(member)
)


@final
class DistributedDataset(StepDataset):
    """A dataset whose elements, one for each step, go to the replicas of this process.
    Each ``iter()`` begins a new pass, whose iterator may be an argument of a step.

    A distributed dataset has no transformations: transform the dataset before you
    distribute it.
    """

    def __init__(self, feed: DatasetFeed, name: str) -> None:
        self._feed = feed
        self._name = name
        self._waiting: DistributedIterator | None = None
        """A pass that was begun only to describe its elements; the next reader gets
        it."""
        self._begun: weakref.ref[DistributedIterator] | None = None
        """The last pass that a reader got, whose elements can be described."""

    def __iter__(self) -> DistributedIterator:
        """Begins a new pass, whose elements a thread makes in advance.

        In a step this loop cannot be traced: the step then runs in Python; see
        `zs.function`.

        Raises:
            ValueError: Called in a replica function.
            LoopsOverData: Called in a step that is traced; the step function catches
                this.
        """
        if in_real_replica_context():
            raise ValueError(
                f"iter() of {self._name} in a replica function: loop outside of it, "
                "and give each replica its rows, strategy.run(replica_fn, args=(x,))"
            )
        require_untraced(self._name)
        waiting, self._waiting = self._waiting, None
        iterator = waiting or DistributedIterator(self._feed.begin(), self._name)
        iterator._ends_loops = recorder.get() is not None
        # Weakly: a pass that its reader drops ends.
        self._begun = weakref.ref(iterator)
        return iterator

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes of an element: a pytree of ``jax.ShapeDtypeStruct``,
        or, with several replicas in this process, of `PerReplica` of these.

        The shapes are those of the first step of any pass. If there was no step yet,
        the first elements are made: of a pass that was begun, otherwise of one that the
        next ``iter()`` returns. So a source that can be read only once loses no
        element.

        Raises:
            OutOfRangeError: The dataset has no elements.
        """
        if self._feed.spec is None:
            return self._under_way().element_spec
        return self._feed.spec

    def _under_way(self) -> DistributedIterator:
        begun = None if self._begun is None else self._begun()
        if begun is not None and not begun.is_closed:
            return begun
        if self._waiting is None:
            self._waiting = DistributedIterator(self._feed.begin(), self._name)
        return self._waiting

    def __getattr__(self, name: str) -> NoReturn:
        refuse_attribute(type(self).__name__, name)

    def __repr__(self) -> str:
        return f"<zstrat.DistributedDataset: {self._name}>"


@final
class DistributedIterator(StepIterator, CheckpointableIterator):
    """The iterator of a distributed dataset. A step can draw from it, and so can a loop
    in Python, which ends with the elements.

    Its position is a number of steps. All processes save it at the same step and
    restore it together; one file serves all of them.
    """

    def __init__(self, source: DatasetPass, name: str) -> None:
        super().__init__(source, name=name, steady=True)
        self._pass = source
        self.is_closed = False

    @property
    def element_spec(self) -> Any:
        """The shapes and dtypes of an element; see
        `DistributedDataset.element_spec`."""
        return self._pass.spec()

    def get_next(self) -> Any:
        """Draws the next element: for one replica the element itself, otherwise a
        pytree of the same structure with a `PerReplica` at each leaf.

        Raises:
            ValueError: Called in a replica function.
            OutOfRangeError: The pass has ended.
        """
        if in_real_replica_context():
            raise ValueError(
                "next(iterator) should be called from outside of replica_fn. e.g. "
                "strategy.run(replica_fn, args=(next(iterator),))"
            )
        return super().get_next()

    def initialize(self) -> list[Any]:
        """Does nothing: an iterator is ready when it is made. Programs of TF's first
        version call it before the first element."""
        return []

    def get_state(self) -> dict[str, Any]:
        """Returns the position in the data, as a structure of numbers, texts and lists
        that fits into JSON."""
        return self._pass.position(self._drawn).plain

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues at a position that `get_state` of an iterator of the same dataset
        returned.

        Raises:
            InvalidArgumentError: ``state`` is a position in another dataset; the
                iterator has not changed.
            ClosedError: The iterator was closed.
        """
        if self.is_closed:
            raise ClosedError(f"{self.name} is closed: build its iterator again")
        require_fit(self, state)
        position = FeedPosition.from_plain(state)
        # Its thread would keep reading the source.
        self._pass.close()
        self._pass = self._pass.feed.begin(position)
        self.go_on(self._pass, position.steps)

    def misfit(self, state: Mapping[str, Any]) -> str:
        if self.is_closed:
            return "it was closed"
        return self._pass.feed.sources.misfit(FeedPosition.from_plain(state))

    def close(self) -> None:
        """Ends the pass and the thread that makes its elements; later draws raise
        `ClosedError`."""
        self.is_closed = True
        self._pass.close()


def refuse_attribute(kind: str, name: str) -> NoReturn:
    """Raises the error for an attribute that a distributed dataset does not have."""
    if name in _TRANSFORMATIONS:
        raise AttributeError(
            f"a {kind} takes no more transformations: call {name}() on the dataset "
            "before it is distributed, or in the function of "
            "distribute_datasets_from_function"
        )
    raise AttributeError(f"{kind!r} object has no attribute {name!r}")
