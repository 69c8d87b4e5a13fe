"""The short form of ``make chaos``: faults of which nothing is heard; a long cut."""

import random

import pytest
from chaos_cluster import Cluster
from chaos_run import Totals, spare
from chaos_work import Work

# Faults take half a minute however quick the machine is; connecting to six processes on
# cores that others use has taken a whole one.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

PAUSE = 0.3
"""Seconds between batches: a fault needs steps under way, not as many as there can be.
"""


def test_nothing_is_lost_doubled_or_falsely_said_under_faults():
    rng, totals = random.Random(1), Totals()
    with Cluster() as cluster, cluster.strategy() as strategy:
        work = Work(strategy, PAUSE)
        work.start()
        try:
            for name in ("resets", "silence", "kill", "freeze", "doze"):
                spare(work)
                getattr(cluster, name)(rng)
            spare(work, 2)
            assert not work.words, f"of what heals in time one hears {work.words}"
            cluster.long_silence(rng)
            spare(work, 2)
        finally:
            work.stop()
        totals.add(work)
        assert work.verdict() == (0, 0)
        assert not totals.false, work.words
