"""Fleets on engines that have actors, without these engines: what is said where they
are not there, and the daemon beside an actor."""

import asyncio
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import zstrat as zs
from zstrat.config import Settings
from zstrat.launch import observe
from zstrat.launch.fleet import Allocation, FleetTask, TaskHost, TaskLaunch
from zstrat.transport import generate_keys


@pytest.mark.parametrize(
    ("engine", "package"), [("ray", "ray"), ("dask", "distributed")]
)
def test_an_engine_that_is_absent_is_named_with_its_extra(engine, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    arguments = (object(),) if engine == "dask" else ()
    with pytest.raises(ImportError, match=rf"pip install 'zstrat\[{engine}\]'"):
        getattr(zs.launch, engine)(*arguments)


@pytest.mark.parametrize("workers", [0, (0, 2), (3, 2), "1", ("1", 2), (1,), 1.5, None])
def test_numbers_of_workers_that_cannot_be(workers):
    with pytest.raises(ValueError, match="num_workers="):
        zs.launch.ray(num_workers=workers)


@pytest.mark.parametrize("count", [0, "1", 1.5])
def test_numbers_of_parameter_servers_that_cannot_be(count):
    with pytest.raises(ValueError, match=f"num_ps={count!r}.*: expected 1 or more"):
        zs.launch.ray(num_ps=count)
    with pytest.raises(ValueError, match=f"num_ps={count!r}.*: expected 1 or more"):
        Allocation("7", {"n1": 4}).tasks(count, 1)


class PretendedRay(types.ModuleType):
    """A Ray with room for everything, which says what is reserved."""

    def __init__(self):
        super().__init__("ray")
        self.reserved = []
        self.util = self

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"NodeID": "a", "NodeManagerAddress": "127.0.0.1"}]

    def placement_group(self, bundles, strategy):
        room = types.SimpleNamespace(bundle_specs=bundles, wait=lambda _: True)
        self.reserved.append(room)
        return room

    def placement_group_table(self, group):
        return {
            "bundles_to_node_id": dict.fromkeys(range(len(group.bundle_specs)), "a")
        }

    def remove_placement_group(self, group):
        self.reserved.remove(group)


def test_a_fleet_that_cannot_be_gives_its_places_back(monkeypatch, tmp_path):
    pretended = PretendedRay()
    monkeypatch.setitem(sys.modules, "ray", pretended)
    monkeypatch.setenv("ZSTRAT_LIVENESS", "much")
    with pytest.raises(ValueError, match="ZSTRAT_LIVENESS"):
        zs.launch.ray(num_ps=2, num_workers=2)
    assert pretended.reserved == []


def test_keys_of_a_trainers_worker_touch_no_disk(monkeypatch):
    backend = types.ModuleType("ray.train.backend")
    backend.Backend = backend.BackendConfig = object
    for name in ("ray", "ray.train"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.train.backend", backend)
    # Gone again afterwards: it was made with a Ray that is none.
    monkeypatch.delitem(sys.modules, "zstrat.integrations.ray", raising=False)
    from zstrat.integrations.ray import become_worker, forget_keys

    sys.modules.pop("zstrat.integrations.ray")
    monkeypatch.setenv("TF_CONFIG", "")
    monkeypatch.setenv("ZSTRAT_KEYS", "")
    keys = {"worker.secret": "s", "worker.public": "p"}
    folders = []
    for _ in range(2):
        become_worker(["127.0.0.1:2222"], 0, keys)
        folders.append(Path(os.environ["ZSTRAT_KEYS"]))
        found = {file.name: file.read_text() for file in folders[-1].iterdir()}
        assert found == keys
        assert folders[-1].stat().st_mode & 0o777 == 0o700
        if os.access("/dev/shm", os.W_OK):
            assert folders[-1].is_relative_to("/dev/shm")
    forget_keys()
    assert not any(folder.parent.exists() for folder in folders)


KILLED = """
import os, signal, sys, types
backend = types.ModuleType("ray.train.backend")
backend.Backend = backend.BackendConfig = object
for name in ("ray", "ray.train"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["ray.train.backend"] = backend
from zstrat.integrations.ray import become_worker
become_worker(["127.0.0.1:2222"], 0, {"worker.secret": "s", "worker.public": "p"})
print(os.environ["ZSTRAT_KEYS"], len(os.listdir(os.environ["ZSTRAT_KEYS"])), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_keys_of_a_trainers_worker_that_is_killed_are_removed():
    """Who removes them has the same standard output, which ends with both."""
    ran = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, check=False
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    folder, count = ran.stdout.split()
    assert count == "2"
    assert not Path(folder).parent.exists()


@pytest.mark.processes
async def test_a_daemon_beside_an_actor(tmp_path, capfd):
    generate_keys(tmp_path / "keys")
    settings = Settings(keys=tmp_path / "keys")
    files = [tmp_path / "keys" / "ps.secret", *(tmp_path / "keys").glob("*.public")]
    keys = {file.name: file.read_text() for file in files}
    launch = TaskLaunch(
        FleetTask("ps", 0, "here"), "", keys, {}, 1, 0, tmp_path / "log"
    )
    addresses = []
    for end in ("kill", "drain"):
        host = TaskHost(launch, "127.0.0.1")
        async with asyncio.timeout(60):
            addresses.append(await host.address())
            spec = zs.ClusterSpec({"ps": addresses[-1:]})
            (seen,) = await observe(spec, settings, 60)
            assert (seen.problem, seen.text("task", "job")) == ("", "ps")
            await getattr(host, end)()
            over = await host.over()
        launch = TaskLaunch(
            launch.task, addresses[-1], keys, {}, 1, 0, tmp_path / "log"
        )
        assert (over.code, over.mistake) == (-9 if end == "kill" else 0, None)
    assert addresses[0] == addresses[1]
    assert not (tmp_path / "log").exists()
    assert "ps:0" in capfd.readouterr().err
