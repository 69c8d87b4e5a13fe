"""The first draw of a pass meets all workers, whatever the policy; so all of them
begin passes equally often."""

import numpy as np
import pytest
from ranks import ranks

from zstrat.data import AutoShardPolicy, Dataset, Options


def with_policy(policy):
    options = Options()
    options.auto_shard_policy = policy
    return Dataset.range(8).batch(4).with_options(options)


def calls(strategy):
    return len(strategy._channel.collective.board.calls)


@pytest.mark.parametrize("policy", [AutoShardPolicy.DATA, AutoShardPolicy.OFF])
@pytest.mark.parametrize("endless", [False, True])
def test_every_pass_begins_with_a_question(policy, endless):
    def program(strategy, rank):
        data = with_policy(policy)
        made = strategy.experimental_distribute_dataset(
            data.repeat() if endless else data
        )
        asked = []
        for _ in range(2):
            before = calls(strategy)
            iterator = iter(made)
            found = np.asarray(next(iterator)).tolist()
            asked.append((found, calls(strategy) > before))
            iterator.close()
        return asked

    firsts = [[0, 1], [0, 1] if policy is AutoShardPolicy.OFF else [2, 3]]
    expected = [[(first, True)] * 2 for first in firsts]
    assert ranks(2, program) == expected
