"""A cluster of fakes in one process: links without sockets, workers that obey the test.

Everything of a fake runs on the session's own loop thread; a test tells it what to do
with `World.on_loop` and waits with `World.until`. Messages pass through the codec.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.program as zs
from zstrat.cluster import ClusterSpec
from zstrat.config import Settings, Timeouts
from zstrat.coordinator import (
    ClusterCoordinator,
    CoordinatedStrategy,
    connect_session,
)
from zstrat.errors import (
    BusyError,
    HeldError,
    OutOfRangeError,
    StaleSessionError,
    to_wire,
)
from zstrat.program import BESIDE, StepIterator, Structure, fill_inputs, load
from zstrat.telemetry import Phase, PhaseSpan, SpanCapture
from zstrat.telemetry.timeline import columns_of
from zstrat.testing import FakeLink
from zstrat.wire import (
    PROTOCOL,
    AnswerReport,
    AskClock,
    BeginCapture,
    BuildResource,
    CancelSteps,
    Captured,
    ClockTime,
    CloseSession,
    Completion,
    Completions,
    Dispatch,
    Done,
    DropArguments,
    DropResources,
    DropResults,
    EndCapture,
    Fence,
    Fenced,
    Fetch,
    Fetched,
    Hello,
    Inspect,
    LayoutMessage,
    OpenSession,
    Outcome,
    Push,
    Pushed,
    PutArguments,
    PutCode,
    ResourceBuilt,
    SessionOpened,
    Statistics,
)

alone = pytest.mark.parametrize("world", [{"workers": 1}], indirect=True)
"""A world with one worker."""

INLINE = 1024
"""Larger results stay on the fake worker."""


@zs.function
def good():
    """A step that succeeds at once."""
    return jnp.float32(1)


async def cancelled(task):
    """Cancels an asyncio task, and waits for its end."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class FakeTask:
    """What a worker and a parameter server have in common."""

    job = ""

    def __init__(self, world, index):
        self.world, self.index = world, index
        self.link = None
        self.alive = True
        self.busy = False
        self.devices = 2
        self.sessions, self.exited, self.closed = [], False, False
        self.ahead = 0.0
        """Seconds that its clock is ahead of ours."""
        self.capturing, self.spans = [], []
        """Orders to capture spans, and what it has captured, by its clock."""
        self.refuses = ()
        """Kinds of messages."""
        self.born()

    def born(self):
        incarnation, self.session = next(self.world.numbers), None
        """Whose it is: none after it was born."""
        self.hello = Hello(PROTOCOL, self.job, self.index, incarnation, "test", 1, {})

    @property
    def now(self):
        return time.monotonic() + self.ahead

    def handle(self, message):
        if isinstance(message, self.refuses):
            raise BusyError(f"{self.job}:{self.index} is busy")
        match message:
            case AskClock():
                return ClockTime(self.now)
            case BeginCapture():
                self.capturing.append(message)
                return Done()
            case EndCapture():
                capture = SpanCapture(1000, self.now, lambda: (0, 0))
                capture.spans.extend(self.spans)
                phases, columns = columns_of(capture)
                return Captured(phases, False, "", "", tuple(columns))
            case OpenSession():
                if self.busy:
                    raise HeldError(f"{self.job}:{self.index} is taken")
                resumed, self.session = self.session == message.session, message.session
                self.sessions.append(message)
                return SessionOpened("cpu", self.devices, resumed)
            case CloseSession():
                if any(message.sent < opening.sent for opening in self.sessions):
                    raise StaleSessionError(f"{self.job}:{self.index} is open again")
                self.exited, self.closed = message.exit, True
                return Done()
            case Inspect():
                return Statistics({})
        raise AssertionError(message)

    def wrap(self, around):
        """A decorator: ``around(handle, message)`` answers from now on."""
        self.handle = partial(around, self.handle)
        return around

    def heard(self, kind, answers=True):
        """The messages of a kind that come from now on; they are not answered if the
        task only hears them."""
        heard = []

        @self.wrap
        def hear(handle, message):
            if isinstance(message, kind):
                heard.append(message)
                if not answers:
                    return None
            return handle(message)

        return heard

    def kill(self, reason="killed"):
        self.alive = False
        self.link.cut(reason)

    def leave(self):
        """Ends on purpose, with a goodbye."""
        self.alive = False
        self.link.cut("it left: it was shut down", left=True)

    def come_back(self, *, same=False):
        if not same:
            self.born()
        self.alive = True
        self.link.connect(self.hello)


