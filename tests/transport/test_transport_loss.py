"""Tasks that leave, fall silent, break off, return, or are replaced."""

import asyncio
import errno
from dataclasses import replace

import pytest
import zmq
from transport_talk import Raw, greeting, pull, soon

from zstrat.config import Settings, Timeouts
from zstrat.errors import (
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    StaleSessionError,
)
from zstrat.transport import Event, EventKind, ZeroMQSockets, new_incarnation
from zstrat.wire import (
    Beat,
    CancelSteps,
    DeleteVariables,
    Done,
    Hello,
    Inspect,
    Pull,
    encode,
)


async def test_goodbyes_are_told_at_once_with_the_reason(net):
    endpoint, address, service = await net.serve()
    link, _ = await net.open(address)
    await link.close("the program ended")
    remote, reason = await service.lost.get()
    assert reason == "it left: the program ended"
    assert not remote.alive
    with pytest.raises(PeerLostError, match="worker:1"):
        remote.notify(CancelSteps(1))
    link, caller = await net.open(address)
    waiting = link.submit(DeleteVariables(1, [1]))
    await endpoint.close("the ps was stopped")
    lost = await caller.lost.get()
    assert lost.peer == "/job:ps/task:0"
    assert "the ps was stopped" in lost.reason
    assert lost.left
    assert isinstance(waiting.exception(), PeerLostError | KeyError)
    with pytest.raises(PeerLostError, match="/job:ps/task:0"):
        await link.request(Inspect())
    with pytest.raises(PeerLostError, match="/job:ps/task:0"):
        link.notify(CancelSteps(1))


async def test_a_server_that_restarts_is_lost_and_opened_anew(net):
    endpoint, address, _ = await net.serve()
    link, caller = await net.open(address)
    first = await caller.opened.get()
    await endpoint.close()
    await net.serve(address)
    second = await caller.opened.get()
    assert first.incarnation != second.incarnation
    assert await caller.lost.get()
    assert caller.lost.empty()
    assert await link.request(Inspect())


async def test_a_cut_connection_fails_requests_at_once_and_comes_back(net):
    never = asyncio.get_running_loop().create_future()
    _, address, service = await net.serve(
        handler=lambda r, m: never if isinstance(m, Pull) else Done()
    )
    relay = net.relay(address)
    link, caller = await net.open(relay.address)
    first = await caller.opened.get()
    waiting = link.submit(pull(1))
    relay.reset()
    with pytest.raises(PeerLostError):
        await waiting
    assert (await caller.opened.get()).incarnation == first.incarnation
    assert await link.request(Inspect()) == Done()
    assert caller.lost.empty()
    assert service.lost.empty()
    never.cancel()


async def test_a_connection_that_libzmq_made_anew_by_itself_is_a_new_one(net):
    never = asyncio.get_running_loop().create_future()
    _, address, _ = await net.serve(
        handler=lambda r, m: never if isinstance(m, Pull) else Done()
    )
    link, caller = await net.open(address)
    first = await caller.opened.get()
    waiting = link.submit(pull(1))
    # What the monitor says at once when the loop was held up meanwhile.
    link._happened(Event(EventKind.BROKEN, 0))
    link._happened(Event(EventKind.READY, 0))
    async with asyncio.timeout(100):
        with pytest.raises(PeerLostError):
            await waiting
        assert (await caller.opened.get()).incarnation == first.incarnation
    assert await link.request(Inspect()) == Done()
    assert caller.lost.empty()
    never.cancel()


async def test_a_link_waits_until_there_are_descriptors_for_it(net):
    _, address, _ = await net.serve()
    tries = []

    class ScarceSockets(ZeroMQSockets):
        def socket(self, *args):
            tries.append(args)
            if len(tries) < 4:
                raise zmq.ZMQError(errno.EMFILE)
            return super().socket(*args)

    link, _ = net.link(address, sockets=ScarceSockets())
    with pytest.raises(DeadlineExceededError):
        await link.wait_open(soon(0))
    await link.wait_open(soon())
    assert len(tries) == 4


async def test_a_notice_that_fails_after_its_sender_left_is_in_the_log(net, caplog):
    loop = asyncio.get_running_loop()
    later, told = loop.create_future(), loop.create_future()

    def handler(remote, message):
        return later if isinstance(message, CancelSteps) else Done()

    _, address, service = await net.serve(handler=handler)
    link, _ = await net.open(address)
    link.notify(CancelSteps(1))
    await link.request(Inspect())
    await link.close()
    await service.lost.get()
    later.set_exception(ValueError("too late"))
    later.add_done_callback(lambda _: told.set_result(None))
    await told
    assert "a notice of worker:1" in caplog.text
    assert "too late" in caplog.text


async def test_a_cut_connection_that_stays_away_is_a_loss_on_both_sides(net, brittle):
    _, address, service = await net.serve(settings=brittle)
    relay = net.relay(address)
    _, caller = await net.open(relay.address, settings=brittle)
    relay.close()
    assert "connection broke" in (await caller.lost.get()).reason
    _, reason = await service.lost.get()
    assert "did not come back" in reason
    assert caller.lost.empty()


class Hasty:
    """A loop whose timers come a little before their time, as those of uvloop, which
    rounds to milliseconds, do now and then."""

    def __init__(self, loop):
        self._loop = loop

    def __getattr__(self, name):
        return getattr(self._loop, name)

    def call_at(self, when, callback, *args):
        return self._loop.call_at(when - 0.005, callback, *args)


