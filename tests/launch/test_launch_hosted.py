"""Processes of parameter servers that keep copies for each other, over sockets."""

import asyncio
import contextlib
import socket

import numpy as np
import pytest

from zstrat.config import Settings, Timeouts
from zstrat.errors import (
    InvalidArgumentError,
    NotPrimaryError,
    PermissionDeniedError,
    StaleSessionError,
    UnavailableError,
)
from zstrat.launch import TaskAddress, serve
from zstrat.transport import Link, Security, generate_keys, hello
from zstrat.wire import (
    AttachBackup,
    BackupLost,
    CloseSession,
    CreateVariables,
    DetachBackup,
    Done,
    DropStore,
    HostStore,
    Inspect,
    Job,
    OpenLog,
    OpenSession,
    PromoteBackup,
    Pull,
    Push,
    Read,
    Update,
    UpdateOp,
    VariableEntry,
)

SESSION = 7
WAIT = 60


class World(contextlib.AsyncExitStack):
    """Two parameter servers of which ``links`` of a coordinator have the session."""

    def __init__(self, keys=None, bind="127.0.0.1:0", state=None):
        super().__init__()
        timeouts = Timeouts(reconnect=0.2)
        self.settings = Settings(timeouts=timeouts, keys=keys, state=state)
        self.binds = bind if isinstance(bind, list) else [bind] * 2
        self.notices, self.losses = asyncio.Queue(), asyncio.Queue()

    async def __aenter__(self):
        await super().__aenter__()
        self.tasks = [
            await self.enter_async_context(
                serve(TaskAddress("ps", index, bind), self.settings)
            )
            for index, bind in enumerate(self.binds)
        ]
        self.links = [
            await self.link(task.address, index)
            for index, task in enumerate(self.tasks)
        ]
        for link in self.links:
            await self.ask(link, OpenSession(SESSION, 0, 1, []))
        return self

    async def link(self, address, index, role="chief"):
        keys = self.settings.keys
        link = Link(
            address,
            hello(role, 0, SESSION),
            name=f"ps {index}",
            settings=self.settings,
            on_notice=self.notices.put_nowait,
            on_lost=self.losses.put_nowait,
            security=None if keys is None else Security.load(keys, role),
            expect=("ps", index),
        )
        link.start()
        self.push_async_callback(link.close)
        await link.wait_open(asyncio.get_running_loop().time() + WAIT)
        return link

    async def ask(self, link, message):
        async with asyncio.timeout(WAIT):
            return await link.request(message)

    async def create(self):
        entries = [VariableEntry(key, f"v{key}", True, False) for key in (0, 1)]
        values = np.zeros(3, "f4"), np.zeros((20_000, 64), "f4")
        await self.ask(self.links[0], CreateVariables(SESSION, entries, values))

    async def host(self, on=1, store=0, view=1, primary=None, **options):
        if primary is None:
            primary = self.tasks[store].hello.incarnation
        asked = HostStore(SESSION, store, view, primary=primary, **options)
        return await self.ask(self.links[on], asked)

    async def attach(self, primary, hosted, view=1, beside=False):
        where = hosted.address, hosted.incarnation
        asked = AttachBackup(SESSION, view, *where, beside)
        assert await self.ask(primary, asked) == Done()

    async def backed(self):
        """Creates variables on the first process, and their copy on the second."""
        await self.create()
        hosted = await self.host()
        await self.attach(self.links[0], hosted)
        return hosted

    async def promote(self, hosted, view, *backup):
        """The copy, which serves from now on."""
        copy = await self.link(hosted.address, 0)
        promote = PromoteBackup(SESSION, view, *backup)
        assert await self.ask(copy, promote) == Done()
        assert (await self.ask(copy, OpenSession(SESSION, 0, 1, []))).resumed
        return copy


def push(step):
    updates = [Update(0, UpdateOp.ADD, 0, 1), Update(1, UpdateOp.SCATTER_ADD, 0, 2)]
    rows = np.array([step % 20_000, 7]), np.ones((2, 64), "f4")
    return Push(SESSION, step, 0, 0, updates, (np.ones(3, "f4"), *rows))


PULL = Pull(SESSION, [Read(0, -1), Read(1, -1)])


def folder(tmp_path, kind):
    if kind == "none":
        return None
    counts = {Job.PS: 2, Job.WORKER: 1} if kind == "per task" else {}
    generate_keys(tmp_path / "keys", counts)
    return tmp_path / "keys"