class FakePs(FakeTask):
    job = "ps"

    def __init__(self, world, index):
        super().__init__(world, index)
        self.applied = set()
        """Steps of which it has applied a push."""
        self.fences = []
        self.silent = False
        """It answers no fence."""
        self.pushes, self.reads = [], True
        """Pushes that came; it answers them at once if it reads."""
        self.answers = []
        """To workers that have reported themselves."""

    def handle(self, message):
        if isinstance(message, Fence):
            if self.silent:
                return None
            self.fences.append(message)
            return Fenced([step for step in message.asked if step in self.applied])
        if isinstance(message, Push):
            self.pushes.append(message)
            return Pushed(True, [1]) if self.reads else None
        if isinstance(message, AnswerReport):
            self.answers.append(message)
            self.world.changed()
            return Done()
        return super().handle(message)

    def answer_pushes(self):
        """On the loop: what waits is answered."""
        for future in self.link.requests:
            if not future.done():
                future.set_result(Pushed(True, [1]))


class FakeWorker(FakeTask):
    """Runs the bodies of step functions on numpy arrays, when the test lets it."""

    job = "worker"

    def __init__(self, world, index):
        super().__init__(world, index)
        self.held = False
        """Closures wait for `work`."""
        self.dies_of = ()
        """Names of functions that kill it."""
        self.deaf = False
        """What it completes is not told."""
        self.replies = {}
        self.ran, self.low_waters = [], []
        self.built = []
        """Orders to build resources, as they came."""
        self.described = []
        """Layouts told since the session was opened; each is told once."""

    def born(self):
        super().born()
        self.code, self.arguments, self.resources = {}, {}, {}
        self.queue, self.kept = [], {}

    def handle(self, message):
        match message:
            case OpenSession():
                self.described = []
            case PutCode():
                self.code[message.digest] = load(message.code)
                return Done()
            case PutArguments():
                self.arguments[message.arguments] = message
                return None
            case DropArguments():
                for number in message.arguments:
                    del self.arguments[number]
                return None
            case BuildResource():
                return self._build(message)
            case DropResources():
                for number in message.resources:
                    self.resources.pop(number)
                return None
            case DropResults():
                for step in message.steps:
                    self.kept.pop(step)
                return None
            case Fetch():
                return Fetched(tuple(self.kept[message.step]))
            case CancelSteps():
                dropped, self.queue = self.queue, []
                self.tell([(step, Outcome.CANCELLED, None) for *_, step in dropped])
                return None
            case Dispatch():
                self.low_waters.append(message.low_water)
                inputs, beside = message.inputs, list(message.arrays)
                for batch in message.batches:
                    function, attempt = batch.function, batch.attempt
                    for step in batch.steps:
                        if batch.size >= BESIDE:
                            mine = beside.pop(0).tobytes()
                        else:
                            mine = inputs[: batch.size]
                            inputs = inputs[batch.size :]
                        assert len(mine) == batch.size
                        given = batch.arguments, mine
                        self.queue.append((function, given, attempt, step))
                assert not inputs
                assert not beside
                if not self.held:
                    self.work()
                return None
        return super().handle(message)

    def _build(self, message):
        self.built.append(message)
        maker = self.code[message.maker]
        made = maker()
        if message.purpose == "value":
            self.resources[message.resource] = made
            return ResourceBuilt(LayoutMessage(0, [], [], None))
        elements = iter(made)
        if (first := next(elements, None)) is None:
            raise OutOfRangeError("End of sequence")
        self.resources[message.resource] = StepIterator(
            itertools.chain([first], elements)
        )
        leaves, treedef = jax.tree.flatten(first)
        return ResourceBuilt(layout_of(0, treedef, [np.asarray(x) for x in leaves]))

    def begin(self):
        """Begins its first closure, which no cancellation finds."""
        self.begun = self.queue.pop(0)
        return self.begun

    def finish(self):
        """Ends the closure that it has begun."""
        self.queue.insert(0, self.begun)
        self.work(1)

    def work(self, count=None):
        """Runs what waits, at most ``count`` closures."""
        outcomes = []
        while self.queue and count != 0:
            count = None if count is None else count - 1
            digest, given, attempt, step = self.queue.pop(0)
            function = self.code[digest]
            if function.name.split(".")[-1] in self.dies_of:
                self.kill("crashed")
                return
            self.ran.append((step, attempt))
            outcomes.append((step, *self._run(function, *given)))
        self.tell(outcomes)

    def _run(self, function, arguments, inputs):
        args, kwargs = (), {}
        if arguments:
            shipped = self.arguments[arguments]
            args, kwargs = load(
                shipped.code, shipped.arrays, self.resources.__getitem__
            )
        args, kwargs = fill_inputs((args, kwargs), inputs)
        try:
            return Outcome.OK, function.body(*args, **kwargs)
        except Exception as error:  # what the closure raises
            return Outcome.FAILED, error

    def tell(self, outcomes):
        completions, layouts, results = [], [], b""
        for step, outcome, value in outcomes:
            if outcome is not Outcome.OK:
                error = None if value is None else to_wire(value)
                completions.append(Completion(step, outcome, 0, 0, error))
                continue
            leaves, treedef = jax.tree.flatten(value)
            leaves = [np.asarray(leaf) for leaf in leaves]
            layout = layout_of(0, treedef, leaves)
            if layout not in self.described:
                self.described.append(layout)
                layouts.append(layout._replace(layout=len(self.described)))
            number = self.described.index(layout) + 1
            data = b"".join(leaf.tobytes() for leaf in leaves)
            size = len(data)
            if size > INLINE:
                self.kept[step], size, data = leaves, -1, b""
            completions.append(Completion(step, outcome, number, size, None))
            results += data
        if completions and not self.deaf:
            session = self.sessions[-1].session
            self.link.say(Completions(session, completions, layouts, results))


