"""The HTTP port of daemons and of a program that trains on them."""

from __future__ import annotations

import functools
import http.client
import json
import operator
import os
import signal
import socket
import subprocess
import sys

import jax.numpy as jnp
import pytest

import zstrat as zs
from zstrat.config import Settings
from zstrat.launch import observe
from zstrat.telemetry import metrics_of
from zstrat.transport import run as run_loop

STAND_STILL = {
    ("index",),
    ("incarnation",),
    ("pid",),
    ("time",),
    ("session",),
    ("low_water",),
}
"""Numbers that say who or when, and not how many."""

OBSERVED = {
    *("phases", "staleness", "time", "stalls", "transports", "now", "program", "tasks"),
    *("examples_per_s", "slowest", "scalars", "logs"),
}
"""What zstrat.telemetry makes, of a task and of the run."""

OF_BACKUPS = {
    ("service", "replication", "behind"),
    ("service", "replication", "log_bytes"),
    ("service", "replication", "unacknowledged"),
    ("coordinator", "failovers"),
    ("coordinator", "stores_without_backup"),
}
"""What is reported only if parameter servers have backups."""

REPORTS = {
    "ps": "add them to statistics() of ServiceTelemetry (zstrat/ps/_server_session.py)",
    "worker": "add them to statistics() of WorkerService (zstrat/worker/_service.py)",
}
"""What is to be done, by job; else `COORDINATOR`."""

COORDINATOR = "add them to metrics() of Core (zstrat/coordinator/_core.py)"

TWICE = {("service", "uptime")}

TOLD_OTHERWISE = ("phases", "staleness", "tasks", "transports", "time")
"""As histograms, or with labels: of tasks alone, and not again of their program."""


def get(port, path):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    line.request("GET", path)
    reply = line.getresponse()
    status, text = reply.status, reply.read().decode()
    line.close()
    return status, text


def numbers(values, path=()):
    """The places of all numbers in a tree of dicts."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from numbers(value, (*path, key))
        elif isinstance(value, int | float):
            yield (*path, key)


def is_missing(values, path):
    try:
        functools.reduce(operator.getitem, path, values)
    except LookupError:
        return True
    return False


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@pytest.mark.processes
def test_a_cluster_that_trains_and_its_program():
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    spec = {job: [f"127.0.0.1:{free_port()}"] for job in ("ps", "worker")}
    with zs.Server(spec, "ps", 0), zs.Server(spec, "worker", 0):
        with zs.serve_http("127.0.0.1:0", liveness_timeout=60) as server:
            port = int(server.address.rpartition(":")[2])
            resolver = zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec(spec))
            strategy = zs.ParameterServerStrategy(resolver)
            with strategy.scope():
                table = zs.Variable(jnp.zeros((3,)), name="table")

            @zs.function
            def step():
                table.assign_add(jnp.ones((3,)))

            coordinator = zs.ClusterCoordinator(strategy)
            for _ in range(5):
                coordinator.schedule(step)
            coordinator.join()
            words = "ps:0: ok\nworker:0: ok\nchief:0: ok\n"
            assert get(port, "/readyz") == (200, words)
            _, text = get(port, "/metrics")
            metrics = coordinator.metrics()
            looked = run_loop(observe(zs.ClusterSpec(spec), Settings(), 60))
            strategy.close()
            assert get(port, "/readyz") == (200, "ps:0: ok\nworker:0: ok\n")
    found = {
        (sample.name, sample.labels.get("task"), sample.labels.get("worker")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["zstrat_ps_updates_total", "ps:0", None].value == 5
    assert found["zstrat_ps_value_bytes", "ps:0", None].value == 12
    assert found["zstrat_worker_done_total", "worker:0", None].value == 5
    phases = {
        sample.labels["phase"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "zstrat_phase_seconds_count"
    }
    assert (phases["compute"], phases["apply"]) == (5, 5)
    assert ("zstrat_transport_bytes_total", "ps:0", None) in found
    assert found["zstrat_scheduled_closures_total", "chief:0", None].value == 5
    name = "zstrat_coordinator_worker_completed_total"
    assert found[name, "chief:0", "worker:0"].value == 5
    # Nothing that status --json counts is left out.
    seen = [(each.task.partition(":")[0], dict(each.values)) for each in looked]
    seen.append(("chief", {"coordinator": dict(metrics)}))
    # All metrics are reported: the number of one that is not would be 0.
    reports = [*seen, *(("member", each) for each in metrics["workers"].values())]
    for job, values in reports:
        paths = {each.path for each in metrics_of(job)}
        missing = {path for path in paths if is_missing(values, path)}
        missing -= OF_BACKUPS
        remedy = REPORTS.get(job, COORDINATOR)
        assert not missing, f"no part of the task reports {missing}: {remedy}"
    for job, values in seen:
        for repeated in (*TOLD_OTHERWISE, "workers"):
            values.get("coordinator", values).pop(repeated, None)
        told = {metric.path for metric in metrics_of(job)} | TWICE
        there = {at for at in numbers(values) if at[-1:] not in STAND_STILL}
        there = {at for at in there if OBSERVED.isdisjoint(at[:2])}
        unknown = there - told
        assert not unknown, f"a {job} reports {unknown}: add lines to METRICS"
        shown = {each.prometheus for each in metrics_of(job) if each.path in there}
        assert shown - {""} <= {name.removesuffix("_total") for name, _, _ in found}


@pytest.mark.parametrize("job", ["ps", "worker", "chief", "program", "member"])
def test_each_number_is_told_once(job):
    names = [each.prometheus for each in metrics_of(job) if each.prometheus]
    assert len(names) == len(set(names)) > 2


@pytest.mark.processes
def test_a_daemon_says_that_it_is_ready_and_when_it_drains():
    port = free_port()
    ps = ["--index", "0", "--bind", "127.0.0.1:0", "--http", str(port)]
    read, write = os.pipe()
    command = [sys.executable, "-m", "zstrat.daemons.ps", *ps, "--report", str(write)]
    with subprocess.Popen(
        command, pass_fds=[write], stderr=subprocess.PIPE, text=True
    ) as daemon:
        os.close(write)
        with os.fdopen(read) as report:
            assert json.loads(report.readline())["address"]
        assert get(port, "/healthz") == (200, "ps:0: ok\n")
        assert get(port, "/readyz") == (200, "ps:0: ok\n")
        daemon.send_signal(signal.SIGTERM)
        assert daemon.stderr.read().count("http://127.0.0.1:") == 1
    assert daemon.returncode == 0
    with pytest.raises(ConnectionRefusedError):
        get(port, "/healthz")


def test_a_task_that_ends_is_not_ready_for_another_session():
    with zs.Server.create_local_server() as server:
        task = server._run.task
        assert task.readiness() == ""
        server.stop()
        assert task.readiness() == "ending: stopped by its program"


def test_a_member_of_groups_is_told_of_too(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    task = {"type": "worker", "index": 0}
    config = {"cluster": {"worker": [address]}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with zs.serve_http("127.0.0.1:0", liveness_timeout=60) as server:
        port = int(server.address.rpartition(":")[2])
        group = zs.collectives.Group()
        assert get(port, "/readyz") == (200, "worker:0: ok\n")
        group.close()
        assert get(port, "/readyz")[0] == 503