@pytest.mark.parametrize("kind", ["none", "roles", "ipc"])
async def test_a_store_goes_on_in_another_process(tmp_path, kind):
    bind = "127.0.0.1:0"
    if kind == "ipc":
        tmp_path.chmod(0o700)
        bind = [f"ipc://{tmp_path}/{index}" for index in range(2)]
    keys = folder(tmp_path, "roles" if kind == "roles" else "none")
    async with World(keys, bind) as world:
        await world.create()
        home, _ = world.links
        hosted = await world.host()
        assert await world.host() == hosted
        pushing = [world.ask(home, push(step)) for step in range(50)]
        answers = asyncio.gather(*pushing)
        await world.attach(home, hosted)
        await answers
        before = await world.ask(home, PULL)
        copy = await world.link(hosted.address, 0)
        assert await world.ask(copy, PromoteBackup(SESSION, 2)) == Done()
        opened = await world.ask(copy, OpenSession(SESSION, 0, 1, []))
        assert opened.resumed
        after = await world.ask(copy, PULL)
        np.testing.assert_equal(before.arrays, after.arrays)
        assert not (await world.ask(copy, push(49))).applied
        assert (await world.ask(copy, push(50))).applied
        with pytest.raises(NotPrimaryError):
            await world.ask(home, push(51))
        # What was the primary keeps the next copy, beside what it does not serve.
        assert await world.ask(home, DropStore(SESSION, 0, 2)) == Done()
        again = await world.host(on=0, view=3, primary=hosted.incarnation)
        await world.attach(copy, again, view=3)
        assert (await world.ask(copy, push(51))).applied
        values = (await world.ask(home, Inspect())).values
        assert values["service"]["replication"]["role"] == "replaced"
        (kept,) = values["copies"]
        assert (kept["store"], kept["address"]) == (0, again.address)
        assert kept["replication"]["whole"]


async def test_a_third_copy_is_the_backup_when_it_is_whole_and_has_heard_so():
    async with World(bind=["127.0.0.1:0"] * 3) as world:
        home = world.links[0]
        await world.backed()
        third = await world.host(on=2, view=2, beside=True)
        pushing = asyncio.gather(*(world.ask(home, push(step)) for step in range(20)))
        await world.attach(home, third, view=2, beside=True)
        await pushing
        copy = await world.link(third.address, 0)
        with pytest.raises(InvalidArgumentError):
            await world.ask(copy, PromoteBackup(SESSION, 3))
        await world.ask(home, push(20))
        await world.attach(home, third, view=3)
        assert await world.ask(world.links[1], DropStore(SESSION, 0, 3)) == Done()
        await world.ask(home, push(21))  # the one before is not waited for
        before = await world.ask(home, PULL)
        copy = await world.promote(third, 4)
        after = await world.ask(copy, PULL)
        np.testing.assert_equal(before.arrays, after.arrays)
        applied = [(await world.ask(copy, push(n))).applied for n in (19, 21, 22)]
        assert applied == [False, False, True]


async def test_a_third_copy_that_is_lost_leaves_the_backup():
    async with World(bind=["127.0.0.1:0"] * 3) as world:
        home = world.links[0]
        first = await world.backed()
        third = await world.host(on=2, view=2, beside=True)
        await world.attach(home, third, view=2, beside=True)
        await world.ask(world.links[2], DropStore(SESSION, 0, 2))
        assert (await world.ask(home, push(0))).applied
        copy = await world.promote(first, 3)
        assert not (await world.ask(copy, push(0))).applied


async def test_a_primary_swaps_with_its_backup_and_either_may_be_lost():
    async with World() as world:
        home = world.links[0]
        backup = await world.backed()
        pushing = asyncio.gather(*(world.ask(home, push(step)) for step in range(20)))
        await pushing
        before = await world.ask(home, PULL)
        swaps = {"on": 0, "view": 2, "primary": backup.incarnation, "swaps": True}
        kept = await world.host(**swaps)
        assert await world.host(**swaps) == kept
        with pytest.raises(NotPrimaryError):
            await world.ask(home, push(20))
        primary = await world.promote(backup, 3, kept.address, kept.incarnation)
        after = await world.ask(primary, PULL)
        assert (await world.ask(primary, push(20))).applied
        values = (await world.ask(home, Inspect())).values
        assert values["service"]["variables"] == 0
        (copy,) = values["copies"]
        assert (copy["address"], copy["replication"]["whole"]) == (kept.address, True)
        # What it acknowledged is in the other one.
        await world.ask(world.links[1], DropStore(SESSION, 0, 3))
        copy = await world.promote(kept, 4)
        applied = [(await world.ask(copy, push(n))).applied for n in (19, 20, 21)]
        assert applied == [False, False, True]
        np.testing.assert_equal(before.arrays, after.arrays)