def note_step(world, step):
    """On the loop: the first worker has run the step, and the ps has applied it, just
    now; a microsecond for each, so that none overlaps with that of another step."""
    worker, ps = world.workers[0], world.ps[0]
    now, there = worker.now + 1e-5 * step, ps.now + 1e-5 * step
    worker.spans += [
        PhaseSpan(step, Phase.COMPUTE, now, now + 1e-6),
        PhaseSpan(step, Phase.PUSH, now + 1e-6, now + 4e-6),
    ]
    ps.spans.append(PhaseSpan(step, Phase.APPLY, there + 2e-6, there + 3e-6))


def layout_of(number, treedef, leaves):
    return LayoutMessage(
        number,
        [leaf.dtype.name for leaf in leaves],
        [list(leaf.shape) for leaf in leaves],
        Structure(treedef, tuple(range(len(leaves)))).plain,
    )


class World:
    """All fake tasks, and the session that was connected to them."""

    def __init__(self, ps=1, workers=2):
        self.numbers = itertools.count(1)
        self.ps = [FakePs(self, index) for index in range(ps)]
        self.workers = [FakeWorker(self, index) for index in range(workers)]
        self.tasks = {f"ps{t.index}:1": t for t in self.ps}
        self.tasks |= {f"worker{t.index}:1": t for t in self.workers}
        self.spec = ClusterSpec(
            {
                job: [
                    address for address, task in self.tasks.items() if task.job == job
                ]
                for job in ("ps", "worker")
            }
        )
        self.session = None
        self.reconnect = 0.0
        """How long a lost parameter server may come back before that is told."""
        self._waiting = []

    def newcomer(self, address, index=None):
        """A worker that listens there, and of which the session does not know."""
        worker = FakeWorker(self, len(self.workers) if index is None else index)
        self.workers.append(worker)
        self.tasks[address] = worker
        return worker

    def make_link(self, address, *, name, expect, **events):
        task = self.tasks[address]
        link = FakeLink(
            lambda message: task.handle(message),
            name=name,
            address=address,
            hello=task.hello if task.alive else None,
            on_change=self.changed,
            **events,
        )
        if task.link is None or not task.link.is_open:
            task.link = link
        asyncio.get_running_loop().call_soon(self.changed)
        return link

    def connect(self, connect=30.0, prefetch=0, turn=20.0, patience=5.0):
        timeouts = Timeouts(
            connect=connect,
            request=20.0,
            reconnect=self.reconnect,
            turn=turn,
            liveness=patience,
        )
        settings = Settings(timeouts=timeouts, prefetch=prefetch)
        self.session = connect_session(self.spec, settings, make_link=self.make_link)
        return self.session

    def coordinator(self, **options):
        if self.session is None:
            self.connect()
        self.strategy = FakeStrategy(self.session)
        coordinator = ClusterCoordinator(self.strategy, **options)
        coordinator._core.engine.waiters.watchers = Watchers(self)
        return coordinator

    def on_loop(self, function, *args, **kwargs):
        async def call():
            return function(*args, **kwargs)

        return self.session.portal.run(call(), 20.0, "the test")

    def read(self, specs):
        """The values, from the parameter servers."""
        return self.session.run(self.session.servers.read(specs), "the test")

    def update(self, updates):
        """Blocks until the parameter servers have applied these."""
        self.session.run(self.session.servers.update(updates), "the test")

    async def update_async(self, updates):
        await self.session.run_async(self.session.servers.update(updates), "the test")

    def until(self, predicate):
        """Blocks until the predicate holds, seen from the loop."""

        async def wait():
            if predicate():
                return
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((predicate, future))
            await future

        self.session.portal.run(wait(), 20.0, "waiting for the fakes")

    def hold(self):
        """On the loop: closures that come to a worker wait there."""
        for worker in self.workers:
            worker.held = True

    def held(self, coordinator, count=1, running=None):
        """The values of so many steps, of which workers hold all, or ``running``."""
        self.on_loop(self.hold)
        values = [coordinator.schedule(good) for _ in range(count)]
        self.until(lambda: self.running == (running or count))
        return values

    def release(self):
        """On the loop: they run."""
        for worker in self.workers:
            worker.held = False
            worker.work()

    def lose_ps(self, reason="killed"):
        """Kills the first server, and waits until the program knows of it."""
        self.on_loop(self.ps[0].kill, reason)
        self.until(lambda: self.session.cluster.outage_error)
        return self.ps[0]

    def kill_workers(self, reason="killed"):
        """On the loop."""
        for worker in self.workers:
            worker.kill(reason)

    @property
    def running(self):
        return sum(len(worker.queue) for worker in self.workers)

    def changed(self):
        for predicate, future in self._waiting:
            if not future.done() and predicate():
                future.set_result(None)

    def close(self):
        if self.session is not None:
            if not self.session.portal.is_closed:
                self.on_loop(self._validate, self.session.cluster)
            self.session.close()

    def _validate(self, cluster):
        """Each session with a task, and each store, is in a state that there can be."""
        tasks = [*cluster.ps, *cluster.workers]
        if cluster.replication is not None:
            tasks += cluster.replication.processes
            cluster.replication.placement.validate()
        for task in tasks:
            task.validate()


class Watchers(dict):
    """Those who wait for the engine; a test may wait until somebody does."""

    def __init__(self, world):
        super().__init__()
        self.world = world

    def __setitem__(self, bell, ready):
        super().__setitem__(bell, ready)
        self.world.session.portal.call_soon(self.world.changed)


class FakeStrategy(CoordinatedStrategy):
    def __init__(self, session):
        self._session = session

    @property
    def session(self):
        return self._session

    def scope(self):
        return contextlib.nullcontext()

    def require_known(self, plan):
        pass

    def __reduce__(self):
        return FakeStrategy, (None,)
