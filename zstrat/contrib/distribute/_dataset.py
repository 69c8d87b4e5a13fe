"""A dataset for the devices of one program: consecutive elements, one for each.

Law of the file: the towers of a step have elements that nobody writes to, though their
source may fill one buffer again and again while it is asked for the next ones.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, final

import jax

from zstrat.data import ending, is_steady, require_data
from zstrat.program import StepIterator, kept, require_untraced
from zstrat.strategy import regroup

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable


@final
class PerDeviceDataset:
    """Each step takes as many elements as there are towers, the first for the first; a
    remainder is dropped (TF 1.12's rule). Each iterator is a fresh pass."""

    def __init__(self, dataset_fn: Callable[[], Iterable[Any]], towers: int) -> None:
        self._dataset_fn = dataset_fn
        self._towers = towers

    def __iter__(self) -> PerDeviceIterator:
        require_untraced("a distributed dataset")
        elements = self._elements()
        made = PerDeviceIterator(elements, name="a distributed dataset", steady=True)
        # When the program ends at the latest: a pass that the interpreter ends while it
        # takes itself down complains of what is gone already.
        weakref.finalize(made, elements.close)
        return made

    def make_one_shot_iterator(self) -> PerDeviceIterator:
        """`iter`, by its old name."""
        return iter(self)

    def make_initializable_iterator(self) -> PerDeviceIterator:
        """`iter`: there is nothing to initialize."""
        return iter(self)

    def _elements(self) -> Generator[Any, None, None]:
        with ending(_steady(self._dataset_fn())) as elements:
            if self._towers == 1:
                yield from elements
                return
            while True:
                several = tuple(itertools.islice(elements, self._towers))
                if len(several) < self._towers:
                    return
                yield regroup(several, always_wrap=True)


@final
class PerDeviceIterator(StepIterator):
    """What a step draws from, and a loop in Python: one element for each tower."""

    def initialize(self) -> list[Any]:
        """Nothing: an iterator is ready when it is made."""
        return []


def _steady(source: Iterable[Any]) -> Generator[Any, None, None]:
    """A pass whose elements stay as they are while the next ones are made.

    Raises (while iterating):
        TypeError: An element has an object in it that is no data.
    """
    stays = is_steady(source)
    with ending(iter(source)) as elements:
        for element in elements:
            require_data(element)
            yield element if stays else jax.tree.map(kept, element)
