"""What the doctor finds, without a cluster and with a broken one."""

import asyncio
from pathlib import Path

from zstrat.cluster import ClusterSpec
from zstrat.config import Settings
from zstrat.launch import TaskStatus, examine
from zstrat.launch._doctor import version_differences
from zstrat.transport import generate_keys, run


def by_name(findings):
    return {finding.what: finding for finding in findings}


def test_without_a_cluster():
    findings = by_name(run(examine(None, Settings(), 1.0)))
    assert findings["python"].ok
    assert findings["jax"].ok
    assert findings["keys"].ok is None
    assert "--cluster" in findings["cluster"].advice


def test_unreachable_task_is_named():
    spec = ClusterSpec({"ps": ["127.0.0.1:9"], "worker": ["127.0.0.1:9"]})
    findings = by_name(run(examine(spec, Settings(), 0.2)))
    assert findings["ps:0"].ok is False
    assert "127.0.0.1:9" in findings["ps:0"].words
    assert findings["worker:0"].ok is False


async def behind_a_closed_door(timeout):
    """What is found where connections are taken and closed, as for other keys."""
    door = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    host, port = door.sockets[0].getsockname()
    async with door:
        return await examine(
            ClusterSpec({"ps": [f"{host}:{port}"]}), Settings(), timeout
        )


def test_who_is_not_let_in_is_not_sent_to_look_for_a_firewall():
    found = by_name(run(behind_a_closed_door(0.5)))["ps:0"]
    assert found.ok is False
    assert "the handshake failed" in found.words
    assert "zstrat keygen" in found.words
    assert "firewall" not in found.words + found.advice


def test_keys_that_are_not_there(tmp_path):
    settings = Settings(keys=Path(tmp_path / "nowhere"))
    keys = by_name(run(examine(None, settings, 1.0)))["keys"]
    assert keys.ok is False
    assert "zstrat keygen" in keys.words


def test_a_secret_that_cannot_be_used_is_named_though_others_can(tmp_path):
    folder = tmp_path / "keys"
    generate_keys(folder)
    settings = Settings(keys=folder)
    (folder / "chief.secret").unlink()
    keys = by_name(run(examine(None, settings, 1.0)))["keys"]
    assert keys.ok
    assert keys.words.endswith("has the secrets of worker, ps, evaluator, observer")
    (folder / "ps.secret").chmod(0o644)
    (folder / "worker.secret").write_text("no key")
    keys = by_name(run(examine(None, settings, 1.0)))["keys"]
    assert keys.ok is False
    assert "ps.secret has mode 0644" in keys.words
    assert "worker.secret is not a key" in keys.words


def test_versions():
    mine = {"jax": "0.10.2", "numpy": "2.4.6"}
    assert version_differences(mine, {"jax": "0.10.9", "numpy": "2.4.6"}) == []
    assert version_differences(mine, {"jax": "0.9.2"}) == [
        "jax 0.9.2 there, 0.10.2 here"
    ]
    assert version_differences(mine, {}) == []


def test_sight_reads_what_is_there():
    sight = TaskStatus("ps:0", "h:1", values={"task": {"job": "ps", "uptime": 1.5}})
    assert sight.number("task", "uptime") == 1.5
    assert sight.text("task", "job") == "ps"
    assert sight.number("task", "job") == 0
    assert sight.text("service", "nothing", "there") == ""