async def test_a_loss_is_told_though_the_timer_came_early(net, brittle):
    _, address, _ = await net.serve(settings=brittle)
    relay = net.relay(address)
    link, caller = await net.open(relay.address, settings=brittle)
    link._loop = Hasty(link._loop)
    relay.close()
    assert "its connection broke" in (await caller.lost.get()).reason


async def test_a_deadline_is_told_though_the_timer_came_early(net):
    """And not at the next look at the connection, which is much later."""
    idle = Settings(timeouts=Timeouts(beat=60.0, liveness=300.0))
    _, address, _ = await net.serve(settings=idle)
    relay = net.relay(address)
    link, caller = await net.open(relay.address, settings=idle)
    await caller.opened.get()
    link._loop = Hasty(link._loop)
    with relay.blackholed():
        late = link._loop.time() + 0.05
        with pytest.raises(DeadlineExceededError):
            await asyncio.wait_for(link.request(Inspect(), deadline=late), 30)
        assert link._loop.time() >= late


async def test_a_half_open_connection_is_lost_by_silence_and_greets_again(net, swift):
    _, address, service = await net.serve(settings=swift)
    relay = net.relay(address)
    link, caller = await net.open(relay.address, settings=swift)
    await caller.opened.get()
    with relay.blackholed():
        waiting = link.submit(Inspect())
        with pytest.raises(PeerLostError):
            await waiting
        lost = await caller.lost.get()
        assert "silent" in lost.reason
        assert not lost.left
        assert "silent" in (await service.lost.get())[1]
    await caller.opened.get()
    assert await link.request(Inspect())


async def test_what_a_client_says_after_its_loss_loses_nothing(net, swift):
    """It connects again, and has not lost what it has there."""
    _, address, service = await net.serve(settings=swift)
    quiet = Settings(timeouts=Timeouts(beat=60.0, liveness=300.0, reconnect=30.0))
    link, caller = await net.open(address, settings=quiet)
    await caller.opened.get()
    _, reason = await service.lost.get()
    assert "silent" in reason
    link.notify(CancelSteps(1))
    await caller.opened.get()
    assert caller.lost.empty()


async def test_a_client_that_is_hasty_is_let_in_when_it_greets(net):
    _, address, _ = await net.serve()
    with Raw(address) as raw:
        raw.say(encode(Beat(False))[0])
        raw.say(greeting())
        assert (await raw.hear(Hello)).job == "ps"


async def refusal(link):
    """Why it is not let in: what it says of that once it has been told."""
    late, words = soon(20), ""
    while "is connected as the same task" not in words and soon(0) < late:
        with pytest.raises(DeadlineExceededError) as raised:
            await link.wait_open(soon(0.5))
        words = str(raised.value)
    return words


async def test_nobody_takes_the_place_of_a_task_that_is_here_and_answers(net):
    _, address, service = await net.serve()
    honest, told = await net.open(address, index=3)
    newcomers = [net.link(address, index=3)[0] for _ in range(3)]
    for newcomer in newcomers:
        words = await refusal(newcomer)
        for part in ("worker:3", "the same task, and answers", "pid"):
            assert part in words
    for _ in range(3):
        assert await honest.request(Inspect())
    assert service.lost.empty()
    assert told.lost.empty()
    # Whoever waits has the place as soon as it is free.
    for link in (honest, *newcomers[1:]):
        await link.close()
    await newcomers[0].wait_open(soon())
    assert await newcomers[0].request(Inspect())


async def test_a_newcomer_waits_until_a_silent_task_is_missed(net, swift):
    _, address, service = await net.serve(settings=swift)
    relay = net.relay(address)
    patient = replace(swift, timeouts=replace(swift.timeouts, liveness=60.0))
    await net.open(relay.address, index=3, settings=patient)
    with relay.blackholed():
        new, _ = net.link(address, index=3)
        await new.wait_open(soon())
        remote, reason = await service.lost.get()
        assert (remote.name, "silent" in reason) == ("worker:3", True)
    assert await new.request(Inspect())


async def test_who_broke_off_is_replaced_at_once_and_refused_when_it_returns(net):
    _, address, service = await net.serve()
    relay = net.relay(address)
    old, told = await net.open(relay.address, index=3)
    with relay.refusing():
        new, _ = await net.open(address, index=3)
        remote, reason = await service.lost.get()
        found = (remote.name, "replaced by a newer process" in reason)
        assert found == ("worker:3", True)
    await told.lost.get()
    with pytest.raises(ProtocolError, match="worker:3"):
        await old.wait_open(soon())
    assert await new.request(Inspect())
    assert service.lost.empty()


async def test_several_coordinators_and_links_of_one_process_are_served(net):
    _, address, service = await net.serve()
    same = new_incarnation()
    links = [
        (await net.open(address, job="chief", index=0, incarnation=which))[0]
        for which in (same, same, new_incarnation())
    ]
    for link in links:
        assert await link.request(Inspect())
    assert service.lost.empty()


async def test_refused_notices_are_counted_in_one_line(net, caplog):
    def refuse(remote, message):
        raise StaleSessionError("no such session")

    _, address, _ = await net.serve(handler=refuse)
    link, _ = await net.open(address)
    for session in range(100):
        link.notify(CancelSteps(session))
    with pytest.raises(StaleSessionError):
        await link.request(Inspect())  # behind them
    (line,) = [each for each in caplog.records if "a notice of" in each.message]
    assert "no such session" in line.message
    assert line.exc_info is None
