"""Decides which part of a dataset each of several workers reads.

The law: every decision is made here, before the first element is read, from numbers and
from the recipe alone (`_lineage`); the iterators only carry out the decision.

`_replica_rows` then decides which rows of a worker's batches each of its replicas gets.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from . import _lineage as lineage
from ._dataset import Dataset
from ._foreign import Foreign, foreign
from ._leaves import node_of
from ._passes import INFINITE
from ._replica_rows import AutoShardPolicy, cutter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._passes import Recipe
    from ._position import Position
    from ._replica_rows import Cutter, Worker


_UNSEEDED: Final = (
    "several workers deal this dataset out among themselves, and it has a `shuffle` "
    "without a seed: each worker reads it in another order, so some elements are read "
    "twice, and others by nobody. Give `shuffle` the same seed in every process: "
    "shuffle(buffer_size, seed=...)"
)
_UNORDERED: Final = (
    "several workers deal this dataset out among themselves, and it has a "
    "`map(deterministic=False)`, whose elements come in another order in each worker, "
    "so some are read twice, and others by nobody. Leave `deterministic` out, or map "
    "behind the place where it is sharded"
)


@final
@dataclass(frozen=True, slots=True)
class Allotment:
    """The part of a dataset that one worker reads.

    Args:
        recipe: Makes the elements of the part.
        policy: The policy by which the part was chosen: OFF, FILE, DATA or HINT.
        batch_size: Rows of a global batch, None if unknown.
        sharded_at: See `_lineage.sharded_operation`; None for one worker alone.
    """

    recipe: Recipe
    worker: Worker
    policy: AutoShardPolicy
    batch_size: int | None
    sharded_at: int | None

    @property
    def is_steady(self) -> bool:
        """Whether an element is never written to after it was yielded."""
        return lineage.is_steady(self.recipe)

    @property
    def is_fresh(self) -> bool:
        """Whether only the reader of an element holds references to the element's
        memory."""
        return lineage.is_fresh(self.recipe)

    @property
    def shapes(self) -> lineage.KnownShapes:
        """The shapes of the part's elements, as far as known."""
        return lineage.shapes_of(self.recipe)

    @property
    def is_infinite(self) -> bool:
        return self.recipe.size() == INFINITE

    @property
    def ends_with_others(self) -> bool:
        """Whether all workers reach the end of their parts in the same step, whatever
        the data are."""
        one = self.worker.count == 1
        return one or self.policy is AutoShardPolicy.DATA

    def elements(self) -> Iterator[Any]:
        """Begins a pass and yields its elements."""
        return self.begin().elements()

    def begin(self, place: Position | None = None) -> Recipe:
        """Begins a pass now; its elements may be made later, in any process.

        Args:
            place: Begin the pass that this position is in, from its first element;
                None: begin a new pass.
        """
        return (
            self.recipe.begin_pass()
            if place is None
            else place.resumed_pass(self.recipe)
        )

    def before(self, steps: int) -> tuple[int, int]:
        """Returns what comes before step ``steps`` of a pass: the number of whole
        batches that the pass may skip, and the number of steps whose batches have to be
        read."""
        size = self.batch_size
        if not size or isinstance(self.recipe, Foreign):  # may have empty ones, too
            return 0, steps
        if self.policy is AutoShardPolicy.DATA:
            return steps, 0  # a step is a batch, whatever its rows
        replicas = self.worker.count * self.worker.replicas
        # A cycle of `batch_sizes_for_worker` takes one global batch in as many steps as
        # there are workers, if each of its pieces has a row.
        if size >= replicas and self.shapes.is_even:
            return divmod(steps, self.worker.count)
        return 0, steps

    def order(self, begun: Recipe) -> str:
        """Returns text that identifies the order of a begun pass, which must be the
        same in all workers; "" if the order need not be the same."""
        return (
            "" if self.sharded_at is None else lineage.order_of(begun, self.sharded_at)
        )

    def cutter(self) -> Cutter:
        """Returns a new cutter, which assigns the rows of one pass to replicas."""
        promised = self.shapes.promised_rows
        return cutter(self.batch_size, self.policy, self.worker, promised)


