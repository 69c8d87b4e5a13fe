"""What steps print reaches their coordinator: whole lines, in time, and not too many.

A print is what the worker's process calls for it (`Hear`), as no test is a daemon.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from zstrat.errors import BusyError
from zstrat.program import function
from zstrat.testing import FakeClock, FakeRemote
from zstrat.wire import Completions, Printed, PrintedText
from zstrat.worker import StepOutput

KiB = 1024


def printed(remote):
    return [t for m in remote.notices if isinstance(m, Printed) for t in m.texts]


def lines(remote):
    return "".join(text.text for text in printed(remote)).splitlines()


class Printing:
    """A session's output under a clock that stands still."""

    def __init__(self):
        self.remote, self.clock = FakeRemote(), FakeClock()
        self.output = StepOutput(5, self.remote, clock=self.clock)
        self.hear = self.output.hear

    async def sent(self):
        """What was sent up to now."""
        self.output._send()
        return printed(self.remote)


@pytest.fixture
async def printing():
    made = Printing()
    yield made
    made.output.close()


@pytest.mark.parametrize("size", [8 * KiB, 8 * KiB + 1, 16 * KiB, 20_000])
async def test_a_long_line_is_cut_and_no_empty_one_follows(printing, size):
    for word in ("x" * size, "\n", "next\n"):
        printing.hear(1, word)
    await printing.sent()
    *pieces, last = lines(printing.remote)
    assert ("".join(pieces), last) == ("x" * size, "next")
    assert [len(piece) for piece in pieces[:-1]] == [8 * KiB] * (len(pieces) - 1)
    assert 0 < len(pieces[-1]) <= 8 * KiB


async def test_lines_arrive_whole_in_order_and_by_stream(printing):
    for word in ("loss", " ", "0.5", "\n"):  # as print writes them
        printing.hear(1, word)
    printing.hear(2, "warned\nagain\n")
    printing.hear(1, "\n")
    assert await printing.sent() == [
        PrintedText(1, "loss 0.5\n", 0),
        PrintedText(2, "warned\nagain\n", 0),
        PrintedText(1, "\n", 0),
    ]


async def test_a_line_without_end_ends_with_its_step(printing):
    printing.hear(1, "half")
    assert await printing.sent() == []
    printing.output.end_lines()
    assert lines(printing.remote) == []
    assert await printing.sent() == [PrintedText(1, "half\n", 0)]


async def test_a_bar_is_lines(printing):
    for text in ("\r 0%", "\r50%", "\r99%\r\n", "\rdone\n"):
        printing.hear(2, text)
    await printing.sent()
    assert lines(printing.remote) == [" 0%", "50%", "99%", "done"]


async def test_what_is_too_much_is_dropped_and_counted_by_the_next_window(printing):
    for number in range(5000):
        printing.hear(1, f"{number}\n")
    await printing.sent()
    shown = lines(printing.remote)
    assert len(shown) == 1000
    assert shown == [str(number) for number in range(1000)]
    printing.clock.advance(1.0)
    printing.hear(1, "later\n")
    assert (await printing.sent())[-1] == PrintedText(1, "later\n", 4000)


async def test_what_a_step_had_too_much_is_told_at_its_end_once_in_a_window(printing):
    printing.hear(1, "x\n" * 5000)
    printing.output.end_lines()
    printing.hear(1, "more\n")
    printing.output.end_lines()
    assert [text.dropped for text in await printing.sent()] == [0, 4000]
    printing.clock.advance(1.0)
    printing.output._report()
    assert (await printing.sent())[-1] == PrintedText(1, "", 1)


async def test_what_waits_to_be_sent_is_bounded(printing):
    printing.hear(1, "x" * (1024 * KiB) + "\n")
    assert sum(len(text.text) for text in await printing.sent()) < 80 * KiB
    printing.clock.advance(1.0)
    printing.hear(2, "\U0001f600" * (1024 * KiB))
    *_, last = await printing.sent()
    assert 0 < len(last.text.encode()) < 100 * KiB
    for _ in range(1000):
        printing.hear(1, "." * 100)
    assert max(map(len, printing.output._begun.values())) <= 8 * KiB


async def test_text_that_is_no_unicode_can_be_sent(printing):
    printing.hear(1, "a\udc80b\n")
    assert await printing.sent() == [PrintedText(1, "a\\udc80b\n", 0)]


async def test_a_coordinator_that_does_not_read_is_told_how_much_it_missed(printing):
    printing.remote.refusals.append(lambda message: BusyError("it does not read"))
    printing.hear(1, "a\nb\n")
    assert await printing.sent() == []
    printing.clock.advance(1.0)
    printing.hear(1, "c\n")
    assert await printing.sent() == [PrintedText(1, "c\n", 2)]


class Process:
    """The streams of a worker: who hears them now."""

    hear = None

    def listen(self, hear):
        self.hear = hear

    def print(self, text):
        if self.hear is not None:
            self.hear(1, text)


async def opened_anew(world):
    """Another coordinator, after the first one is gone."""
    for service in (world.worker, *world.services):
        service.lost(world.remote, "it is gone")
    world.remote, world.seen = world.chief(), 0
    world.forget(*list(world.ends))
    await world.open(session=2000)


async def ran(world, body):
    return await world.once(function(body, eager=True))


@pytest.fixture
async def world(make_world):
    """Whose process is there, too."""
    process = Process()
    world = await make_world(listen=process.listen)
    world.process = process
    return world


async def test_what_a_step_printed_is_sent_before_its_completion(world):
    def step():
        world.process.print("printed\nhalf")
        return 7

    assert await ran(world, step) == 7
    sent = [m for m in world.remote.notices if isinstance(m, Printed | Completions)]
    *before, last = map(type, sent)
    assert (set(before), last) == ({Printed}, Completions)
    assert lines(world.remote) == ["printed", "half"]


async def test_dataset_functions_print_before_they_are_built(world):
    def maker():
        world.process.print("made")
        return [1, 2]

    await world.build(maker)
    assert lines(world.remote) == ["made"]


async def test_a_body_that_is_traced_twice_prints_once(world):
    value = world.variable(np.float32(1))
    traces = []

    @function
    def step():
        traces.append(world.process.print("traced\n"))
        # Read inside of what jax traces by itself: the body is traced again.
        return jax.lax.fori_loop(0, 1, lambda _, x: x + value.value(), 1.0)

    digest = await world.ship(step)
    assert await world.run(digest, [1, 2]) == [2, 2]
    assert len(traces) == 2
    assert lines(world.remote) == ["traced"]


async def test_nothing_is_sent_that_was_not_asked_for(world):
    world.listens = False
    await opened_anew(world)
    await ran(world, lambda: world.process.print("printed\n"))
    assert world.process.hear is None
    assert printed(world.remote) == []


async def test_the_next_session_does_not_hear_the_one_before(world):
    await ran(world, lambda: world.process.print("first\n"))
    before, left = world.remote, world.process.hear
    await opened_anew(world)
    left(1, "of the first, which still runs\n")
    await ran(world, lambda: world.process.print("second\n"))
    assert lines(before) == ["first"]
    assert lines(world.remote) == ["second"]
