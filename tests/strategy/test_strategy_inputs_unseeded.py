"""The warning about a shuffle without a seed points at the line that distributes it."""

import pytest
from ranks import ranks

from zstrat.data import Dataset


def test_the_warning_is_at_the_line_of_the_user():
    dataset = Dataset.range(8).shuffle(8).batch(4)

    def program(strategy, rank):
        del rank
        strategy.experimental_distribute_dataset(dataset)

    with pytest.warns(UserWarning, match="`shuffle`") as caught:
        ranks(2, program)
    assert {warning.filename for warning in caught} == {__file__}
