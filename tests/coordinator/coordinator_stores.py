"""Fake processes that serve stores, keep copies of them, and are told to move them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from coordinator_fakes import FakePs, World

from zstrat.config import Settings, Timeouts
from zstrat.coordinator import StoreServers, connect_session
from zstrat.errors import NotPrimaryError, UnavailableError
from zstrat.wire import (
    AskCopies,
    AttachBackup,
    CloseSession,
    CopiesReport,
    DetachBackup,
    Done,
    DropStore,
    Fence,
    HostStore,
    Inspect,
    MoveServer,
    OpenSession,
    PromoteBackup,
    Push,
    Statistics,
    StoreHosted,
)

REPLICATION = HostStore, DropStore, AttachBackup, DetachBackup, PromoteBackup


class StorePs(FakePs):
    """A process, or one of the copies that it keeps (``host``)."""

    def __init__(self, world, index, host=None):
        super().__init__(world, index)
        self.host = host or self
        self.links, self.orders, self.copies = [], [], []
        self.former = 0
        """What keys are counted from, of a program before that has left its name."""
        self.serves, self.is_whole = host is None, False
        self.refuses, self.refusal = (), UnavailableError("no memory")
        """Kinds of orders, and what is said to them."""
        self.slow = ()
        """Kinds of orders that it never ends."""
        self.answers_looks = True

    def handle(self, message):
        if isinstance(message, REPLICATION):
            self.orders.append(message)
            if isinstance(message, self.refuses + self.world.refusing):
                raise self.refusal
            if isinstance(message, self.slow):
                return None
        match message:
            case HostStore(store=store, view=view):
                copy = StorePs(self.world, store, self)
                copy.serves = message.serves
                copy.session = message.session if message.serves else None
                copy.is_whole = message.swaps
                address = f"ps{self.index}.{store}.{view}:1"
                self.world.tasks[address] = copy
                self.copies.append(copy)
                return StoreHosted(address, copy.hello.incarnation)
            case AttachBackup(address=address):
                self.world.tasks[address].is_whole = True
                return Done()
            case PromoteBackup():
                if not self.is_whole:
                    raise UnavailableError("not whole")
                self.serves, self.session = True, message.session
                return Done()
            case DropStore() | DetachBackup():
                return Done()
            case AskCopies():
                return CopiesReport([])
            case OpenSession():
                origin = self.former or message.origin or message.session
                return replace(super().handle(message), origin=origin)
            case CloseSession():
                answer, self.former = super().handle(message), 0
                return answer
            case Inspect() if not self.answers_looks:
                raise UnavailableError("it is asked in vain")
            case Inspect():
                return Statistics({})
            case Push() | Fence() if not self.serves:
                raise NotPrimaryError("another process serves")
        return super().handle(message)

    def kill(self, reason="killed", returns=0.0):
        """With all that its process keeps for others; it may say that it comes back."""
        self.alive = False
        for link in self.links:
            link.cut(reason, left=bool(returns), returns=returns)
        for copy in self.copies:
            copy.kill(reason, returns)

    def come_back(self, *, same=False):
        if not same:
            self.born()
            self.copies = []
        self.alive = True
        for each in (self, *self.copies):
            each.alive = True
            for link in each.links:
                if not link.is_closed and link.is_started:
                    link.connect(each.hello)


class StoresWorld(World):
    def __init__(self, ps=2, workers=1):
        super().__init__(ps, workers)
        self.refusing = ()
        """Kinds of orders that nobody takes."""
        self.ps = [StorePs(self, index) for index in range(ps)]
        for task in self.ps:
            self.tasks[f"ps{task.index}:1"] = task
        for worker in self.workers:
            _hear_moves(worker)

    def make_link(self, address, **options):
        link = super().make_link(address, **options)
        task = self.tasks[address]
        if isinstance(task, StorePs):
            task.links.append(link)
        return link

    def connect(self, *, replicas=1, stores_per_ps=1, resume="", **options):
        timeouts = Timeouts(connect=30.0, request=20.0, reconnect=0.0, turn=0.1)
        self.session = connect_session(
            self.spec,
            Settings(timeouts=timeouts, **options),
            replicas=replicas,
            stores_per_ps=stores_per_ps,
            resume=resume,
            make_link=self.make_link,
        )
        return self.session

    def newcomer(self, index):
        """A parameter server of which the session does not know."""
        task = StorePs(self, index)
        self.ps.append(task)
        self.tasks[f"ps{index}:1"] = task
        return task

    def changed(self, turns=8):
        """What follows on the loop is looked at, too."""
        super().changed()
        if turns:
            loop = asyncio.get_running_loop()
            loop.call_soon(self.changed, turns - 1)

    @property
    def replication(self):
        return self.session.cluster.replication

    @property
    def numbers_of(self):
        told = self.replication.status.statistics()
        return {name: told[name] for name in ("failovers", "stores_without_backup")}

    def paired(self):
        return self.numbers_of["stores_without_backup"] == 0

    def moves(self, worker=0):
        sent = self.workers[worker].moves
        return [(m.index, m.address) for m in sent]


def _hear_moves(worker):
    worker.moves = []

    @worker.wrap
    def hear(handle, message):
        if isinstance(message, MoveServer):
            worker.moves.append(message)
            return Done()
        return handle(message)


def connected(world, **options):
    """The parameter servers of a session that has begun, as its program sees them."""
    return StoreServers(world.connect(**{"replicas": 0, **options}))


def kinds(task):
    """What it was asked, but for what it need not keep."""
    asked = [order for order in task.orders if not isinstance(order, DropStore)]
    return [type(order) for order in asked]


def drops(task):
    """The stores whose copies it was told to drop."""
    return [order.store for order in task.orders if isinstance(order, DropStore)]


def served(world):
    """The process that serves each store."""
    return [store["process"] for store in world.session.cluster.moves.metrics["stores"]]


@pytest.fixture
def world():
    """In place of the `world` of ``conftest.py``, where a test file imports this."""
    made = StoresWorld()
    yield made
    made.close()
