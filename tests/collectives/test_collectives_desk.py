"""Where groups are formed: who waited long enough hears so, whatever the timers do."""

import asyncio
from types import SimpleNamespace

import pytest

from zstrat.collectives._desk import Desk
from zstrat.errors import CollectiveTimeoutError
from zstrat.wire import JoinGroup, MemberEntry


class Hasty:
    """A loop whose timers come a little before their time, as those of uvloop, which
    rounds to milliseconds, do now and then."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self.timers = 0

    def __getattr__(self, name):
        return getattr(self._loop, name)

    def call_at(self, when, callback, *args):
        self.timers += 1
        return self._loop.call_at(when - 0.005, callback, *args)


async def test_the_end_of_patience_is_told_though_the_timer_came_early():
    loop = Hasty()
    desk = Desk(loop)
    member = MemberEntry("/job:worker/task:1", "h:1", "h", 1, 1, 0, 0, b"")
    remote = SimpleNamespace(hello=SimpleNamespace(incarnation=1), name="worker:1")
    waiting = desk.asks(remote, JoinGroup("train", 0, 1, 2, member, 0.05))
    with pytest.raises(CollectiveTimeoutError, match="rank 0 runs, but has not made"):
        await asyncio.wait_for(waiting, 30)
    assert loop.timers > 1
    desk.close()
