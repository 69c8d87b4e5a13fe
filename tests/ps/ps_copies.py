"""A primary and its backup in this process, and the link between them."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import optax
from ps_callers import SESSION, caller

from zstrat.config import Settings
from zstrat.errors import PeerLostError
from zstrat.ps import PsService
from zstrat.testing import FakeLink, FakeRemote
from zstrat.wire import (
    AttachBackup,
    CreateVariables,
    Done,
    Job,
    OpenSession,
    PromoteBackup,
    Pull,
    Push,
    Read,
    Update,
    UpdateOp,
    VariableEntry,
)

JUMP = 2**40
"""By so much a version grows with a promotion."""
TASK = "/job:ps/task:0"
PRIMARY = 5
"""Its incarnation."""
OPTIMIZERS = {
    b"adam": lambda: optax.adam(0.1),
    b"momentum": lambda: optax.sgd(0.1, momentum=0.9),
}


class Talker(FakeRemote):
    """A primary as its backup sees it: notices go back over the link."""

    link: FakeLink

    def notify(self, message):
        if self.link.peer is None:
            raise PeerLostError(self.name, "it is not connected")
        self.link.say(message)


class Copies:
    """``primary`` of the session, and ``backup``, which knows nothing yet."""

    def __init__(self, name=""):
        self.chief = caller()
        self.links, self.talkers = [], []
        self.holds = False
        self.gate = threading.Event()
        """Open while the backup may load code."""
        self.gate.set()
        self.shipped = dict(OPTIMIZERS)
        self.made = []
        self.primary = self.service(connect=self.connect)
        opening = OpenSession(SESSION, 0, 1, [], name=name, replicas=int(bool(name)))
        self.primary.handle(self.chief, opening)
        self.host()

    def service(self, **options):
        made = PsService(
            load_code=self.load_late if "backup_of" in options else self.load,
            settings=Settings(),
            task=TASK,
            incarnation=PRIMARY,
            **options,
        )
        self.made.append(made)
        return made

    def load(self, code):
        made = self.shipped[code]
        return made() if code in OPTIMIZERS else made

    def load_late(self, code):
        assert self.gate.wait(60), "the test never opened the gate"
        return self.load(code)

    def break_optimizers(self, monkeypatch):
        """From now on they fail when they have begun to write."""
        engine = self.primary._store.engine

        def fail(value, *_):
            value.delete()
            raise RuntimeError("broken")

        for known in engine:
            programs = known.programs._programs
            for key, program in programs.items():
                monkeypatch.setitem(programs, key, replace(program, call=fail))

    def host(self, view=1):
        """Another empty backup."""
        self.backup = self.service(backup_of=(self.primary.owner, view, PRIMARY))
        self.incarnation = FakeRemote(Job.PS).hello.incarnation

    @property
    def link(self):
        return self.links[-1]

    def connect(self, address, *, on_notice, on_open, on_lost):
        talker = Talker(Job.PS, PRIMARY)
        backup = self.backup
        self.talkers.append(talker)
        talker.link = FakeLink(
            lambda message: backup.handle(talker, message),
            name=address,
            hello=FakeRemote(Job.PS, self.incarnation).hello,
            on_notice=on_notice,
            on_open=on_open,
            on_lost=on_lost,
        )
        if self.holds:
            talker.link.hold()
        self.links.append(talker.link)
        return talker.link

    async def ask(self, message, service=None, peer=None):
        """The answer; waits for it if need be."""
        return await self.outcome(
            (service or self.primary).handle(peer or self.chief, message)
        )

    async def outcome(self, answer):
        if answer is None or not hasattr(answer, "__await__"):
            return answer
        async with asyncio.timeout(60):
            return await answer

    async def attach(self, view=1):
        attach = AttachBackup(SESSION, view, "nowhere:1", self.incarnation)
        assert await self.ask(attach) == Done()

    async def promote(self, view=2):
        promote = PromoteBackup(SESSION, view)
        assert await self.ask(promote, self.backup) == Done()

    async def close(self):
        for service in self.made:  # those before these, too
            service.role.validate()
            assert await service.drain()
            service.role.validate()


def create(*keys, size=3):
    entries = [VariableEntry(key, f"v{key}", True, False) for key in keys]
    return CreateVariables(SESSION, entries, (np.zeros(size, "f4"),) * len(keys))


def push(step, key=0, value=1.0, size=3, op=UpdateOp.ADD):
    update = Update(key, op, 0, 1)
    return Push(SESSION, step, 0, 0, [update], (np.full(size, value, "f4"),))


def pull(key=0):
    return Pull(SESSION, [Read(key, -1)])


def later(copies, asked):
    return asyncio.ensure_future(copies.ask(asked))


async def turns():
    """So many that whatever can happen has happened."""
    for _ in range(20):
        await asyncio.sleep(0)
