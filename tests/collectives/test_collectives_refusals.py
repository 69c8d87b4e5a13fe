"""What is refused, and in which words: by a task, by the lines to others, by calls."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from collectives_groups import ranks_of

import zstrat as zs
from zstrat.collectives import Choices, GroupNode, Pending
from zstrat.collectives.group import (
    GroupRuntime,
    GroupSeat,
    Mesh,
    RendezvousService,
    _rendezvous,
    _scheduler,
)
from zstrat.collectives.group._node import _formed
from zstrat.config import Settings
from zstrat.errors import (
    BusyError,
    ClosedError,
    CollectiveTimeoutError,
    DeadlineExceededError,
    PeerLostError,
    PermissionDeniedError,
    ProtocolError,
    StaleSessionError,
)
from zstrat.transport import hello
from zstrat.wire import AskCall, CallState, Job, JoinGroup, MemberEntry

STATE = CallState("", [], False, False)


def task(rank, incarnation=1, role=Job.WORKER):
    """What an endpoint knows of a task that is connected."""
    greeting = SimpleNamespace(incarnation=incarnation)
    return SimpleNamespace(hello=greeting, name=f"worker:{rank}", role=role)


def member(rank):
    """An entry of incarnation 1."""
    return MemberEntry(f"/job:worker/task:{rank}", f"h{rank}:1", "h", 1, 1, 0, 0, b"")


def joining(group, rank):
    return JoinGroup(group, 0, rank, 2, member(rank), 60.0)


def test_a_group_is_told_of_its_cluster_by_a_resolver():
    with pytest.raises(TypeError, match="ClusterResolver"):
        zs.collectives.Group("cluster.toml")


@pytest.mark.parametrize(
    ("role", "message", "error", "words"),
    [
        (Job.PS, joining("train", 1), PermissionDeniedError, "worker:1"),
        (Job.WORKER, STATE, ProtocolError, "CallState"),
        (Job.CHIEF, AskCall(5, 1), StaleSessionError, "worker:1"),
    ],
)
async def test_a_node(role, message, error, words):
    node = GroupNode(hello("worker", 0, 1), Settings())
    with pytest.raises(error, match=words):
        node.handle(task(1, role=role), message)
    await node.close("its test is over")


def test_an_answer_that_is_none():
    with pytest.raises(ProtocolError, match=r"rank 0.*JoinGroup.*CallState"):
        _formed(STATE)


async def test_somebody_else():
    desk = RendezvousService(asyncio.get_running_loop())
    with pytest.raises(ProtocolError, match="worker:1"):
        desk.join(task(1, incarnation=7), joining("train", 1))


async def test_too_many_groups(monkeypatch):
    monkeypatch.setattr(_rendezvous, "GROUPS", 1)
    desk = RendezvousService(asyncio.get_running_loop())
    waiting = desk.join(task(1), joining("train", 1))
    with pytest.raises(BusyError):
        desk.join(task(1), joining("evaluate", 1))
    with pytest.raises(BusyError):
        desk.open(joining("evaluate", 0), [GroupSeat("worker", 0, "")], Choices())
    assert not waiting.done()
    desk.close()
    waiting.cancel()


def test_a_runtime_whose_loop_has_ended():
    loop = asyncio.new_event_loop()
    loop.close()
    runtime = GroupRuntime(SimpleNamespace(loop=loop))
    with pytest.raises(ClosedError, match="'train'"):
        runtime.run(asyncio.sleep(0), 1.0, "leaving group 'train'")
    assert not runtime.call_soon(print)


def test_a_runtime_serves_groups_alone():
    with pytest.raises(ClosedError, match="CallState"):
        GroupRuntime(SimpleNamespace())._handle(task(1), STATE)


class Line:
    """A link that opens as a test says: to a task of this incarnation, or not."""

    def __init__(self, found):
        self.found = found

    def start(self):
        pass

    async def wait_open(self, deadline):
        if isinstance(self.found, Exception):
            raise self.found
        return SimpleNamespace(incarnation=self.found)


LATE = DeadlineExceededError("it does not answer")


@pytest.mark.parametrize(
    ("lines", "error", "words"),
    [
        ([1, 7], PeerLostError, r"rank 2.*/job:worker/task:2.*\b1\b"),
        ([LATE, LATE], CollectiveTimeoutError, r"'train'.*rank 1.*/job:worker/task:1"),
        ([1, ClosedError("it is closed")], ClosedError, "it is closed"),
    ],
)
async def test_a_mesh_that_cannot_be_opened(lines, error, words):
    found = iter(lines)
    mesh = Mesh(
        "train",
        0,
        [member(rank) for rank in range(3)],
        lambda seat, **_: Line(next(found)),
        on_lost=print,
        on_flushed=print,
    )
    with pytest.raises(error, match=words):
        await mesh.open(1.0)


def test_a_result_that_takes_longer():
    with pytest.raises(DeadlineExceededError, match=r"barrier\(\).*\b0\b"):
        Pending("barrier()").result(0)


def test_too_many_operations(monkeypatch):
    monkeypatch.setattr(_scheduler, "IN_FLIGHT", 2)
    with ranks_of(2) as ranks:
        groups = ranks.groups()
        pending = [groups[0].barrier_async() for _ in range(2)]
        words = r"\b2\b.*'group'.*\b0\b"
        with pytest.raises(BusyError, match=words):
            groups[0].barrier_async()
        for _ in range(2):
            groups[1].barrier()
        for each in pending:
            each.result(100)
        ranks.each(lambda group: group.barrier(), groups)
