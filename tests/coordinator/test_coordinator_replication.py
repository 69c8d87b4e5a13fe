"""Second copies of stores: what a program asks of its servers, and where it goes on."""

import asyncio

import numpy as np
import pytest
from coordinator_fakes import good
from coordinator_stores import StoresWorld
from coordinator_stores import world as world

from zstrat.config import Settings, Timeouts
from zstrat.coordinator import connect_session
from zstrat.coordinator.replication import (
    CopiesStatus,
    Copy,
    CopyPhase,
    StorePlacement,
)
from zstrat.errors import PSUnavailableError, UnavailableError
from zstrat.variables import VariableSpec
from zstrat.wire import (
    AttachBackup,
    BackupLost,
    CloseSession,
    DetachBackup,
    DropStore,
    HostStore,
    OpenSession,
    PromoteBackup,
    Telemetry,
    UpdateOp,
)


def _spec(ps):
    return VariableSpec(1, "v", "float32", (2,), ps)


def _add(world, ps):
    world.update([(_spec(ps), UpdateOp.ADD, 0, (np.ones(2, np.float32),))])


def test_each_store_has_a_backup_in_another_process_when_the_program_begins(world):
    world.connect()
    assert world.numbers_of == {"failovers": 0, "stores_without_backup": 0}
    first, second = world.ps
    assert [(o.store, type(o)) for o in first.orders[:1]] == [(1, HostStore)]
    assert [copy.index for copy in first.copies + second.copies] == [1, 0]
    assert all(copy.is_whole for copy in first.copies + second.copies)
    attach = [o for o in first.orders if isinstance(o, AttachBackup)]
    hosted = [o for o in second.orders if isinstance(o, HostStore)]
    assert [o.view for o in attach] == [o.view for o in hosted]


def test_a_copy_takes_the_place_of_a_server_that_is_killed(world, caplog):
    world.connect()
    coordinator = world.coordinator()
    first, second = world.ps
    world.on_loop(setattr, first, "reads", False)

    async def update():
        spec = [(_spec(0), UpdateOp.ADD, 0, (np.ones(2, np.float32),))]
        await world.session.run_async(world.session.servers.update(spec), "the test")

    async def broken():
        updating = asyncio.ensure_future(update())
        await asyncio.to_thread(world.until, lambda: first.pushes)
        world.on_loop(first.kill)
        await updating

    asyncio.run(broken())
    (copy,) = second.copies
    (before,), (after,) = first.pushes, copy.pushes
    assert (before.writer, before.step) == (after.writer, after.step)
    promote = [o for o in copy.orders if isinstance(o, PromoteBackup)]
    detach = [o for o in second.orders if isinstance(o, DetachBackup)]
    assert (len(promote), len(detach)) == (1, 1)
    assert world.moves() == [(0, "ps1.0.2:1")]
    assert coordinator.schedule(good).fetch() == 1
    metrics = coordinator.metrics()
    assert (metrics["failovers"], metrics["stores_without_backup"]) == (1, 2)
    words = caplog.text
    assert (
        "process of /job:ps/task:0 is lost (killed): the store of /job:ps/task:0"
        in (words)
    )
    assert "/job:ps/task:1 has no backup until another process" in words


def test_a_rest_waits_for_the_copy_of_a_server_that_ends(world):
    """A server that drains refuses what is new, and is still connected."""
    world.connect()
    world.coordinator()
    first, second = world.ps
    world.on_loop(setattr, first, "serves", False)

    async def rested():
        resting = asyncio.ensure_future(_rest())
        await asyncio.to_thread(
            world.until, lambda: world.session.cluster.client.lines[0].is_held
        )
        world.on_loop(first.kill)
        await resting

    async def _rest():
        async with world.session.at_rest():
            pass

    asyncio.run(rested())
    assert [len(task.fences) for task in (second, *second.copies)] == [1, 1]


