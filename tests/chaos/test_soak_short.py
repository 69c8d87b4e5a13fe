"""The short form of ``make soak``: sessions on the same daemons leave nothing there."""

import pytest
from soak_run import look
from soak_session import census, play

import zstrat as zs

pytestmark = pytest.mark.processes

KEPT = "memory", "objects", "idle_bytes"
"""What grows while a process is young."""


def test_sessions_leave_nothing_on_the_daemons():
    with zs.LocalCluster(num_ps=1, num_workers=1) as local:
        play(local.spec, 500)
        before, counted = look(local), census(local.spec)
        play(local.spec, 2000)
        after, again = look(local), census(local.spec)
    del before["program"], after["program"]
    for task, values in after.items():
        grown = {
            name: (before[task][name], value)
            for name, value in values.items()
            if value > before[task][name] and name.split()[-1] not in KEPT
        }
        assert not grown, f"{task}: {grown}"
    for task, objects in again.items():
        # A session of these has thousands of objects; what varies are dozens.
        assert objects < counted[task] + 500, f"{task}: {counted[task]}, then {objects}"
