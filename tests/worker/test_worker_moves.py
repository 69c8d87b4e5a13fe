"""A parameter server that goes on at another address, as a worker hears of it."""

import asyncio

import numpy as np
import pytest

from zstrat.config import Timeouts
from zstrat.errors import ProtocolError
from zstrat.ps import PsClient, PsUpdate
from zstrat.testing import FakeLink
from zstrat.wire import Done, Hello, MoveServer, Push, Pushed, UpdateOp
from zstrat.worker import ServerLinks

ADD = [PsUpdate(0, 1, UpdateOp.ADD, 0, (np.ones(2),))]


class Rig:
    """Links to a server at "a" and to its copy at "b", which keep what comes."""

    def __init__(self, views=(3,)):
        self.links = {}
        self.servers = ServerLinks(self.make_link, ["a"], views, Timeouts())
        self.client = PsClient(self.servers.links, 7)
        self.servers.attach(self.client.lines)
        self.servers.start()

    def make_link(self, address, *, name, expect, on_open, on_lost):
        incarnation = ord(address)
        self.links[address] = FakeLink(
            lambda _: Pushed(True, [1]),
            name=name,
            address=address,
            hello=Hello(1, "ps", 0, incarnation, "here", 1),
            on_open=on_open,
            on_lost=on_lost,
        )
        return self.links[address]

    def steps(self, address):
        """Of the pushes that came there."""
        return [m.step for m in self.links[address].sent if isinstance(m, Push)]


async def test_what_is_under_way_goes_to_the_other_address_in_its_order():
    rig = Rig()
    await rig.servers.wait_open(asyncio.get_running_loop().time() + 30)
    rig.links["a"].hold()
    pushes = [rig.client.push(step, 0, 0, ADD) for step in (5, 6)]
    moving = asyncio.ensure_future(rig.servers.move(MoveServer(7, 0, 4, "b")))
    await asyncio.sleep(0)
    pushes.append(rig.client.push(7, 0, 0, ADD))
    assert await moving == Done()
    async with asyncio.timeout(100):
        assert await asyncio.gather(*pushes) == [True] * 3
    assert (rig.steps("a"), rig.steps("b")) == ([5, 6], [5, 6, 7])
    assert rig.links["a"].is_closed
    await rig.servers.close("over")


async def test_a_word_of_an_older_view_moves_nobody():
    rig = Rig()
    for view in (2, 3):
        assert await rig.servers.move(MoveServer(7, 0, view, "b")) == Done()
    assert list(rig.links) == ["a"]
    assert await rig.servers.move(MoveServer(7, 0, 4, "a")) == Done()
    assert not rig.links["a"].is_closed
    await rig.servers.close("over")


@pytest.mark.parametrize(("views", "index"), [((), 0), ((3,), 1)])
async def test_who_may_not_move_is_not_moved(views, index):
    rig = Rig(views)
    with pytest.raises(ProtocolError, match="MoveServer"):
        await rig.servers.move(MoveServer(7, index, 4, "b"))
    await rig.servers.close("over")
