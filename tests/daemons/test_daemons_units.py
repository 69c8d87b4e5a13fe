"""The systemd units: complete, and what systemd itself thinks of them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from zstrat.config import Timeouts
from zstrat.launch import write_units

NAMES = [
    "zstrat-evaluator@.service",
    "zstrat-ps@.service",
    "zstrat-worker@.service",
    "zstrat.target",
]


@pytest.fixture
def bindir(tmp_path):
    """Programs that exist, for systemd looks whether they do."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("zstrat-evaluator", "zstrat-ps", "zstrat-worker"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def units(bindir, tmp_path):
    written = write_units(bindir, tmp_path / "units", Path("/etc/zstrat"))
    return {path.name: path for path in written}


def settings(unit):
    """``Section.Key`` to its values; fails on a line that is none of a unit file's."""
    found = {}
    section = ""
    for line in unit.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
            continue
        pair = re.fullmatch(r"([A-Za-z]+)=(.*)", line)
        assert pair, f"{unit.name}: {line!r} is no line of a unit file"
        assert section, f"{unit.name}: {line!r} stands before any section"
        found.setdefault(f"{section}.{pair[1]}", []).append(pair[2])
    return found


def test_all_are_written(units):
    assert sorted(units) == NAMES
    for unit in units.values():
        text = unit.read_text()
        assert "@BINDIR@" not in text
        assert "@CONFIG@" not in text


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_service(units, bindir, job):
    unit = settings(units[f"zstrat-{job}@.service"])
    assert unit["Service.Type"] == ["notify"]
    assert unit["Service.ExecStart"] == [
        f"{bindir}/zstrat-{job} --cluster /etc/zstrat/cluster.toml --index %i --keys %d"
    ]
    assert unit["Install.WantedBy"] == unit["Unit.PartOf"] == ["zstrat.target"]
    timeouts = Timeouts()
    longest = timeouts.drain + (timeouts.handover if job == "ps" else 0.0)
    assert float(unit["Service.TimeoutStopSec"][0]) > longest
    assert unit["Service.StateDirectory"] == [f"zstrat/{job}-%i"]
    assert unit["Service.RestartPreventExitStatus"] == ["2"]
    assert unit["Unit.StartLimitIntervalSec"] == ["0"]  # 75 is tried for ever
    secrets = [c for c in unit["Service.LoadCredential"] if ".secret" in c]
    assert secrets == [f"{job}.secret:/etc/zstrat/keys/{job}.secret"]
    assert len(unit["Service.LoadCredential"]) == 6
    for hardening in ("NoNewPrivileges", "ProtectSystem", "DynamicUser", "PrivateTmp"):
        assert unit[f"Service.{hardening}"] != ["no"]
    # XLA writes machine code and reads /proc/cpuinfo, on a ps as on a worker.
    assert "Service.MemoryDenyWriteExecute" not in unit
    assert "Service.ProcSubset" not in unit


def test_refused(bindir, tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        write_units(tmp_path, tmp_path / "units", Path("/etc/zstrat"))
    with pytest.raises(ValueError, match="absolute path"):
        write_units(bindir, tmp_path / "units", Path("etc"))
    with pytest.raises(ValueError, match="absolute path"):
        write_units(bindir, tmp_path / "units", Path("/etc/my zstrat"))


def test_systemd_has_nothing_to_say(units):
    """``verify`` exits with 0 on an unknown key and only prints: any output fails."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed here")
    ran = subprocess.run(
        [program, "verify", "--man=no", *(str(path) for path in units.values())],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