def test_a_loss_names_the_process_and_the_store_that_it_served(world, caplog):
    """After a failover one process serves the stores of two, and dies with both."""
    world.connect()
    coordinator = world.coordinator()
    first, second = world.ps
    world.on_loop(first.kill)
    world.until(lambda: _serves_all(second))
    world.on_loop(first.come_back)
    world.until(world.paired)
    caplog.clear()
    world.on_loop(second.kill, "out of memory")
    world.until(lambda: _serves_all(first))
    for store in (0, 1):
        assert (
            "the process of /job:ps/task:1 is lost (out of memory): the store of "
            f"/job:ps/task:{store}, which it served, continues in the process of "
            "/job:ps/task:0"
        ) in caplog.text
    assert "task:0 is lost" not in caplog.text
    lost = coordinator.metrics()["tasks"]["ps:0"]["last_error"]
    assert lost.endswith("in the process of /job:ps/task:1: out of memory")


def test_an_error_names_the_process_that_served_the_store(world):
    world.connect()
    coordinator = world.coordinator()
    first, second = world.ps
    world.on_loop(first.kill)
    world.until(lambda: _serves_all(second))
    (copy,) = second.copies
    world.on_loop(copy.kill, "out of memory")
    with pytest.raises(PSUnavailableError) as raised:
        coordinator.schedule(good).fetch()
    assert raised.value.task == "/job:ps/task:0"
    assert "in the process of /job:ps/task:1: out of mem" in raised.value.reason


def test_a_store_of_a_silent_server_is_not_known_to_have_a_backup(world):
    """Between the death of a process and the loss of its session nobody decides."""
    world.connect()
    coordinator = world.coordinator()
    first, second = world.ps

    def told():
        metrics = coordinator.metrics()
        states = [store["state"] for store in metrics["stores"]]
        return metrics["stores_without_backup"], states

    assert told() == (0, ["paired"] * 2)
    lines = [link for link in first.links if link.is_open]
    for line in lines:
        world.on_loop(setattr, line, "is_silent", True)
    assert told() == (2, ["unknown"] * 2)
    for line in lines:
        world.on_loop(setattr, line, "is_silent", False)
    assert told() == (0, ["paired"] * 2)
    world.on_loop(setattr, second, "answers_looks", False)  # heard a moment ago
    assert told() == (2, ["paired"] * 2)
    assert world.numbers_of["stores_without_backup"] == 0  # where nobody is asked


async def test_a_process_may_be_added_while_others_are_asked_for_their_copies():
    placement = StorePlacement(["a", "b"])
    first, second = placement.stores
    processes = []

    class Process:
        is_heard = True

        @property
        def link(self):
            return self

        async def submit(self, message, *, deadline):
            if len(processes) == 2:
                number = placement.enter("c")
                processes.append(Process())
                for store in (first, second):
                    store.phase = CopyPhase.PAIRED
                    store.backup = Copy(number, 0, "c")

    processes += [Process(), Process()]
    status = CopiesStatus(placement, processes, processes)
    assert await status.ask_without_backup(1.0) == 2  # nobody has asked it
    assert await status.ask_without_backup(1.0) == 0


def test_who_comes_back_takes_what_is_missing_and_may_be_lost_and_found_again(world):
    world.connect()
    for lost in (0, 1, 0):
        process, other = world.ps[lost], world.ps[1 - lost]
        world.on_loop(process.kill)
        world.until(lambda other=other: _serves_all(other))
        process.orders.clear()
        process.sessions.clear()
        served = world.replication.placement.stores[lost].view
        world.on_loop(process.come_back)
        world.until(world.paired)
        assert [opening.views for opening in process.sessions] == [[served]]
        kinds = [type(order) for order in process.orders]
        assert set(kinds) == {DropStore, HostStore}
        assert kinds.index(DropStore) < kinds.index(HostStore)
        for ps in (0, 1):
            _add(world, ps)
    assert world.numbers_of == {"failovers": 5, "stores_without_backup": 0}


