"""Keys and roles: who is let in, who is not, and that the next honest one always is."""

import asyncio
import grp
import logging
import os
import pwd
import shutil
import socket
import stat
from types import SimpleNamespace

import pytest
from strikes import strikes

from zstrat.config import Settings, Timeouts
from zstrat.errors import DeadlineExceededError, PermissionDeniedError, ZstratError
from zstrat.transport import Secrecy, Security, _opening, generate_keys
from zstrat.wire import Done, Inspect, Job, Pull, Read, Statistics

PS = ("ps", 0)


def soon(seconds=10.0):
    return asyncio.get_running_loop().time() + seconds


@pytest.fixture
def folder(tmp_path):
    generate_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
async def served(net, folder):
    endpoint, address, service = await net.serve(security=Security.load(folder, "ps"))
    return endpoint, address, service


async def honest(net, address, folder, job="worker"):
    """The next honest client is served."""
    link, _ = await net.open(
        address, job=job, expect=PS, security=Security.load(folder, job)
    )
    return await link.request(Inspect())


async def test_a_role_is_that_of_the_key(net, served, folder):
    _, address, _ = served
    for job in ("chief", "worker", "observer"):
        assert await honest(net, address, folder, job) == Statistics({"role": job})


async def test_whoever_is_expected_by_its_role_has_to_have_its_key(net, served, folder):
    """A worker without a number yet, at a server whose number it does not know; there
    may be several."""
    _, address, _ = served
    ours = Security.load(folder, "worker")
    unnumbered = {"index": -1, "security": ours}
    for _ in range(2):
        link, _ = await net.open(address, expect=("ps", None), **unnumbered)
        assert await link.request(Inspect()) == Statistics({"role": "worker"})
    link, _ = net.link(address, expect=("worker", None), **unnumbered)
    with pytest.raises((PermissionDeniedError, DeadlineExceededError)):
        await link.wait_open(soon(1.0))
    link, _ = net.link(address, job="chief", expect=("ps", None), **unnumbered)
    with pytest.raises(ZstratError):
        await link.wait_open(soon())


async def test_bodies_travel_encrypted(net, served, folder):
    _, address, _ = served
    link, _ = await net.open(
        address, expect=PS, security=Security.load(folder, "worker")
    )
    reply = await link.request(Pull(1, [Read(3_000_001, -1)]))
    assert reply.arrays[0][-1] == 3_000_000 % 256


@pytest.mark.parametrize("lacking", ["chief", "ps", "worker"])
@pytest.mark.parametrize("job", ["chief", "ps", "worker"])
def test_public_halves_that_a_task_needs_are_missed_at_its_start(folder, job, lacking):
    (folder / f"{lacking}.public").unlink()
    words = rf"{folder}.* {lacking}\.public"
    with pytest.raises(ValueError, match=words):
        Security.load(folder, job)


async def test_a_claim_above_the_key_is_refused(net, served, folder):
    _, address, _ = served
    link, _ = net.link(
        address, job="chief", expect=PS, security=Security.load(folder, "worker")
    )
    with pytest.raises(PermissionDeniedError):
        await link.wait_open(soon())
    assert await honest(net, address, folder)


async def test_any_key_may_observe_and_then_only_observes(net, served, folder):
    _, address, _ = served
    link, _ = await net.open(
        address, job="observer", expect=PS, security=Security.load(folder, "ps")
    )
    assert await link.request(Inspect()) == Statistics({"role": Job.OBSERVER})


async def test_an_unknown_key_is_refused_promptly_naming_the_folder(
    net, served, folder, tmp_path
):
    endpoint, address, service = served
    generate_keys(tmp_path / "others")
    shutil.copy(folder / "ps.public", tmp_path / "others")
    stranger = Security.load(tmp_path / "others", "worker")
    link, _ = net.link(address, expect=PS, security=stranger)
    with pytest.raises(PermissionDeniedError, match=str(tmp_path / "others")):
        await link.wait_open(soon())
    assert not service.seen
    assert await honest(net, address, folder)
    assert endpoint.statistics()["counts"]["refused"]


async def test_no_key_is_refused(net, served, folder):
    _, address, service = served
    link, _ = net.link(address)
    with pytest.raises(DeadlineExceededError, match="ZSTRAT_KEYS="):
        await link.wait_open(soon(0.3))
    assert not service.seen
    assert await honest(net, address, folder)


