"""A list that begins with a batch without rows, shared out among replicas."""

import numpy as np

from zstrat.data import InputContext
from zstrat.strategy import ProcessInputs


def distributed(batches):
    inputs = ProcessInputs(InputContext(num_replicas_in_sync=2), 2)
    return list(inputs.of_dataset(batches))


def test_a_first_batch_without_rows_is_passed_over():
    (element,) = distributed([np.zeros((0, 2)), np.ones((4, 2))])
    assert [part.shape for part in element.values] == [(2, 2), (2, 2)]
    assert distributed([np.zeros((0, 2))]) == []
