"""Keys that change while all tasks go on."""

import asyncio
import contextlib
import logging
import shutil
from itertools import count

import pytest
import zmq

from zstrat.config import Settings, Timeouts
from zstrat.errors import PeerLostError, PermissionDeniedError
from zstrat.transport import Security, generate_keys, rotate_keys
from zstrat.wire import Inspect, Job, Statistics

PS = ("ps", 0)
QUICK = Settings(timeouts=Timeouts(beat=0.05, liveness=60.0, reconnect=60.0))
SERVED = Statistics({"role": "worker"})


@pytest.fixture
def folder(tmp_path):
    """Of the machine on which keys are made."""
    generate_keys(tmp_path / "keys")
    return tmp_path / "keys"


class Machine:
    """One that has a copy of the folder."""

    def __init__(self, folder, path):
        self._folder, self.path = folder, path
        self.copy()

    def copy(self):
        """As ``rsync --delete``."""
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self._folder, self.path)

    def security(self, job):
        return Security.load(self.path, job)


@pytest.fixture
def machines(folder, tmp_path):
    return Machine(folder, tmp_path / "server"), Machine(folder, tmp_path / "client")


async def opened(caller, link):
    """Waits for the next greeting; then a request is answered."""
    async with asyncio.timeout(60):
        await caller.opened.get()
        while True:
            try:
                return await link.request(Inspect())
            except PeerLostError:  # bound anew a second time: it greets once more
                await caller.opened.get()


async def reached(net, address, machine):
    """Whether somebody who comes now is served."""
    security = machine.security("worker")
    link, caller = net.link(
        address, index=2, expect=PS, security=security, settings=QUICK
    )
    answer = await opened(caller, link)
    await link.close()
    return answer


@pytest.mark.parametrize("first", ["server", "client"])
async def test_keys_change_and_nobody_is_lost(net, folder, machines, first):
    server, client = machines
    order = machines if first == "server" else machines[::-1]
    _, address, service = await net.serve(
        security=server.security("ps"), settings=QUICK
    )
    link, caller = net.link(
        address, expect=PS, security=client.security("worker"), settings=QUICK
    )
    assert await opened(caller, link) == SERVED

    rotate_keys(folder)
    for machine in order:
        machine.copy()
        assert await reached(net, address, client) == SERVED
    assert link.is_open  # nothing was bound anew
    assert caller.opened.empty()

    rotate_keys(folder)
    for machine in order:
        machine.copy()
        if machine is server:  # it binds anew, with a secret that the other side awaits
            assert await opened(caller, link) == SERVED
        assert await reached(net, address, client) == SERVED

    rotate_keys(folder)
    for machine in order:
        machine.copy()
        if machine is server:
            assert await opened(caller, link) == SERVED
        assert await reached(net, address, client) == SERVED
    assert caller.lost.empty()  # a connection that broke and came back is no loss
    lost = [service.lost.get_nowait()[0] for _ in range(service.lost.qsize())]
    assert {remote.hello.index for remote in lost} == {2}  # they left


async def test_previous_keys_are_valid_until_the_last_step(
    net, folder, machines, tmp_path
):
    server, client = machines
    _, address, _ = await net.serve(security=server.security("ps"), settings=QUICK)
    for _ in range(2):
        rotate_keys(folder)
        server.copy()
    # So does a machine that was forgotten, and whoever has copied its secret.
    shutil.copy(folder / "ps.public", client.path)
    link, caller = net.link(
        address, expect=PS, security=client.security("worker"), settings=QUICK
    )
    assert await opened(caller, link) == SERVED
    rotate_keys(folder)
    server.copy()
    while link.is_open:
        with contextlib.suppress(PeerLostError):
            await link.request(Inspect())
    with pytest.raises(PermissionDeniedError):
        await link.wait_open(asyncio.get_running_loop().time() + 60)


def test_a_folder_that_cannot_be_used_leaves_the_keys_in_use(folder, caplog):
    security = Security.load(folder, "ps")
    before, whole = security.keys, (folder / "worker.public").read_text()
    (folder / "worker.public").write_text("cut off")
    security.refresh()
    assert security.keys is before
    assert "worker.public is not a key" in caplog.text
    caplog.clear()
    security.refresh()
    assert not caplog.text  # it was told
    (folder / "worker.public").write_text(whole)
    (folder / "ps.secret").chmod(0o644)
    rotate_keys(folder)
    security.refresh()
    assert security.keys is before
    assert "has mode 0644" in caplog.text
    (folder / "ps.secret").chmod(0o600)
    security.refresh()
    assert set(security.keys.owners) > set(before.owners)


def test_a_step_that_was_interrupted_is_taken_to_its_end(folder):
    rotate_keys(folder)
    following = {file.name: file.read_text() for file in (folder / "next").iterdir()}
    before = {f.name: f.read_text() for f in folder.glob("*.public")}
    (folder / "previous").mkdir()
    for name, text in before.items():
        (folder / "previous" / name).write_text(text)
    (folder / "next" / "chief.public").replace(folder / "chief.public")
    assert rotate_keys(folder) == "previous"
    assert {f.name: f.read_text() for f in folder.glob("*.*")} == following
    assert {f.name: f.read_text() for f in (folder / "previous").iterdir()} == before
    assert rotate_keys(folder) == ""
    assert sorted(f.name for f in folder.iterdir()) == sorted(following)