def as_dataset(source: Any) -> Dataset:
    """Converts whatever a strategy can distribute to a `Dataset`.

    A dict, a tuple, an array or an object of a class that jax knows as a pytree is
    data: the dataset has one element for each index of the first axis. A list, like any
    other iterable, is the sequence of the elements.

    Raises:
        TypeError: The source has another type, or has arrays of objects. While
            iterating: an element contains an object that is not data, and that jax
            cannot flatten.
        ValueError: The arrays have first axes of different lengths.
    """
    if isinstance(source, Dataset):
        return source
    # A pytree that can be iterated counts as what it yields, as a loader of batches.
    is_data = isinstance(source, dict | tuple | np.ndarray)
    if is_data or (not isinstance(source, Iterable) and node_of(source) is not None):
        return Dataset.from_tensor_slices(source)
    return Dataset(foreign(source))


def is_steady(source: object) -> bool:
    """Returns whether it is known that an element of ``source`` is never written to
    after it was yielded, so that no element need be copied. True for a `Dataset` whose
    operations guarantee it, a list, and a tuple."""
    if isinstance(source, Dataset):
        return lineage.is_steady(source.recipe)
    return isinstance(source, list | tuple)


def allotted(source: Iterable[Any], worker: Worker) -> Allotment:
    """Decides which part of a dataset of global batches the worker reads.

    Raises:
        TypeError: The source is not a dataset.
        ValueError: The dataset is not batched, though there are several replicas; or
            its policy does not fit it.

    Warns:
        UserWarning: Several workers share the dataset out, and each shuffles it
            differently, or maps it in any order.
    """
    dataset = as_dataset(source)
    recipe = dataset.recipe
    shapes = lineage.shapes_of(recipe)
    # One replica of one worker takes elements as they are, batched or not.
    if worker.count * worker.replicas > 1 and 0 in (shapes.ranks or ()):
        raise not_batched()
    files = lineage.file_count(recipe)
    wanted = dataset.options().auto_shard_policy
    policy = sharing_policy(wanted, worker.count, files)
    sharded_at = lineage.sharded_operation(recipe, policy) if worker.count > 1 else None
    # Before the recipe is rewritten: ``sharded_at`` counts its operations.
    if sharded_at is not None and lineage.order_differs(recipe, sharded_at):
        warnings.warn(_UNSEEDED, stacklevel=4)  # the line that asked a strategy for it
    if sharded_at is not None and lineage.has_no_order(recipe, sharded_at):
        warnings.warn(_UNORDERED, stacklevel=4)
    if policy is AutoShardPolicy.FILE:
        recipe = lineage.for_files(recipe, worker.count, worker.index)
    elif policy is AutoShardPolicy.HINT:
        recipe = lineage.for_hint(recipe, worker.count, worker.index)
    # Apart: one worker may look into the dataset before, and the others not.
    return Allotment(
        recipe.with_own_count(), worker, policy, shapes.batch_size, sharded_at
    )


def not_batched() -> ValueError:
    """Returns the error for a dataset without batches, whose elements cannot be divided
    among replicas."""
    return ValueError(
        "experimental_distribute_dataset takes a dataset of batches, which it cuts for "
        "the replicas. Call the `batch` method of the dataset with the global batch "
        "size, or give distribute_datasets_from_function what each worker draws"
    )


def sharing_policy(
    policy: AutoShardPolicy, workers: int, files: int | None
) -> AutoShardPolicy:
    """Returns the policy for this many workers: OFF, FILE, DATA or HINT.

    One worker reads everything, whatever the policy is. The policy still says how the
    rows are divided among the worker's replicas, and AUTO is resolved as for several
    workers.

    Args:
        files: How many files the dataset is read from; None: it is not read from files.

    Raises:
        ValueError: FILE without files, or with fewer files than workers.
    """
    if policy is AutoShardPolicy.AUTO:
        enough = files is not None and files >= workers
        policy = AutoShardPolicy.FILE if enough else AutoShardPolicy.DATA
    if workers == 1:
        is_file = policy is AutoShardPolicy.FILE
        return AutoShardPolicy.OFF if is_file else policy
    if policy is AutoShardPolicy.FILE and files is None:
        raise ValueError(
            "AutoShardPolicy.FILE: did not find a shardable source, because the "
            "dataset is not read from files that zstrat knows (zs.data.Dataset."
            "from_files, list_files and their kin), or several are zipped: consider "
            "turning off auto-sharding or switching the auto_shard_policy to DATA"
        )
    if policy is AutoShardPolicy.FILE and files is not None and files < workers:
        raise ValueError(
            f"AutoShardPolicy.FILE: not enough files, {files} for {workers} workers "
            "(of Parquet row groups count); each worker needs at least one: write more "
            "files, or set the auto_shard_policy to DATA (every worker reads all and "
            "keeps its share) or OFF"
        )
    return policy