async def test_a_server_whose_backup_is_lost_as_they_swap_serves_on():
    async with World() as world:
        home = world.links[0]
        backup = await world.backed()
        await world.ask(world.links[1], DropStore(SESSION, 0, 1))
        waiting = asyncio.ensure_future(world.ask(home, push(0)))
        with pytest.raises(UnavailableError):
            await world.host(on=0, view=2, primary=backup.incarnation, swaps=True)
        assert await world.ask(home, DetachBackup(SESSION, 3)) == Done()
        assert (await waiting).applied
        assert (await world.ask(home, push(1))).applied


async def test_a_backup_that_is_dropped_is_told_to_the_coordinator():
    async with World() as world:
        await world.backed()
        await world.ask(world.links[1], DropStore(SESSION, 0, 1))
        waiting = asyncio.ensure_future(world.ask(world.links[0], push(0)))
        async with asyncio.timeout(WAIT):
            lost = await world.notices.get()
        assert isinstance(lost, BackupLost)
        assert not waiting.done()
        again = await world.host(view=2)
        await world.attach(world.links[0], again, view=2)
        assert (await waiting).applied


async def test_copies_end_with_their_session():
    async with World() as world:
        hosted = await world.backed()
        await world.link(hosted.address, 0, role="observer")
        await world.ask(world.links[1], CloseSession(SESSION, False))
        async with asyncio.timeout(WAIT):
            assert "session is over" in str(await world.losses.get())
        assert world.tasks[1].statistics()["copies"] == []


async def test_who_may_not_have_a_copy_kept():
    async with World() as world:
        hosted = await world.host(view=2)
        other = world.links[1]
        with pytest.raises(StaleSessionError):
            await world.host(view=1)
        with pytest.raises(StaleSessionError):
            await world.ask(other, DropStore(SESSION, 0, 1))
        with pytest.raises(StaleSessionError):
            await world.ask(other, HostStore(SESSION + 2, 0, 9))
        worker = await world.link(world.tasks[1].address, 1, role="worker")
        with pytest.raises(PermissionDeniedError, match="HostStore"):
            await world.ask(worker, HostStore(SESSION, 0, 9))
        emptied = await world.host(view=3)
        assert emptied.incarnation != hosted.incarnation
        assert await world.ask(other, DropStore(SESSION, 5, 1)) == Done()


async def test_a_copy_takes_changes_from_the_process_that_was_named_alone():
    """Another one with the key of a server knows session, view and address."""
    async with World() as world:
        hosted = await world.host()
        other = await world.link(hosted.address, 0, role="ps")
        with pytest.raises(PermissionDeniedError):
            await world.ask(other, OpenLog(SESSION, 1))
        await other.close()
        await world.attach(world.links[0], hosted)


async def test_keys_of_single_tasks_are_refused(tmp_path):
    async with World(folder(tmp_path, "per task")) as world:
        with pytest.raises(PermissionDeniedError, match="replicas="):
            await world.host()


@pytest.mark.parametrize("is_taken", [False, True])
async def test_copies_are_where_they_were_or_nothing_is_gone_on_with(
    tmp_path, caplog, is_taken
):
    tmp_path.chmod(0o700)
    async with World(state=tmp_path) as world:
        await world.backed()
        before = world.tasks[1].hello.incarnation
        (kept,) = world.tasks[1].statistics()["copies"]
    with socket.socket() as other:
        if is_taken:
            host, _, port = kept["address"].rpartition(":")
            # As servers do: connections that have ended stay there for a minute.
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((host, int(port)))
            other.listen()
        async with serve(TaskAddress("ps", 1, "127.0.0.1:0"), world.settings) as task:
            copies = task.statistics()["copies"]
            assert (task.hello.incarnation == before) == (not is_taken)
            assert [each["address"] for each in copies] == (
                [] if is_taken else [kept["address"]]
            )
            assert not list(tmp_path.glob("ps-1*"))
    assert ("the address of a copy that it kept is taken" in caplog.text) == is_taken