def test_what_a_process_tells_of_itself_is_told_of_the_store_that_it_serves(world):
    world.connect()
    coordinator = world.coordinator()
    first, second = world.ps

    def tell(process, memory):
        # The process has one more connection, which was opened last.
        world.on_loop(process.links[-1].say, Telemetry({"process": {"memory": memory}}))

    def told(task):
        return coordinator.metrics()["tasks"][task]["memory"]

    tell(first, 5)
    tell(second, 6)
    world.until(lambda: (told("ps:0"), told("ps:1")) == (5, 6))
    world.on_loop(first.kill)
    world.until(lambda: _serves_all(second))
    world.on_loop(first.come_back)
    world.until(world.paired)
    tell(first, 7)  # it serves nothing now
    tell(second, 8)
    world.until(lambda: told("ps:1") == 8)
    assert told("ps:0") != 7


def _serves_all(process):
    return {copy.index for copy in (process, *process.copies) if copy.serves} == {0, 1}


def test_a_worker_that_comes_late_hears_where_the_servers_are(world):
    world.connect()
    worker = world.workers[0]
    assert worker.sessions[-1].ps == ["ps0:1", "ps1:1"]
    world.on_loop(worker.kill)
    world.on_loop(world.ps[0].kill)
    world.until(lambda: _serves_all(world.ps[1]))
    world.on_loop(worker.come_back)
    world.until(lambda: len(worker.sessions) == 2)
    opened = worker.sessions[-1]
    assert opened.ps == ["ps1.0.2:1", "ps1:1"]
    assert opened.views == [3, 3]


def test_a_backup_that_cannot_be_reached_is_replaced(world, monkeypatch, caplog):
    monkeypatch.setattr(
        "zstrat.coordinator.replication._store_orders.RETRY_SECONDS", 0.0
    )
    world.connect()
    first = world.ps[0]
    view = world.replication.placement.stores[0].view
    session = world.session.session
    world.on_loop(first.links[0].say, BackupLost(session, view - 1, "of long ago"))
    world.on_loop(first.links[-1].say, BackupLost(session, view, "its line is cut"))
    world.until(lambda: len(world.ps[1].copies) == 2)
    world.until(world.paired)
    (detached,) = [o for o in first.orders if isinstance(o, DetachBackup)]
    assert detached.view == view + 1
    assert world.numbers_of["failovers"] == 0
    said = [r.levelname for r in caplog.records if "its line is cut" in r.getMessage()]
    assert said == ["WARNING"]
    assert "of long ago" not in caplog.text


@pytest.mark.parametrize("kind", [UnavailableError, OSError])
def test_a_process_that_keeps_no_backup_is_said_in_time(world, caplog, kind):
    world.ps[1].refuses, world.ps[1].refusal = (HostStore,), kind("no memory")
    timeouts = Timeouts(connect=1.0, request=20.0)
    with pytest.raises(TimeoutError, match="task:0"):
        connect_session(
            world.spec,
            Settings(timeouts=timeouts),
            replicas=1,
            make_link=world.make_link,
        )
    said = f"task:1 keeps no backup of the store of /job:ps/task:0: {kind.__name__}"
    assert said in caplog.text


def test_both_copies_lost_are_said_and_those_that_return_are_found(world):
    world.connect()
    coordinator = world.coordinator()
    world.on_loop(lambda: [process.kill() for process in world.ps])
    world.until(lambda: world.session.cluster.outage_error is not None)
    with pytest.raises(PSUnavailableError) as caught:
        coordinator.schedule(good)
    assert not caught.value.lost
    world.on_loop(lambda: [process.come_back(same=True) for process in world.ps])
    world.until(world.paired)
    world.until(lambda: world.session.cluster.outage_error is None)
    assert coordinator.schedule(good).fetch() == 1
    world.on_loop(lambda: [process.kill() for process in world.ps])
    world.on_loop(lambda: [process.come_back() for process in world.ps])
    world.until(lambda: world.session.cluster.outage_error is not None)
    with pytest.raises(PSUnavailableError) as caught:
        _add(world, 0)
    assert caught.value.lost


