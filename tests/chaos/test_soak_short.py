"""The short form of ``make soak``: sessions on the same daemons leave nothing there."""

import time

import pytest
from soak_run import look
from soak_session import census, play

import zstrat as zs

pytestmark = pytest.mark.processes

YOUNG = "memory", "objects", "idle_bytes"
"""What grows while a process is young."""
SETTLED = 20.0
"""Seconds in which a daemon has closed what a session that is over had open there."""


def test_sessions_leave_nothing_on_the_daemons():
    with zs.LocalCluster(num_ps=1, num_workers=1) as local:
        play(local.spec, 500)
        before, counted = look(local), census(local.spec)
        play(local.spec, 2000)
        deadline = time.monotonic() + SETTLED
        while (grown := more(before, look(local))) and time.monotonic() < deadline:
            pass  # it was just now told that the session is over
        assert not grown
        for task, objects in census(local.spec).items():
            # A session of these has thousands of objects; what varies are dozens.
            assert objects < counted[task] + 500, f"{task}: {counted[task]}, {objects}"


def more(before, after):
    """What there is more of in the daemons, with the number now."""
    return {
        f"{task}: {name}": value
        for task, values in after.items()
        for name, value in values.items()
        if task != "program" and name.split()[-1] not in YOUNG
        if value > before[task][name]
    }
