"""Datasets of other libraries: grain's, TensorFlow's, and whatever else can be
iterated.

Their elements are passed on unchanged, and are refused if they contain objects. What is
known about the elements without a pass (rows of a batch, how many elements, whether
they are still written to) is read from attributes that these libraries define. The
libraries are never imported here: a program that has an object of grain has imported
grain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, final, runtime_checkable

import numpy as np

from ._elements import ending
from ._leaves import SCALARS, Array, require_data
from ._passes import INFINITE, UNKNOWN, Recipe
from ._replica_rows import AutoShardPolicy
from ._spec import common_first_axis
from ._tree import as_element, leaves

if TYPE_CHECKING:
    from ._leaves import Element

Dimensions = tuple[int | None, ...]
Shape = tuple[int, ...]

_ENDLESS: Final = sys.maxsize >> 20
"""A grain dataset with at least this many indices counts as repeated without end; the
number is low enough for datasets of large batches."""


@final
@dataclass(frozen=True, slots=True)
class Foreign(Recipe):
    """Any iterable, and what is known about its elements.

    Args:
        begin: Returns the iterator of a new pass.
        is_steady: An element is never written to after it was yielded.
        is_read_once: The source is an iterator itself, so it has one pass only.
    """

    begin: Callable[[], Iterator[Any]]
    is_steady: bool = False
    batch_size: int | None = None
    ranks: tuple[int, ...] | None = None
    count: int = UNKNOWN
    policy: AutoShardPolicy | None = None
    is_read_once: bool = False

    def items(self) -> Iterator[Element]:
        with ending(self.begin()) as elements:
            for element in elements:
                require_data(element)
                yield element
                del element  # the reader may be its only owner while the next is made

    def size(self) -> int:
        return self.count

    def why_order_varies(self) -> str:
        if self.is_read_once:
            return (
                "its data are an iterator, which can be read once. Make them by "
                "Dataset.from_generator of a function"
            )
        return ""


@runtime_checkable
class TensorFlowDataset(Protocol):
    """A ``tf.data.Dataset``, recognized by its attributes."""

    @property
    def element_spec(self) -> Any: ...

    def as_numpy_iterator(self) -> Iterator[Any]: ...

    def cardinality(self) -> Any: ...

    def options(self) -> Any: ...


def foreign(source: Iterable[Any]) -> Foreign:
    """Returns the recipe of a dataset of another library.

    Raises:
        TypeError: The source cannot be iterated.
    """
    # Looked up, not imported: an object of a library is here only if somebody has
    # imported that, and importing TensorFlow takes seconds.
    grain: Any = sys.modules.get("grain")
    if isinstance(source, TensorFlowDataset):
        return _of_tensorflow(source)
    if grain is not None and isinstance(source, grain.MapDataset | grain.IterDataset):
        return _of_grain(source, grain)
    if is_huggingface(source):
        return _of_huggingface(source)
    if isinstance(source, list):
        return _of_list(source)
    if not isinstance(source, Iterable):
        raise TypeError(
            "a strategy distributes a zs.data.Dataset, a dataset of grain or tf.data, "
            "arrays (a dict or tuple of them), or any iterable of batches; got "
            f"{type(source).__name__}"
        )
    # Not steady: a loader may write its next batch into the memory of the last one.
    return Foreign(source.__iter__, is_read_once=isinstance(source, Iterator))


def is_huggingface(source: object) -> bool:
    """Returns whether the source is a dataset of HuggingFace, whose columns are
    lists."""
    theirs: Any = sys.modules.get("datasets")
    kinds = (
        getattr(theirs, "Dataset", None),
        getattr(theirs, "IterableDataset", None),
    )
    return isinstance(source, tuple(kind for kind in kinds if isinstance(kind, type)))


def parse_no_flags() -> None:
    """Gives the flags of absl, if absl is imported, their default values. For processes
    whose command line is zstrat's own, and contains no absl flags.

    grain reads its flags when it starts processes (``mp_prefetch``), and absl would
    refuse to return them, because ``app.run`` was not called.
    """
    absl: Any = sys.modules.get("absl.flags")
    if absl is not None and not absl.FLAGS.is_parsed():
        absl.FLAGS.mark_as_parsed()


def _of_huggingface(source: Any) -> Foreign:
    """Returns the recipe of a dataset of HuggingFace, whose elements are dicts of
    lists; each list becomes one array."""

    def begin() -> Iterator[Any]:
        for element in source:
            try:
                yield as_element(element)
            except ValueError as error:
                error.add_note(
                    "Rows of different lengths in a dataset of HuggingFace: pad them "
                    "there (dataset.map), or give zs.data.Dataset.from_generator("
                    "lambda: dataset).padded_batch(...) its single rows"
                )
                raise

    count = len(source) if isinstance(source, Sized) else UNKNOWN
    return Foreign(begin, is_steady=True, count=count)


def _of_list(batches: list[Any]) -> Foreign:
    """Returns the recipe of a list of batches. Their size is known if all but the last
    have equally many rows."""
    found = [_shapes(batch) for batch in batches]
    whole = [shapes for shapes in found if shapes is not None]
    is_known = bool(found) and len(whole) == len(found)
    return Foreign(
        batches.__iter__,
        is_steady=True,
        batch_size=_common_rows(whole) if is_known else None,
        ranks=tuple(map(len, whole[0])) if is_known else None,
        count=len(batches),
    )


def _common_rows(batches: list[list[Shape]]) -> int | None:
    """Returns the number of rows of each batch except the last, if all are equal, and
    None otherwise; of a single batch, its rows."""
    if len({tuple(shape[1:] for shape in shapes) for shapes in batches}) != 1:
        return None
    whole = [shape for shapes in batches[:-1] or batches for shape in shapes]
    # Of batches without rows the others may have any number.
    return common_first_axis(whole) or None


def _of_grain(dataset: Any, grain: Any) -> Foreign:
    shapes: list[Dimensions] | None
    try:
        spec = grain.experimental.get_element_spec(dataset)
        shapes = [tuple(leaf.shape) for _, leaf in leaves(spec)]
    except (NotImplementedError, ValueError):  # a transformation does not say
        shapes = None
    # It counts indices: a filter leaves them, and has nothing there. So may any other
    # transformation or source; nobody knows how many elements there are.
    is_map = isinstance(dataset, grain.MapDataset)
    count = INFINITE if is_map and len(dataset) >= _ENDLESS else UNKNOWN
    # Its own threads keep elements in buffers, so nobody may write to them either.
    return Foreign(
        dataset.__iter__,
        is_steady=True,
        batch_size=None if shapes is None else common_first_axis(shapes),
        ranks=None if shapes is None else tuple(map(len, shapes)),
        count=count,
    )


def _of_tensorflow(dataset: TensorFlowDataset) -> Foreign:
    shapes = [_dimensions(leaf) for _, leaf in leaves(dataset.element_spec)]
    ranked = [shape for shape in shapes if shape is not None]
    policy = dataset.options().experimental_distribute.auto_shard_policy
    # Elements are copies of tensors, which do not change.
    return Foreign(
        dataset.as_numpy_iterator,
        is_steady=True,
        batch_size=common_first_axis(shapes),
        ranks=tuple(map(len, ranked)) if len(ranked) == len(shapes) else None,
        count=int(dataset.cardinality()),
        policy=AutoShardPolicy(int(policy)),
    )


def _dimensions(spec: Any) -> Dimensions | None:
    try:
        return tuple(spec.shape)
    except ValueError:  # TensorFlow does not know the rank
        return None


def _shapes(batch: Any) -> list[Shape] | None:
    """Returns the shapes of all leaves; lists are structure here, as in jax. None if
    there is a leaf of an unknown class, which jax may know as a pytree and flatten."""
    if batch is None:
        return []
    if isinstance(batch, SCALARS | Array):
        return [np.shape(batch)]
    if not isinstance(batch, dict | list | tuple):
        return None
    found: list[Shape] = []
    for item in batch.values() if isinstance(batch, dict) else batch:
        shapes = _shapes(item)
        if shapes is None:
            return None
        found += shapes
    return found
