"""Rounds on a server: contributions, what is made of them, and who waits for that."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from ps_callers import SESSION, caller
from ps_rounds import (
    RULES,
    Server,
    after,
    close,
    contribute,
    contribution,
    members,
    merge,
    merged,
)
from ps_trees import binding
from tiers import combined

from zstrat.errors import (
    BusyError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
    StaleSessionError,
    UnavailableError,
)
from zstrat.optimizers import delayed_nesterov
from zstrat.ps.store import _rounds
from zstrat.wire import (
    CloseSession,
    Contribute,
    DeleteVariables,
    Done,
    Fence,
    Job,
    OpenSession,
    Pull,
    RaiseMark,
    Read,
    RoundMember,
    StepRun,
    Update,
    UpdateOp,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (6, 2)
WEIGHTS = (1.0, 0.25, 3.0)


@pytest.fixture
async def server():
    made = Server()
    yield made
    assert await made.service.drain()


def random_array(rng, shape, dtype):
    found = rng.normal(size=shape)
    if dtype.kind == "c":
        found = found + 1j * rng.normal(size=shape)
    return np.asarray(found).astype(dtype)


def given_of(kind, rng, dtype, at):
    """A gradient of the ``at``-th step."""
    if kind == "dense" or (kind == "mixed" and at == 1):
        return random_array(rng, SHAPE, dtype)
    indices = (np.array([4, 0, 4]), np.array([1]), np.array([], np.int64))[at]
    return indices, random_array(rng, (len(indices), SHAPE[1]), dtype)


DTYPES = {
    "float32": ("f4", np.float64, 1e-6),
    "float64": ("f8", np.longdouble, 1e-14),
    "bfloat16": (BF16, np.float64, 2**-8),
    "float16": ("f2", np.float64, 2**-10),
    "complex64": ("c8", np.complex128, 1e-6),
}


@pytest.mark.parametrize(
    ("kind", "dtype", "rule"),
    combined(["dense", "rows", "mixed"], [*DTYPES], [*RULES], step=2),
)
async def test_gradients_are_merged_as_numpy_does(server, kind, dtype, rule):
    dtype, wide, close_to = DTYPES[dtype]
    rng, dtype = np.random.default_rng(3), np.dtype(dtype)
    await server.create({0: np.zeros(SHAPE, dtype), 1: np.zeros((), dtype)})
    given = [given_of(kind, rng, dtype, at) for at in range(3)]
    scalars = [random_array(rng, (), dtype) for _ in range(3)]
    for at, gradient in enumerate(given):
        await server.contribute(at + 1, {0: gradient, 1: scalars[at]})
    pairs = [*zip((1, 2, 3), WEIGHTS, strict=True)]
    found = await server.merged(0, members(*pairs), rule=rule)
    want = merge(rule, [*zip(WEIGHTS, given, strict=True)], SHAPE, wide)
    if kind == "rows":
        indices, rows = found[0]
        assert indices.tolist() == [0, 1, 4]
        want = want[indices]
    else:
        rows = found[0]
    assert rows.dtype == dtype
    np.testing.assert_allclose(rows.astype(wide), want, rtol=0, atol=4 * close_to)
    want = merge(rule, [*zip(WEIGHTS, scalars, strict=True)], (), wide)
    assert found[1].dtype == dtype
    assert found[1].shape == ()
    np.testing.assert_allclose(found[1].astype(wide), want, rtol=4 * close_to)
    assert await server.versions(0, 1) == [0, 0]
    assert await server.ask(close(0, members(*pairs), rule=rule)) == Done()
    moved = np.zeros(SHAPE, wide)
    moved[indices if kind == "rows" else ...] = rows.astype(wide)
    np.testing.assert_array_equal((await server.value()).astype(wide), -moved)


async def test_a_mean_of_float64_is_added_in_the_order_of_the_members(server):
    rng = np.random.default_rng(4)
    await server.create({0: np.zeros(50)})
    given = {step: rng.normal(size=50) * 10.0**step for step in (9, 2, 5, 7)}
    for step, gradient in given.items():
        await server.contribute(step, {0: gradient})
    found = await server.merged(0, members(2, 5, 7, 9))
    want = (((given[2] + given[5]) + given[7]) + given[9]) / 4
    np.testing.assert_array_equal(found[0], want)
    found = await server.merged(0, members(9, 7, 5, 2))
    want = (((given[9] + given[7]) + given[5]) + given[2]) / 4
    np.testing.assert_array_equal(found[0], want)


async def test_a_gradient_that_a_member_does_not_have_counts_as_zeros(server):
    await server.create({0: np.zeros(2), 1: np.zeros(2)})
    await server.contribute(1, {0: np.full(2, 6.0), 1: np.full(2, 3.0)})
    await server.contribute(2, {0: np.full(2, 3.0)})
    await server.contribute(3, {})  # has gradients of variables on other servers alone
    found = await server.merged(0, members(1, 2, 3))
    assert {key: each.tolist() for key, each in found.items()} == {
        0: [3.0, 3.0],
        1: [1.0, 1.0],
    }


@pytest.mark.parametrize("rule", [*RULES])
async def test_a_weight_of_0_takes_a_step_out(server, rule):
    """Its batch may be empty, and its mean not a number."""
    await server.create({0: np.zeros(2), 1: np.zeros(SHAPE)})
    bad = np.full((1, 2), np.nan)
    await server.contribute(1, {0: bad[0], 1: (np.array([2]), bad)})
    await server.contribute(
        2, {0: np.full(2, 5.0), 1: (np.array([3]), np.ones((1, 2)))}
    )
    found = await server.merged(0, members((1, 0.0), (2, 2.0)), rule=rule)
    factor = 2.0 if rule == "sum" else 1.0
    np.testing.assert_allclose(found[0], 5.0 * factor)
    indices, rows = found[1]
    assert indices.tolist() == [3]
    np.testing.assert_allclose(rows, 1.0 * factor)
    # And where all are out, nothing moves.
    assert await server.merged(0, members((1, 0.0), (2, 0.0)), rule=rule) == {}
    assert await server.ask(close(0, members((1, 0.0), (2, 0.0)), rule=rule)) == Done()
    assert await server.versions(0, 1) == [0, 0]
    assert await server.waiting() == 0


async def test_rda_keeps_the_mean_length_in_the_mean_direction(server):
    await server.create({0: np.zeros(2)})
    await server.contribute(1, {0: np.array([8.0, 0.0])})
    await server.contribute(2, {0: np.array([0.0, 2.0])})
    found = await server.merged(0, members(1, 2), rule="rda")
    np.testing.assert_allclose(found[0], 5.0 / np.sqrt(2) * np.ones(2))
    await server.contribute(3, {0: np.array([-8.0, 0.0])})
    found = await server.merged(0, members(1, 3), rule="rda")
    assert found[0].tolist() == [0.0, 0.0]  # no direction is left
    await server.contribute(4, {0: np.array([8.0, 0.0])})
    found = await server.merged(0, members(1, 4), rule="rda")
    assert found[0].tolist() == [8.0, 0.0]


async def test_rounds_without_members_may_be_skipped(server):
    await server.create({0: np.zeros(2)})
    await server.contribute(1, {0: np.ones(2)})
    assert await server.ask(close(6, [])) == Done()
    assert await server.ask(close(3, [])) == Done()  # it was closed with those
    assert not (await server.value()).any()
    with pytest.raises(ProtocolError):
        await server.ask(close(9, members(1)))
    assert await server.ask(close(7, members(1))) == Done()
    assert (await server.value()).all()


async def test_delayed_nesterov_runs_on_a_server():
    transformation = delayed_nesterov(0.1, momentum=0.9, period=2)
    server = Server(transformation)
    value = np.ones(3, np.float32)
    await server.create({0: value})
    state = transformation.init(value)
    for number in range(5):
        gradient = np.float32([number, 1.0, -2.0])
        await server.contribute(number + 1, {0: gradient})
        assert await server.ask(close(number, members(number + 1))) == Done()
        moved, state = transformation.update(gradient, state, value)
        value = optax.apply_updates(value, moved)
        np.testing.assert_allclose(await server.value(), value, rtol=1e-6)
    assert await server.service.drain()


async def test_a_round_is_one_update_of_the_optimizer():
    transformation = optax.adam(0.1)
    server = Server(transformation)
    rng = np.random.default_rng(5)
    value = {0: rng.normal(size=4).astype("f4")}
    await server.create(value)
    params, step = jnp.asarray(value[0]), 0
    state = transformation.init(params)
    for number in range(3):
        given = [rng.normal(size=4).astype("f4") for _ in range(3)]
        for gradient in given:
            step += 1
            await server.contribute(step, {0: gradient})
        assert await server.versions(0) == [number]
        named = members(step - 2, step - 1, step)
        assert await server.ask(close(number, named, over=step + 1)) == Done()
        assert await server.versions(0) == [number + 1]
        assert await server.waiting() == 0
        updates, state = jax.jit(transformation.update)(sum(given) / 3, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(await server.value(), params, rtol=1e-5)
    assert await server.service.drain()


async def test_the_newest_run_of_a_step_counts_whenever_it_comes(server):
    await server.create({0: np.zeros(1)})
    await server.contribute(1, {0: np.array([1.0])}, attempt=2)
    for attempt in (1, 2):  # late, or said twice
        await server.contribute(1, {0: np.array([100.0])}, attempt=attempt)
    found = await server.merged(0, members(1, attempt=2))
    assert found[0].tolist() == [1.0]
    await server.contribute(1, {0: np.array([7.0])}, attempt=3)
    assert await server.waiting() == 1
    with pytest.raises(NotFoundError, match=r"run 2 of step 1.*run 3"):
        await server.ask(close(0, members(1, attempt=2)))
    assert await server.versions(0) == [0]
    assert await server.ask(close(0, members(1, attempt=3))) == Done()
    assert (await server.value()).tolist() == [-7.0]


async def test_a_run_of_a_member_that_comes_later_is_dropped(server):
    """Of a worker that was taken for lost: the next program would count it again."""
    await server.create({0: np.zeros(2, np.float32)})
    await server.contribute(5, {0: np.ones(2, np.float32)}, attempt=2)
    await server.ask(close(0, members(5, attempt=2)))
    await server.contribute(5, {0: np.ones(2, np.float32)}, attempt=1)
    assert await server.waiting() == 0
    np.testing.assert_array_equal(await server.value(), [-1.0, -1.0])


async def test_a_contribution_of_a_step_that_is_over_is_dropped(server):
    await server.create({0: np.zeros(1)})
    await server.ask(RaiseMark(SESSION, 4))
    await server.ask(Fence(SESSION, 4, [StepRun(6, 8)], []))
    for step in (3, 6, 7):
        await server.contribute(step, {0: np.ones(1)})
    assert await server.waiting() == 0
    for step in (4, 5, 8):
        await server.contribute(step, {0: np.ones(1)})
    assert await server.waiting() == 3


async def test_a_contribution_waits_when_its_step_is_over(server):
    """It has ended, and its round has not."""
    await server.create({0: np.zeros(1)})
    await server.contribute(1, {0: np.ones(1)})
    await server.ask(RaiseMark(SESSION, 5))
    assert await server.ask(close(0, members(1))) == Done()
    assert (await server.value()).tolist() == [-1.0]


async def test_a_round_is_closed_once(server):
    await server.create({0: np.zeros(1)})
    for step in (1, 2):
        await server.contribute(step, {0: np.ones(1)})
    for _ in range(3):
        assert await server.ask(close(0, members(1))) == Done()
    assert (await server.value()).tolist() == [-1.0]
    assert await server.waiting() == 1
    # A repetition with other words changes nothing, either.
    assert await server.ask(close(0, members(1, 2), over=9)) == Done()
    assert await server.waiting() == 1
    assert await server.merged(0, members(2)) == {}
    for asked in (close(2, members(2)), merged(2, members(2))):
        with pytest.raises(ProtocolError, match=r"\b2\b.*\b1\b"):
            await server.ask(asked)
    with pytest.raises(ProtocolError, match=r"\b77\b"):
        await server.ask(of_rule(close(1, members(2)), 77))
    assert await server.ask(close(1, members(2))) == Done()
    assert await server.versions(0) == [2]


def of_rule(asked, rule):
    return replace(asked, order=asked.order._replace(rule=rule))


async def test_a_member_that_was_lost_is_named(server):
    """It would count as zeros here, and as its gradients elsewhere."""
    await server.create({0: np.zeros(1)})
    await server.contribute(1, {0: np.ones(1)})
    for asked in (merged(0, members(1, 2)), close(0, members(1, 2))):
        with pytest.raises(NotFoundError, match=r"run 1 of step 2 .*round 0"):
            await server.ask(asked)
    assert await server.versions(0) == [0]
    assert await server.ask(close(0, members(1))) == Done()
    assert (await server.value()).tolist() == [-1.0]


async def test_orders_that_come_together_close_a_round_once(server):
    await server.create({0: np.zeros(300_000)})  # it is merged on a thread
    await server.contribute(1, {0: np.ones(300_000)})
    orders = [asyncio.ensure_future(server.ask(close(0, members(1)))) for _ in range(3)]
    reading = asyncio.ensure_future(server.value())
    assert await asyncio.gather(*orders) == [Done()] * 3
    assert set((await reading).tolist()) == {-1.0}
    assert await server.versions(0) == [1]


async def test_what_is_kept_waits_and_what_is_over_goes(server):
    await server.create({0: np.zeros(1)})
    for step in (1, 2, 3, 4, 5):
        await server.contribute(step, {0: np.full(1, 10.0**step)})
    assert await server.ask(close(0, members(2), kept=[3], over=5)) == Done()
    # 1 and 4 came too late for their round, 5 has not ended.
    assert await server.waiting() == 2
    assert await server.ask(close(1, members(3, 5), over=6)) == Done()
    assert await server.waiting() == 0
    assert (await server.value()).tolist() == [-100.0 - (1e3 + 1e5) / 2]


async def test_a_round_without_members_changes_no_variable(server):
    await server.create({0: np.zeros(1)})
    assert await server.ask(close(0, [])) == Done()
    assert await server.versions(0) == [0]
    pulled = await server.ask(after(1, 0), server.worker)
    assert pulled.numbers == [1]


async def test_optimizers_have_rounds_of_their_own(server):
    await server.create({0: np.zeros(1)})
    await server.contribute(1, {0: np.ones(1)})
    assert await server.ask(close(0, [], optimizer=2)) == Done()
    assert (await server.ask(after(0, 0), server.worker)).numbers == [0]
    assert await server.ask(close(0, members(1))) == Done()
    assert await server.versions(0) == [1]


async def test_a_variable_that_was_deleted_is_left_out(server):
    await server.create({0: np.zeros(1), 1: np.zeros(1)})
    await server.contribute(1, {0: np.ones(1), 1: np.ones(1)})
    await server.ask(DeleteVariables(SESSION, [1]))
    assert await server.ask(close(0, members(1))) == Done()
    assert (await server.value()).tolist() == [-1.0]


# Who waits


async def test_a_pull_waits_for_its_round(server):
    await server.create({0: np.zeros(1)})
    await server.contribute(1, {0: np.ones(1)})
    await server.contribute(2, {0: np.full(1, 4.0)})
    first, second = server.later(after(1, 0)), server.later(after(2, 0))
    await asyncio.sleep(0)
    # No other request waits for it.
    assert (await server.value()).tolist() == [0.0]
    assert not first.done()
    await server.ask(close(0, members(1)))
    pulled = await first
    assert pulled.numbers == [1]
    assert pulled.versions == [1]
    assert pulled.arrays[0].tolist() == [-1.0]
    assert not second.done()
    await server.ask(close(1, members(2)))
    assert (await second).arrays[0].tolist() == [-5.0]
    pulled = await server.ask(after(1, 0), server.worker)  # does not wait
    assert pulled.numbers == [2]


async def test_a_pull_that_reads_nothing_waits_too(server):
    await server.create({0: np.zeros(1)})
    waiting = server.later(after(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    await server.ask(close(0, []))
    pulled = await waiting
    assert (pulled.numbers, pulled.versions, pulled.arrays) == ([1], [], ())


async def test_a_pull_that_is_cancelled_leaves_the_others_waiting(server):
    await server.create({0: np.zeros(1)})
    one, other = server.later(after(1, 0)), server.later(after(1, 0))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    await server.ask(close(0, []))
    assert (await other).numbers == [1]


async def test_a_pull_is_refused_when_its_session_ends(server):
    await server.create({0: np.zeros(1)})
    waiting = server.later(after(1, 0))
    await asyncio.sleep(0)
    await server.ask(CloseSession(SESSION, False))
    with pytest.raises(StaleSessionError):
        await waiting
    # The next session begins with its first round.
    other = caller(Job.CHIEF, 99)
    await server.ask(OpenSession(99, 0, 1, []), other)
    assert await server.waiting() == 0


async def test_a_pull_is_refused_when_its_server_shuts_down():
    server = Server()
    await server.create({0: np.zeros(1)})
    waiting = server.later(after(1, 0))
    await asyncio.sleep(0)
    assert await server.service.drain()
    with pytest.raises(UnavailableError):
        await waiting


# What is refused


def of_updates(updates, *arrays):
    return Contribute(SESSION, [contribution(1)], updates, arrays)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (contribute(1, {0: np.zeros(3)}), InvalidArgumentError),
        (contribute(1, {0: np.zeros(2, "f4")}), InvalidArgumentError),
        (contribute(1, {5: np.zeros(2)}), NotFoundError),
        (contribute(1, {0: np.zeros(2)}, optimizer=8), NotFoundError),
        (
            contribute(1, {0: np.zeros(2), 1: (np.array([6]), np.zeros((1, 2)))}),
            InvalidArgumentError,
        ),
        (contribute(1, {1: (np.array([-1]), np.zeros((1, 2)))}), InvalidArgumentError),
        (contribute(1, {1: (np.array([1]), np.zeros((2, 2)))}), InvalidArgumentError),
        (contribute(1, {1: (np.array([1]), np.zeros((1, 3)))}), InvalidArgumentError),
        (
            contribute(1, {1: (np.array([1.0]), np.zeros((1, 2)))}),
            InvalidArgumentError,
        ),
        (
            of_updates([Update(0, int(UpdateOp.ADD), 1, 1)], np.zeros(2)),
            InvalidArgumentError,
        ),
        (
            of_updates(
                [Update(0, int(UpdateOp.OPTIMIZE), 1, 1)] * 2, *[np.zeros(2)] * 2
            ),
            InvalidArgumentError,
        ),
        (
            of_updates([Update(0, int(UpdateOp.OPTIMIZE), 1, 1)], *[np.zeros(2)] * 2),
            InvalidArgumentError,
        ),
        (of_updates([Update(0, int(UpdateOp.OPTIMIZE), 1, 1)]), InvalidArgumentError),
        (of_updates([Update(0, int(UpdateOp.OPTIMIZE), 1, -1)]), InvalidArgumentError),
    ],
)
async def test_what_does_not_fit_is_refused_before_it_waits(server, asked, error):
    """The round could not be closed with it."""
    await server.create({0: np.zeros(2), 1: np.zeros(SHAPE)})
    with pytest.raises(error):
        await server.ask(asked, server.worker)
    assert await server.waiting() == 0


async def test_contributions_are_bounded(server):
    await server.create({0: np.zeros(())})
    many = [contribute(step, {0: np.ones(())}) for step in range(1, 10_000)]
    with pytest.raises(BusyError):
        await asyncio.gather(*[server.ask(each, server.worker) for each in many])
    # A run that comes again has its place already.
    await server.contribute(1, {0: np.ones(())}, attempt=2)
    waits = await server.waiting()
    named = [*members(*range(2, waits + 1)), RoundMember(1, 2, 1.0)]
    assert await server.ask(close(0, named)) == Done()
    assert await server.waiting() == 0
    assert (await server.value()).tolist() == -1.0


async def test_workers_close_no_rounds(server):
    await server.create({0: np.zeros(1)})
    with pytest.raises(PermissionDeniedError):
        await server.ask(close(0, []), server.worker)
    for asked in (contribute(1, {0: np.ones(1)}), merged(0, []), after(0, 0)):
        with pytest.raises(PermissionDeniedError):
            await server.ask(asked, caller(Job.PS, 9))


async def test_another_session_contributes_nothing(server):
    await server.create({0: np.zeros(1)})
    for asked in (contribute(1, {0: np.ones(1)}), merged(0, []), after(0, 0)):
        with pytest.raises(StaleSessionError):
            await server.ask(replace(asked, session=99), server.worker)
    assert (await server.ask(Pull(SESSION, [Read(0, -1)]))).versions == [0]


def test_what_an_update_needs_of_all_gradients_is_that_of_dense_ones():
    """By parts, by rows or not there, which counts as zeros."""
    rng = np.random.default_rng(0)
    tree = {
        "parts": ((1, 2), (5, 2), np.float32),
        "rows": ((3, 4), (6, 2), np.float32),
        "zeros": ((5,), (3,), np.float32),
    }
    told = binding(optax.clip_by_global_norm(1.0), tree)
    parts = rng.normal(size=(5, 2)).astype("f4")
    at, rows = np.array([2, 0, 1]), rng.normal(size=(3, 2)).astype("f4")
    given = {
        1: (parts[:3],),
        2: (parts[3:],),
        3: (at, rows),
        4: (np.array([1, 2]), parts[:2]),
    }
    operands = told.operands(given)
    norm = np.sqrt(sum(np.sum(np.square(each[-1])) for each in given.values()))
    assert any(np.allclose(operand, norm, rtol=1e-6) for operand in operands), operands
    first, second = np.zeros((2, 3, 2), np.float32)
    first[at], second[1:] = rows, parts[:2]
    dense = {**given, 3: (first,), 4: (second,), 5: (np.zeros(3, np.float32),)}
    for one, other in zip(operands, told.operands(dense), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_contribution_that_is_refused_is_kept_for_no_optimizer(monkeypatch):
    """Else the log, and so a backup, would lack what waits here."""
    monkeypatch.setattr(_rounds, "MAX_CONTRIBUTIONS", 1)
    rounds, engine = _rounds.OpenRounds("ps:0"), SimpleNamespace(get=lambda _: None)
    both = [contribution(2, optimizer=1), contribution(2, optimizer=2)]
    full = [contribution(1, optimizer=2)]
    assert rounds.contribute(Contribute(SESSION, full, [], ()), None, {}, engine)
    with pytest.raises(BusyError):
        rounds.contribute(Contribute(SESSION, both, [], ()), None, {}, engine)
    assert rounds.count == 1