def test_there_is_nothing_to_change(tmp_path):
    with pytest.raises(FileNotFoundError):
        rotate_keys(tmp_path)


def test_keys_of_single_tasks_stay_those(tmp_path):
    generate_keys(tmp_path, {Job.WORKER: 2})
    rotate_keys(tmp_path)
    known = Security.load(tmp_path, "worker", 1).keys
    assert len(known.owners) == 2 * len(list(tmp_path.glob("*.public")))
    assert len(known.of(Job.WORKER, 1)) == 2
    assert not set(known.of(Job.WORKER, 0)) & set(known.of(Job.WORKER, 1))


def test_one_key_with_two_owners_is_refused(folder):
    rotate_keys(folder)
    shutil.copy(folder / "chief.public", folder / "next" / "worker.public")
    with pytest.raises(ValueError, match=r"worker\.public"):
        Security.load(folder, "ps")


def test_a_folder_that_is_being_copied_loses_no_key(folder, tmp_path):
    """As ``rm -r`` and ``cp``, seen in between: the own pair comes first."""
    there, now = tmp_path / "copy", [0.0]
    shutil.copytree(folder, there)
    security = Security.load(there, "worker", clock=lambda: now[0])
    before = security.keys.owners
    rotate_keys(folder)
    rotate_keys(folder)
    shutil.rmtree(there)
    shutil.copytree(folder, there, ignore=lambda *_: ["previous", "ps.public"])
    security.refresh()
    assert security.keys.owners.keys() > before.keys()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        security.arm_client(socket, Job.PS, 0)  # its key is known yet
    for file in ("ps.public", "previous"):
        copy = shutil.copytree if file == "previous" else shutil.copy
        copy(folder / file, there / file)
        now[0] += 0.9  # a slow network
        security.refresh()
        assert security.keys.owners.keys() >= before.keys()
    assert security.keys == Security.load(there, "worker").keys

    rotate_keys(folder)
    shutil.rmtree(there / "previous")  # nothing more comes: these keys are removed
    security.refresh()
    assert security.keys.owners.keys() >= before.keys()
    now[0] += 1.1
    security.refresh()
    assert not security.keys.owners.keys() & before.keys()


async def test_a_link_whose_key_has_gone_tries_on(net, machines):
    """When the key is there again the server is reached."""
    server, client = machines
    tried = asyncio.Event()

    def look(record):
        if "ps.public is missing" in record.getMessage():
            tried.set()
        return True

    endpoint, address, _ = await net.serve(
        security=server.security("ps"), settings=QUICK
    )
    security = Security.load(client.path, "worker", clock=count(0, 10).__next__)
    link, caller = net.link(address, expect=PS, security=security, settings=QUICK)
    assert await opened(caller, link) == SERVED
    (client.path / "ps.public").unlink()
    security.refresh()
    logger = logging.getLogger("zstrat.transport")
    logger.addFilter(look)
    try:
        await endpoint.close()
        async with asyncio.timeout(60):
            await tried.wait()
    finally:
        logger.removeFilter(look)
    client.copy()
    await net.serve(address, security=server.security("ps"), settings=QUICK)
    assert await opened(caller, link) == SERVED


def test_pairs_that_were_added_after_the_first_step_change_with_the_others(
    folder, tmp_path
):
    assert rotate_keys(folder) == "next"
    known = {file.name: file.read_text() for file in (folder / "next").iterdir()}
    generate_keys(tmp_path / "more", {Job.WORKER: 4})
    for kind in ("public", "secret"):
        shutil.copy(tmp_path / "more" / f"worker-3.{kind}", folder)
    added = Security.load(folder, "worker", 3).keys.public
    assert rotate_keys(folder) == "next"
    after = {file.name: file.read_text() for file in (folder / "next").iterdir()}
    assert after.keys() - known.keys() == {"worker-3.public", "worker-3.secret"}
    assert known.items() <= after.items()
    assert rotate_keys(folder) == "previous"
    keys = Security.load(folder, "worker", 3).keys
    assert keys.public != added
    assert added in keys.owners
    assert rotate_keys(folder) == ""
    assert added not in Security.load(folder, "worker", 3).keys.owners


def test_strangers_do_not_have_the_folder_read_all_the_time(folder):
    """Each look at the clock takes a second, so a look at the folder does."""
    now = count(100)
    security = Security.load(folder, "ps", clock=lambda: float(next(now)))
    security.look_again()
    rotate_keys(folder)
    looks = 0
    while len(security.keys.owners) == len(list(folder.glob("*.public"))):
        security.look_again()
        looks += 1
    assert looks == 19  # eighteen of them in vain