def test_those_that_said_that_they_return_are_waited_for(world):
    world.connect()
    coordinator = world.coordinator()
    world.on_loop(lambda: [each.kill("restart", 60.0) for each in world.ps])
    world.until(lambda: not any(task.is_ready for task in world.session.cluster.ps))
    value = coordinator.schedule(good)
    assert world.session.cluster.outage_error is None
    world.on_loop(lambda: [each.come_back(same=True) for each in reversed(world.ps)])
    world.until(world.paired)
    assert value.fetch() == 1
    assert world.session.cluster.outage_error is None


def test_a_server_that_is_back_at_once_still_gets_its_backup_first(world):
    """The wait for the backups had ended with the loss."""
    first = world.ps[0]
    opened = []

    @first.wrap
    def cut(handle, message):
        if isinstance(message, OpenSession):
            opened.append(message)
            if len(opened) == 2:  # of its process: its store was entered before
                first.kill("cut")
                first.come_back(same=True)
        return handle(message)

    session = world.connect()
    assert session.cluster.outage_error is None
    assert world.on_loop(world.paired)


@pytest.mark.parametrize("resume", ["", "run"])
def test_a_process_that_restarts_before_its_store_is_entered(world, resume):
    """With a name the process joins before the stores that it serves."""
    first = world.ps[0]
    opened = []

    @first.wrap
    def restarted(handle, message):
        if isinstance(message, OpenSession):
            opened.append(message)
            if len(opened) == 2:
                first.kill()
                first.come_back()
        return handle(message)

    session = world.connect(resume=resume)
    assert session.cluster.outage_error is None
    assert world.on_loop(world.paired)


@pytest.mark.parametrize("turns", [4, 7])
@pytest.mark.parametrize("message", range(1, 5))
@pytest.mark.parametrize("resume", ["", "run"])
def test_a_server_may_restart_anywhere_in_the_opening(world, resume, message, turns):
    """A few turns of the loop after it came."""
    first = world.ps[0]
    came = []

    def restart(turns):
        if turns:
            asyncio.get_running_loop().call_soon(restart, turns - 1)
        else:
            first.kill()
            first.come_back()

    @first.wrap
    def counted(handle, asked):
        came.append(asked)
        if len(came) == message:
            restart(turns)
        return handle(asked)

    session = world.connect(resume=resume)
    world.until(world.paired)
    assert session.cluster.outage_error is None


def test_the_end_of_a_session_is_told_to_processes_and_copies(world):
    world.connect()
    (copy,) = world.ps[1].copies
    ends = [task.heard(CloseSession) for task in (world.ps[1], copy)]
    world.on_loop(world.ps[0].kill)
    moved = world.session.cluster.ps[0]
    world.until(lambda: moved.is_ready and moved.address != "ps0:1")
    world.close()
    assert list(map(len, ends)) == [2, 1]


def test_a_process_is_told_once_to_forget_what_was_left_under_the_name(world):
    """Told so again when it is back from a cut, it would forget what it has by then."""
    for process in world.ps:
        process.former = 5
    ends = [process.heard(CloseSession) for process in world.ps]
    world.connect(replicas=0, resume="run")
    assert list(map(len, ends)) == [1, 1]
    assert not any(process.former for process in world.ps)
    first = world.ps[0]
    world.on_loop(first.kill)
    world.until(lambda: not world.replication.processes[0].is_ready)
    world.on_loop(lambda: first.come_back(same=True))
    world.until(lambda: world.replication.processes[0].is_ready)
    assert list(map(len, ends)) == [1, 1]


def test_what_cannot_have_copies_is_refused(tmp_path):
    lonely = StoresWorld(ps=1)
    with pytest.raises(ValueError, match=r"at least 2 ps.* has 1"):
        lonely.connect()
    (tmp_path / "ps-0.public").write_text("x")
    world = StoresWorld()
    with pytest.raises(ValueError, match="replicas="):
        world.connect(keys=tmp_path)
    assert not any(isinstance(m, OpenSession) for t in world.ps for m in t.orders)