async def test_a_server_with_another_key_is_not_trusted(net, served, tmp_path):
    _, address, service = served
    generate_keys(tmp_path / "others")
    link, _ = net.link(
        address, expect=PS, security=Security.load(tmp_path / "others", "worker")
    )
    with pytest.raises(DeadlineExceededError, match="ZSTRAT_KEYS="):
        await link.wait_open(soon(0.3))
    assert not service.seen


@pytest.fixture
def brief(monkeypatch):
    """Pauses that are short enough for a test."""
    monkeypatch.setattr(_opening, "_LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(_opening, "DOUBTFUL_REFUSALS", 10**6)


@pytest.mark.parametrize("keys_of", ["nobody", "another cluster"])
async def test_who_has_no_keys_that_fit_is_told_soon(
    net, served, tmp_path, brief, keys_of
):
    """Sooner than if it could be a proxy that ends the connections."""
    security = None
    if keys_of == "another cluster":
        generate_keys(tmp_path / "others")
        security = Security.load(tmp_path / "others", "worker")
    link, _ = net.link(served[1], expect=PS, security=security)
    with pytest.raises(PermissionDeniedError, match="ZSTRAT_KEYS="):
        await link.wait_open(soon(60.0))


async def test_a_refusal_that_nobody_waits_for_is_told_to_the_log(
    net, served, tmp_path, brief
):
    """A worker with keys of another cluster, say, without which training goes on."""
    said = asyncio.Queue()
    hearing = logging.Handler(logging.WARNING)
    hearing.emit = lambda record: said.put_nowait(record.getMessage())
    generate_keys(tmp_path / "others")
    security = Security.load(tmp_path / "others", "worker")
    logging.getLogger("zstrat.transport").addHandler(hearing)
    try:
        link, _ = net.link(served[1], expect=PS, security=security)
        async with asyncio.timeout(60):
            while "refuses this process" not in (words := await said.get()):
                pass  # what the server has to say of it
    finally:
        logging.getLogger("zstrat.transport").removeHandler(hearing)
    assert f"at {served[1]}" in words
    with pytest.raises(PermissionDeniedError):
        await link.wait_open(soon())


async def test_a_proxy_whose_daemon_is_about_to_start_is_no_refusal(
    net, brief, monkeypatch
):
    asked, ask = asyncio.Queue(), _opening.Dial.ask

    def counted(dial):
        asked.put_nowait(dial)
        ask(dial)

    monkeypatch.setattr(_opening.Dial, "ask", counted)
    _, address, _ = await net.serve()
    relay = net.relay(address)
    with relay.refusing():
        link, _ = net.link(relay.address)
        for _ in range(3):
            await asked.get()
    assert await link.wait_open(soon(60.0))


async def test_who_accepts_and_says_nothing_is_not_asked_for_keys(net, monkeypatch):
    silent, timed_out = asyncio.Event(), _opening.Opening.handshake_timed_out

    def told(opening):
        timed_out(opening)
        silent.set()

    monkeypatch.setattr(_opening.Opening, "handshake_timed_out", told)
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the kernel accepts
        swift = Settings(timeouts=Timeouts(handshake=0.2))
        link, _ = net.link(f"127.0.0.1:{frozen.getsockname()[1]}", settings=swift)
        await silent.wait()
        with pytest.raises(DeadlineExceededError) as raised:
            await link.wait_open(soon(0.0))
        assert "keys" not in str(raised.value).lower()


async def test_a_server_without_keys_is_not_trusted(net, folder):
    _, address, service = await net.serve()
    link, _ = net.link(address, expect=PS, security=Security.load(folder, "worker"))
    with pytest.raises(DeadlineExceededError, match="ZSTRAT_KEYS="):
        await link.wait_open(soon(0.3))
    assert not service.seen


async def test_a_check_that_raises_refuses_and_the_next_one_is_served(
    net, served, folder, caplog
):
    endpoint, address, service = served

    def broken(key):
        raise RuntimeError("the disk is full")

    checker = endpoint._authenticator
    sound, checker._admits = checker._admits, broken
    link, _ = net.link(address, expect=PS, security=Security.load(folder, "worker"))
    with pytest.raises(PermissionDeniedError):
        await link.wait_open(soon())
    assert "the disk is full" in caplog.text
    assert not service.seen
    checker._admits = sound
    assert await honest(net, address, folder)


async def test_a_dead_authenticator_admits_nobody_and_is_replaced(net, folder):
    swift = Settings(timeouts=Timeouts(handshake=0.5))
    endpoint, address, service = await net.serve(
        security=Security.load(folder, "ps"), settings=swift
    )
    checker, revive = endpoint._authenticator, endpoint._authenticator.revive
    checker.revive = lambda: None
    checker.close()
    security = Security.load(folder, "worker")
    link, _ = net.link(address, expect=PS, security=security, settings=swift)
    with pytest.raises((DeadlineExceededError, PermissionDeniedError)):
        await link.wait_open(soon(0.5))
    assert not service.seen
    # It would be the same worker as the honest one, and the newest process wins.
    await link.close()
    checker.revive = revive
    assert await honest(net, address, folder)


async def test_keys_serve_other_machines(net, folder):
    _, address, _ = await net.serve("0.0.0.0:0", security=Security.load(folder, "ps"))
    assert await honest(net, address.replace("0.0.0.0", "127.0.0.1"), folder)


async def test_a_link_with_keys_says_whom_it_expects(net, folder):
    with pytest.raises(ValueError, match="expect="):
        net.link("127.0.0.1:1", security=Security.load(folder, "worker"))


async def test_one_folder_serves_tasks_of_all_roles(net, folder):
    for job in Job:
        _, address, _ = await net.serve(
            job=job,
            security=Security.load(folder, job),
            handler=lambda remote, message: Done(),
        )
        link, _ = await net.open(
            address,
            job="chief",
            expect=(job, 0),
            security=Security.load(folder, "chief"),
        )
        assert await link.request(Inspect()) == Done()


@pytest.fixture
def per_task(tmp_path):
    generate_keys(tmp_path / "per task", {Job.PS: 2, Job.WORKER: 2})
    return tmp_path / "per task"


async def test_the_key_of_a_task_decides_its_index_too(net, per_task):
    _, address, _ = await net.serve(security=Security.load(per_task, "ps", 0))
    first = Security.load(per_task, "worker", 0)
    link, _ = await net.open(address, index=0, expect=PS, security=first)
    assert await link.request(Inspect()) == Statistics({"role": "worker"})
    other, _ = net.link(address, index=1, expect=PS, security=first)
    with pytest.raises(PermissionDeniedError, match="worker:0"):
        await other.wait_open(soon())
    chief, _ = net.link(address, job="chief", index=0, expect=PS, security=first)
    with pytest.raises(PermissionDeniedError):
        await chief.wait_open(soon())
    looks, _ = await net.open(
        address, job="observer", index=5, expect=PS, security=first
    )
    assert await looks.request(Inspect()) == Statistics({"role": "observer"})


async def test_a_client_knows_which_task_it_talks_to_by_its_key(net, per_task):
    _, address, _ = await net.serve(security=Security.load(per_task, "ps", 1))
    keys = Security.load(per_task, "worker", 0)
    link, _ = net.link(address, index=0, expect=PS, security=keys)
    with pytest.raises(DeadlineExceededError):
        await link.wait_open(soon(1.0))


def test_each_task_needs_its_own_secret_alone(per_task):
    assert not (per_task / "worker.secret").exists()
    for secret in per_task.glob("*.secret"):
        if secret.name != "worker-1.secret":
            secret.unlink()
    assert Security.load(per_task, "worker", 1).job is Job.WORKER
    with pytest.raises(ValueError, match="worker-0"):
        Security.load(per_task, "worker", 0)
    with pytest.raises(ValueError, match="worker-1"):
        Security.load(per_task, "worker", 7)


def test_a_folder_without_keys_is_told_from_one_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"holds no keys: .*has made for this cluster"):
        Security.load(tmp_path, "worker", 0)
    with pytest.raises(ValueError, match="none does not exist: "):
        Security.load(tmp_path / "none", "worker", 0)
    (tmp_path / "worker.secret").touch()
    with pytest.raises(ValueError, match=r"worker\.secret"):
        Security.load(tmp_path / "worker.secret", "worker", 0)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("mode", "folder", "read_only", "own", "fine"),
    [
        (0o600, 0o700, False, False, True),
        (0o400, 0o1777, True, False, True),  # a Secret with defaultMode 0400
        (0o440, 0o1777, True, True, True),  # ... and with an fsGroup
        (0o440, 0o1777, True, False, False),
        (0o440, 0o700, False, True, False),
        (0o400, 0o1777, False, True, False),  # anybody could add a key
        (0o644, 0o755, True, True, False),  # what Kubernetes does if nothing is said
        (0o460, 0o700, True, True, False),
    ],
)
def test_who_can_read_a_secret_or_add_one(mode, folder, read_only, own, fine):
    seen = Secrecy(mode, folder, read_only, own)
    assert (seen.file_is_private and seen.folder_is_private) is fine


