"""Where a strategy needs static shapes: what ends the data, and what does not."""

import numpy as np
import pytest

from zstrat.data import Dataset, InputContext
from zstrat.strategy import ProcessInputs


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (8, [[2, 2], [2, 2]]),
        (7, [[2, 2], [2, 1]]),
        (6, [[2, 2], [1, 1]]),
        (5, [[2, 2]]),
    ],
)
def test_a_step_without_rows_for_a_replica_is_none(rows, expected):
    """Batches of 4 for two replicas, 2 rows each: TF's rule looks for rows, and does
    not count them."""
    static = ProcessInputs(InputContext(1, 0, 2), 2, static_shapes=True)
    steps = static.of_dataset(Dataset.range(rows).batch(4))
    assert [[len(part) for part in step.values] for step in steps] == expected


def test_batches_that_divide_without_a_rest_are_all_alike():
    static = ProcessInputs(InputContext(1, 0, 2), 2, static_shapes=True)
    steps = static.of_dataset(Dataset.range(7).batch(4, drop_remainder=True))
    assert [[part.tolist() for part in step.values] for step in steps] == [
        [[0, 1], [2, 3]]
    ]


def test_batches_that_leave_replicas_out_are_no_end_of_the_data():
    """Whose size nobody knows before: behind a map, or a rebatch."""
    static = ProcessInputs(InputContext(1, 0, 4), 4, static_shapes=True)
    for batches in (
        Dataset.range(13).batch(6).map(np.negative),
        Dataset.range(13).batch(2).rebatch(6),
    ):
        with pytest.raises(ValueError, match="6 rows leaves a replica without any"):
            list(static.of_dataset(batches))
    last = Dataset.range(14).batch(8).map(np.negative)  # 6 are left at the end
    assert len(list(static.of_dataset(last))) == 1
