"""What a session asks of its parameter servers: one request each, in both forms."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from zstrat.errors import PSUnavailableError
from zstrat.variables import ComponentRows, VariableSpec
from zstrat.wire import (
    CreateVariables,
    Done,
    InitialEntry,
    InitializeVariables,
    Pulled,
    PullRows,
    Push,
    Pushed,
    UpdateOp,
)


class Scripted:
    """Takes the place of a fake server's handler, and answers what it may answer."""

    def __init__(self, task):
        self._before, self.asked = task.handle, []
        task.handle = self

    def __call__(self, message):
        match message:
            case PullRows():
                self.asked.append(message)
                rows = [np.outer(a, [1.0, 10.0]) for a in message.arrays]
                return Pulled([], tuple(rows))
            case Push():
                self.asked.append(message)
                return Pushed(True, [1] * len(message.updates))
            case InitializeVariables() | CreateVariables():
                self.asked.append(message)
                return Done()
        return self._before(message)


@pytest.fixture
def session(make_world):
    world = make_world(ps=2)
    session = world.connect()
    session.world = world
    session.asked = [Scripted(task).asked for task in world.ps]
    return session


def spec(key, ps, rows=4, part=None):
    return VariableSpec(key, f"v{key}", (rows, 2), "float64", ps, part=part)


def done(session, form, work):
    if form == "blocking":
        return session.run(work, "the test")
    return asyncio.run(session.run_async(work, "the test"))


PARTS = [(spec(1, 0), np.array([2, 3])), (spec(2, 1), np.array([0]))]
PARTS += [(spec(3, 0), np.array([], np.int64))]


@pytest.mark.parametrize("form", ["blocking", "async"])
def test_rows_of_many_variables_in_one_request_per_server(session, form):
    rows = done(session, form, session.servers.read_rows(PARTS))
    assert [r.tolist() for r in rows] == [[[2, 20], [3, 30]], [[0, 0]], []]
    assert rows[2].shape == (0, 2)
    assert [[m.rows for m in asked] for asked in session.asked] == [[[1, 3]], [[2]]]


@pytest.mark.parametrize("form", ["blocking", "async"])
def test_updates_of_many_variables_in_one_request_per_server(session, form):
    one, index = np.ones((1, 2)), np.array([3])
    updates = [
        (spec(1, 0), UpdateOp.OPTIMIZE_ROWS, 9, (index, one)),
        (spec(2, 1), UpdateOp.ASSIGN, 0, [np.zeros((4, 2))]),
        (spec(3, 0), UpdateOp.SCATTER_ADD, 0, [index, one]),
    ]
    done(session, form, session.servers.update(updates))
    (here,), (there,) = session.asked
    assert (here.step, here.part, here.writer) == (0, 0, session.session)
    assert [tuple(update) for update in here.updates] == [
        (1, UpdateOp.OPTIMIZE_ROWS, 9, 2),
        (3, UpdateOp.SCATTER_ADD, 0, 2),
    ]
    assert [array.tolist() for array in here.arrays] == [[3], [[1, 1]]] * 2
    assert [update.key for update in there.updates] == [2]


def initial(spec):
    shape = list(spec.shape)
    return spec, InitialEntry(
        spec.key, spec.name, True, True, spec.dtype, shape, shape, [0, 0]
    )


@pytest.mark.parametrize("form", ["blocking", "async"])
def test_servers_are_told_to_make_their_variables(session, form):
    entries = [initial(spec(key, key % 2)) for key in range(3)]
    done(session, form, session.servers.initialize_variables(entries, b"code"))
    (here,), (there,) = session.asked
    assert ([e.key for e in here.variables], here.code) == ([0, 2], b"code")
    assert there.variables == [entries[1][1]]


def test_large_tables_may_take_longer(session, monkeypatch):
    deadlines = []

    async def initialize(places, code, *, deadline):
        deadlines.append(deadline)

    monkeypatch.setattr(session.client, "initialize", initialize)
    huge = [initial(spec(key, key % 2, rows=2**27)) for key in range(3)]  # 2 GiB each
    for entries in (huge[:0], huge):
        work = session.servers.initialize_variables(entries, b"code")
        session.run(work, "initializing")
    usual, longer = deadlines
    # Two of them on one server, at 32 MiB a second at the least.
    assert longer - usual >= 2 * 64 - 1e-3  # times of a loop are rounded


def test_parts_are_created_as_such(session):
    part = ComponentRows("w", 0, 2, 0, 8)
    made = [(spec(1, 0, part=part), np.zeros((4, 2))), (spec(2, 0), np.zeros((4, 2)))]
    session.run(session.servers.create_variables(made), "creating variables")
    ((message,), _) = session.asked
    assert [entry.sharded for entry in message.variables] == [True, False]


def test_nothing_is_asked_when_a_server_is_lost(session):
    world = session.world
    world.on_loop(world.ps[1].kill)
    world.until(lambda: session.cluster.outage_error is not None)
    servers = session.servers
    works = [
        servers.read_rows(PARTS[:1]),
        servers.update([]),
        servers.initialize_variables([], b""),
    ]
    for work in works:
        with pytest.raises(PSUnavailableError, match="task:1"):
            session.run(work, "the test")
    with pytest.raises(PSUnavailableError, match="task:1"):
        _ = session.client
    assert session.asked == [[], []]


def test_coroutines_of_others_run_beside(session):
    async def rows(client):
        return await client.pull([], [])

    assert session.run(rows(session.client), "nothing") == []
    assert asyncio.run(session.run_async(rows(session.client), "nothing")) == []