def test_keys_as_kubernetes_lays_them_out(folder, tmp_path, monkeypatch):
    """Links into a hidden folder, in one that everybody could enter; read-only, which
    takes a mount that a test may not make."""
    secret, now = tmp_path / "secret", tmp_path / "secret" / "..2026"
    secret.mkdir()
    secret.chmod(0o1777)
    folder.rename(now)
    (secret / "..data").symlink_to("..2026")
    for file in now.iterdir():
        file.chmod(0o440)
        (secret / file.name).symlink_to(f"..data/{file.name}")
    with pytest.raises(PermissionDeniedError, match=r"\b0440\b.*\b600\b"):
        Security.load(secret, "ps")
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY)
    )
    monkeypatch.setattr(grp, "getgrgid", {}.__getitem__)  # a number without a name
    monkeypatch.setattr(pwd, "getpwall", list)
    Security.load(secret, "ps")
    fellow = SimpleNamespace(pw_gid=now.stat().st_gid, pw_uid=os.geteuid() + 1)
    monkeypatch.setattr(pwd, "getpwall", lambda: [fellow])
    with pytest.raises(PermissionDeniedError):
        Security.load(secret, "ps")
    for file in now.iterdir():
        file.chmod(0o644)
    with pytest.raises(PermissionDeniedError, match=r"\b0400\b"):
        Security.load(secret, "ps")
    for file in now.iterdir():
        file.chmod(0o400)
    Security.load(secret, "ps")


