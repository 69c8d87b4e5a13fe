"""Ctrl-C anywhere in an eager call leaves what it found."""

from __future__ import annotations

import numpy as np
from strikes import strikes

import zstrat as zs

FILES = (
    "strategy/_strategy.py",
    "strategy/_context.py",
    "strategy/_frames.py",
    "strategy/replica/_function_cache.py",
)


def test_a_run_leaves_no_scope_behind_and_updates_a_variable_once_or_not():
    strategy = zs.MirroredStrategy()
    with strategy.scope():
        v = zs.Variable(np.float32(0), aggregation=zs.VariableAggregation.MEAN)

    def run():
        strategy.run(lambda: v.assign_add(1.0))

    run()
    for number in strikes(run, *FILES):
        assert not zs.has_strategy(), number
        before = float(v.numpy())
        run()
        assert float(v.numpy()) == before + 1
    assert v.numpy() <= 2 * number + 2
