"""Gradients in the format of a codec: a server applies what they stand for."""

import asyncio
import threading

import numpy as np
import optax
import pytest
from ps_callers import SESSION
from ps_rounds import Server, close, contribution, members

from zstrat.codecs import GRADIENT_BLOCK, ROW_BLOCK, decode_gradient, encode_gradient
from zstrat.errors import InvalidArgumentError, StaleSessionError
from zstrat.wire import (
    CODED,
    CloseSession,
    Codec,
    Contribute,
    Done,
    Exchange,
    Pull,
    PullRound,
    Push,
    Read,
    Update,
    UpdateOp,
)

CODECS = [codec for codec in Codec if codec is not Codec.NONE]
SHAPE = (40, 30)
LARGE = (1200, 900)
"""Decoded on the thread, not on the loop."""


@pytest.fixture
async def server():
    made = Server(optax.sgd(1.0))
    yield made
    assert await made.service.drain()


def coded(codec, shape, *, of_rows=False, seed=0):
    """A gradient, the arrays that stand for it, and its update."""
    gradient = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    block = ROW_BLOCK if of_rows else GRADIENT_BLOCK
    arrays = encode_gradient(codec, gradient, block=block, seed=1, density=0.1)
    means = decode_gradient(codec, shape, arrays, block)
    op = UpdateOp.OPTIMIZE
    if of_rows:
        op, arrays = UpdateOp.OPTIMIZE_ROWS, (np.arange(shape[0]) * 2, *arrays)
    return means, Update(0, op + CODED * codec, 1, len(arrays)), arrays


@pytest.mark.parametrize("shape", [SHAPE, LARGE])
@pytest.mark.parametrize("codec", CODECS)
async def test_a_push_applies_what_its_arrays_stand_for(server, codec, shape):
    await server.create({0: np.zeros(shape, np.float32)})
    means, update, arrays = coded(codec, shape)
    push = Push(SESSION, 3, 0, 0, [update], arrays)
    assert (await server.ask(push, server.worker)).applied
    assert not (await server.ask(push, server.worker)).applied
    assert np.array_equal(await server.value(), -means)


@pytest.mark.parametrize("codec", [Codec.BFLOAT16, Codec.INT8, Codec.E3M0])
async def test_rows(server, codec):
    await server.create({0: np.zeros(SHAPE, np.float32)})
    means, update, arrays = coded(codec, (7, SHAPE[1]), of_rows=True)
    push = Push(SESSION, 3, 0, 0, [update], arrays)
    assert (await server.ask(push, server.worker)).applied
    value = await server.value()
    assert np.array_equal(value[:14:2], -means)
    assert not value[1::2].any()


async def test_an_exchange_reads_what_it_pushed(server):
    await server.create({0: np.zeros(SHAPE, np.float32)})
    means, update, arrays = coded(Codec.INT4, SHAPE)
    asked = Exchange(SESSION, 3, 0, 0, [update], [Read(0, -1)], [], arrays)
    answer = await server.ask(asked, server.worker)
    assert answer.applied
    assert np.array_equal(answer.arrays[0], -means)


@pytest.mark.parametrize("shape", [SHAPE, LARGE])
async def test_a_round_merges_them(server, shape):
    await server.create({0: np.zeros(shape, np.float32)})
    found = [coded(Codec.INT8, shape, seed=seed) for seed in (1, 2)]
    asked = [
        server.later(Contribute(SESSION, [contribution(step)], [update], arrays))
        for step, (_, update, arrays) in enumerate(found)
    ]
    assert await asyncio.gather(*asked) == [Done(), Done()]
    assert await server.ask(close(0, members(0, 1))) == Done()
    mean = (found[0][0] + found[1][0]) / np.float32(2)
    assert np.array_equal(await server.value(), -mean)


@pytest.mark.parametrize(
    ("op", "count"),
    [
        (UpdateOp.OPTIMIZE + CODED * 99, 2),
        (UpdateOp.ADD + CODED * Codec.INT8, 2),
        (UpdateOp.OPTIMIZE + CODED * Codec.INT8, 1),
        (UpdateOp.OPTIMIZE + CODED * Codec.INT4, 2),
        (UpdateOp.OPTIMIZE_ROWS + CODED * Codec.INT8, 2),
    ],
)
async def test_what_does_not_fit_is_refused(server, op, count):
    await server.create({0: np.zeros(SHAPE, np.float32)})
    _, _, arrays = coded(Codec.INT8, SHAPE)
    push = Push(SESSION, 3, 0, 0, [Update(0, op, 1, count)], arrays[:count])
    with pytest.raises(InvalidArgumentError):
        await server.ask(push, server.worker)
    gradients = Contribute(SESSION, [contribution(3)], push.updates, push.arrays)
    with pytest.raises(InvalidArgumentError):
        await server.ask(gradients, server.worker)
    assert not (await server.value()).any()
    assert await server.waiting() == 0


async def test_complex_variables_have_no_format(server):
    await server.create({0: np.zeros(SHAPE, np.complex64)})
    _, update, arrays = coded(Codec.INT8, SHAPE)
    with pytest.raises(InvalidArgumentError, match="complex64"):
        await server.ask(Push(SESSION, 3, 0, 0, [update], arrays), server.worker)


@pytest.mark.parametrize("shape", [SHAPE, LARGE])
@pytest.mark.parametrize("in_round", [False, True])
async def test_values_are_read_as_bfloat16(server, shape, in_round):
    value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    await server.create({0: value, 1: value})
    reads = [Read(0, -1, Codec.BFLOAT16), Read(1, -1), Read(0, 0, Codec.BFLOAT16)]
    asked = PullRound(SESSION, [], reads, [], ()) if in_round else Pull(SESSION, reads)
    narrow, whole = (await server.ask(asked, server.worker)).arrays
    assert np.array_equal(narrow, value.astype(narrow.dtype))
    assert (narrow.dtype.name, narrow.nbytes) == ("bfloat16", value.nbytes / 2)
    assert np.array_equal(whole, value)


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [(Codec.INT8, np.float32), (Codec.BFLOAT16, np.float64), (99, "f")],
)
async def test_values_are_read_in_no_other_format(server, codec, dtype):
    await server.create({0: np.zeros(SHAPE, dtype)})
    with pytest.raises(InvalidArgumentError):
        await server.ask(Pull(SESSION, [Read(0, -1, codec)]), server.worker)


async def test_rows_are_never_the_largest_numbers_only(server):
    """A few bytes would stand for as many rows as there are indices."""
    await server.create({0: np.zeros(SHAPE, np.float32)})
    _, update, arrays = coded(Codec.TOP_K, (7, SHAPE[1]), of_rows=True)
    with pytest.raises(InvalidArgumentError):
        await server.ask(Push(SESSION, 3, 0, 0, [update], arrays), server.worker)


async def test_a_contribution_whose_session_ends_while_it_is_decoded(
    server, monkeypatch
):
    await server.create({0: np.zeros(LARGE, np.float32)})
    _, update, arrays = coded(Codec.INT8, LARGE)
    begun, closed = threading.Event(), threading.Event()

    def decode(*given):
        decoded = decode_gradient(*given)
        begun.set()
        assert closed.wait(60)
        return decoded

    monkeypatch.setattr("zstrat.codecs.decode_gradient", decode)
    gradients = Contribute(SESSION, [contribution(3)], [update], arrays)
    asked = server.later(gradients)
    await asyncio.to_thread(begun.wait, 60)
    server.service.handle(server.chief, CloseSession(SESSION, False))
    closed.set()
    with pytest.raises(StaleSessionError):
        await asked
