"""Input data of types that Keras does not know: `zs.data.Dataset`, and leased datasets.

Keras receives `Tokens`, a `keras.utils.PyDataset` of empty batches, instead of the
data, and runs its loop over these; the batches of the steps come from the sources here.
So the loop ends where the data end, whether or not their number of batches was known to
Keras.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import keras
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.coordinator import LeasedDataset
    from zstrat.data import Dataset


class Tokens(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """Yields this number of empty batches; infinitely many if the number is None."""

    def __init__(self, count: int | None) -> None:
        super().__init__()
        self._count = count

    @property
    def num_batches(self) -> int | None:
        return self._count

    def __getitem__(self, number: int) -> tuple[np.ndarray]:
        return (np.zeros((1, 1), "float32"),)  # Keras wants arrays with rows


class Draw(NamedTuple):
    """Represents a batch that a worker will draw from a leased dataset. ``specs`` are
    the shapes and dtypes of all batches that may be drawn, which differ only in their
    number of rows."""

    iterator: Any
    specs: tuple[Any, ...]


class DatasetSource:
    """The batches of a `zs.data.Dataset`, which this process reads."""

    def __init__(self, dataset: Dataset, *, endless: bool) -> None:
        self._dataset: Final = dataset
        self._endless: Final = endless
        self._batches: Iterator[Any] | None = None
        self._read, self._is_over = 0, False
        size = dataset.cardinality()
        self.count: int | None = size if size >= 0 else None
        """Number of batches of an epoch; None: unknown, or infinite."""
        # Keras builds a model for a batch, and sees none of these.
        self.example: Any = next(iter(dataset))

    def begin(self) -> None:
        """Begins an epoch. With ``steps_per_epoch`` an epoch continues where the last
        one ended; after the last batch of the dataset it begins again."""
        if not self._endless or self._is_over:
            self._batches = None

    def __iter__(self) -> DatasetSource:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches, self._read = iter(self._dataset), 0
        self._is_over = True  # if there is no further batch
        batch = next(self._batches)
        self._read += 1
        self._is_over = self._read == self.count
        return batch


class LeaseSource:
    """The batches of a leased dataset, which workers read.

    Args:
        repeats: Whether to begin a new pass over the dataset when its epochs have
            ended, as validation needs.
    """

    def __init__(self, data: LeasedDataset, *, repeats: bool) -> None:
        self._data, self._repeats = data, repeats
        epoch = self._open()
        self.example: Any = self._iterator.element_spec
        whole = self.example
        rows, total = jax.tree.leaves(whole)[0].shape[0], epoch.examples
        self.count: int | None = epoch.steps
        # Batches of a worker have one size or another, as it leases whole ranges: the
        # step is traced for both before it is known who gets which.
        sizes = {min(rows, total)}
        if total % rows and epoch.steps * rows > total:
            sizes.add(total % rows)
        self._specs = tuple([_resized(whole, size) for size in sorted(sizes)])
        self._first: Any = epoch

    def _open(self) -> Any:
        self._iterator: Any = self._data.begin(from_start=True)
        self._epochs: Iterator[Any] = iter(self._iterator.epochs)
        return next(self._epochs)

    def begin(self) -> None:
        """Begins an epoch.

        Raises:
            ValueError: The dataset has no further epoch.
        """
        epoch, self._first = self._first, None
        epoch = epoch or next(self._epochs, None)
        if epoch is None and self._repeats:
            epoch = self._open()
        if epoch is None:
            raise ValueError(
                f"{self._data!r} has no further epoch: create it with epochs=None, for "
                "as many as fit asks for"
            )
        self._steps = iter(epoch)

    def __iter__(self) -> LeaseSource:
        return self

    def __next__(self) -> Draw:
        next(self._steps)  # ends the epoch where its ranges do
        return Draw(self._iterator, self._specs)


Source = DatasetSource | LeaseSource
"""Where batches come from: this process reads them, or workers do."""


def _resized(spec: Any, rows: int) -> Any:
    kind: Any = jax.ShapeDtypeStruct  # untyped
    return jax.tree.map(lambda x: kind((rows, *x.shape[1:]), x.dtype), spec)
