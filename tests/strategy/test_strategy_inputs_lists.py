"""Lists of batches, shared out among replicas."""

import dataclasses

import jax
import numpy as np

from zstrat.data import InputContext
from zstrat.strategy import ProcessInputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    x: object
    y: object


def distributed(batches):
    inputs = ProcessInputs(InputContext(num_replicas_in_sync=2), 2)
    return list(inputs.of_dataset(batches))


def test_batches_of_classes_that_are_pytrees():
    batches = [Pair(np.arange(10.0).reshape(5, 2), np.arange(5)) for _ in range(2)]
    for source in (batches, iter(batches)):
        elements = distributed(source)
        assert len(elements) == 2
        for element in elements:
            assert isinstance(element, Pair)
            # Five rows for two: as many as fit in equal pieces, then the rest.
            assert [part.tolist() for part in element.y.values] == [[0, 1, 2], [3, 4]]
            rows = np.concatenate([np.asarray(part) for part in element.x.values])
            np.testing.assert_array_equal(rows, batches[0].x)
