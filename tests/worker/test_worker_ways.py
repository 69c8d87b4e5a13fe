"""A server that is away for a while, one that was started again, and one that is gone,
as a worker tells them from what its link says."""

import asyncio

import pytest

from zstrat.errors import PeerLostError
from zstrat.wire import Hello
from zstrat.worker import ServerPresence

FIRST, SECOND = (Hello(1, "ps", 0, life, "here", 1) for life in (1, 2))
SILENT = PeerLostError("ps:0", "it was silent")


class Told:
    """Takes the place of a line."""

    def __init__(self):
        self.said, self.closed = [], None
        self.news = asyncio.Event()

    def resume(self):
        self._say("resume")

    def hold(self):
        self._say("hold")

    def lose(self, reason, *, gone):
        self._say(("gone" if gone else "away", reason))

    def close(self, error):
        self.closed = error

    def _say(self, what):
        self.said.append(what)
        self.news.set()


def way_of(grace, **options):
    way = ServerPresence(grace, **options)
    way.line = Told()
    return way, way.line


async def test_who_is_back_in_time_was_never_away():
    way, line = way_of(3600.0)
    way.opened(FIRST)
    way.lost(SILENT)
    way.opened(FIRST)
    assert line.said == ["resume", "resume"]
    way.close(RuntimeError())


async def test_who_says_that_it_returns_has_so_long():
    way, line = way_of(0.0)
    way.opened(FIRST)
    way.lost(PeerLostError("ps:0", "it left", left=True, returns=3600.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    way.opened(FIRST)
    assert line.said == ["resume", "resume"]
    way.close(RuntimeError())


@pytest.mark.parametrize("told_of_the_loss", [False, True])
async def test_who_was_started_again_has_lost_all_for_good(told_of_the_loss):
    way, line = way_of(3600.0)
    way.opened(FIRST)
    if told_of_the_loss:
        way.lost(SILENT)
    way.opened(SECOND)
    way.opened(SECOND)
    gone = "gone", "it was restarted, and its state is lost"
    assert line.said == ["resume", gone, gone]


async def test_who_was_started_again_before_any_work_had_nothing_to_lose():
    way, line = way_of(3600.0)
    way.is_used = False
    way.opened(FIRST)
    way.opened(SECOND)
    assert line.said == ["resume", "resume"]
    way.is_used = True
    way.opened(SECOND)
    assert line.said == ["resume"] * 3
    way.opened(FIRST)
    assert line.said[3:] == [("gone", "it was restarted, and its state is lost")]


async def test_who_stays_away_is_not_waited_for_and_may_come_back():
    way, line = way_of(0.0)
    way.opened(FIRST)
    line.news.clear()
    way.lost(SILENT)
    async with asyncio.timeout(100):
        await line.news.wait()
    way.opened(FIRST)
    assert line.said == ["resume", ("away", "it was silent"), "resume"]


async def test_nothing_is_told_after_the_end():
    way, line = way_of(0.0)
    way.lost(SILENT)
    error = RuntimeError("closed")
    way.close(error)
    way.opened(FIRST)
    way.lost(SILENT)
    await asyncio.sleep(0)
    assert (line.said, line.closed) == ([], error)


async def test_another_process_in_its_place_is_no_loss_for_a_while_where_it_may_move():
    way, line = way_of(0.0, moves=True)
    way.opened(FIRST)
    way.opened(SECOND)
    assert line.said == ["resume", "hold"]
    line.news.clear()
    async with asyncio.timeout(100):
        await line.news.wait()
    away = "away", "it was restarted, and its state is lost"
    assert line.said == ["resume", "hold", away]