def test_keys_are_made_once_with_tight_modes(folder):
    assert mode(folder) == 0o700
    for job in Job:
        assert mode(folder / f"{job}.secret") == 0o600
    with pytest.raises(FileExistsError):
        generate_keys(folder)


def test_keys_whose_making_is_interrupted_are_none(tmp_path):
    folder, there = tmp_path / "new", tmp_path / "there"
    there.mkdir()
    (there / "note").write_text("mine")
    for number in strikes(lambda: generate_keys(folder), "transport/_keys.py"):
        assert not folder.exists(), number
    for number in strikes(lambda: generate_keys(there), "transport/_keys.py", every=5):
        assert list(there.iterdir()) == [there / "note"], number
    assert Security.load(folder, "ps").job is Security.load(there, "ps").job is Job.PS


def test_keys_in_the_place_of_a_file_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        generate_keys(tmp_path / "file")


def test_a_readable_secret_is_refused(folder):
    (folder / "ps.secret").chmod(0o640)
    with pytest.raises(PermissionDeniedError, match=r"\b0640\b.*\b600\b"):
        Security.load(folder, "ps")
    (folder / "ps.secret").chmod(0o600)
    folder.chmod(0o755)
    with pytest.raises(PermissionDeniedError):
        Security.load(folder, "ps")


def test_a_machine_needs_its_own_secret_alone(folder):
    for job in Job:
        if job != "worker":
            (folder / f"{job}.secret").unlink()
    assert Security.load(folder, "worker").job is Job.WORKER
    with pytest.raises(ValueError, match=r"ps\.secret"):
        Security.load(folder, "ps")


def test_a_folder_that_does_not_fit_is_refused(folder, tmp_path):
    generate_keys(tmp_path / "others")
    with pytest.raises(ValueError, match="`zstrat keygen`"):
        Security.load(tmp_path / "nowhere", "ps")
    (folder / "ps.public").write_bytes((tmp_path / "others/ps.public").read_bytes())
    with pytest.raises(ValueError, match=r"ps\.public.*`zstrat keygen`"):
        Security.load(folder, "ps")
    (folder / "ps.public").write_text("ß", "utf-8")
    with pytest.raises(ValueError, match=r"ps\.public"):
        Security.load(folder, "ps")
    (folder / "ps.public").write_bytes((folder / "chief.public").read_bytes())
    with pytest.raises(ValueError, match=r"ps\.public.*`zstrat keygen`"):
        Security.load(folder, "ps")


def test_secrets_do_not_show(folder):
    security = Security.load(folder, "ps")
    secret = (folder / "ps.secret").read_text().strip()
    assert secret not in repr(security)
    assert secret not in str(security.denied("somebody"))
