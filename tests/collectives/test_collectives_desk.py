"""Where groups are formed: who waited long enough hears so, whatever the timers do."""

import asyncio
from types import SimpleNamespace

import pytest

from zstrat.collectives.group import RendezvousService
from zstrat.errors import CollectiveTimeoutError
from zstrat.wire import JoinGroup, MemberEntry


async def test_the_end_of_timeout_is_told_though_the_timer_came_early(hasty):
    desk = RendezvousService(hasty)
    member = MemberEntry("/job:worker/task:1", "h:1", "h", 1, 1, 0, 0, b"")
    remote = SimpleNamespace(hello=SimpleNamespace(incarnation=1), name="worker:1")
    waiting = desk.join(remote, JoinGroup("train", 0, 1, 2, member, 0.05))
    with pytest.raises(CollectiveTimeoutError, match="rank 0"):
        await asyncio.wait_for(waiting, 30)
    assert hasty.came is not None
    assert hasty.again == hasty.came  # it was set again for the same time
    desk.close()
