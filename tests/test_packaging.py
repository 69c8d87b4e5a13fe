"""The wheel, installed somewhere else and used from a folder that is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (".html", ".css", ".js")


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    ran = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built offline from a copy: a build in the checkout would leave files in it."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "zstrat", "daemons"):
        run("cp", "-r", ROOT / name, source, cwd=work)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", work]
    run(*pip, "wheel", *options, source, cwd=work)
    (built,) = work.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that sees the wheel and not the checkout."""
    target = tmp_path_factory.mktemp("target")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return {"PYTHONPATH": str(target), "PYTHONSAFEPATH": "1"}


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (top,) = [name for name in names if name.endswith("top_level.txt")]
        assert archive.read(top).decode().split() == ["zstrat"]
        (entries,) = [name for name in names if name.endswith("entry_points.txt")]
        text = archive.read(entries).decode()
    assert "zstrat-ps = zstrat.daemons.ps:main" in text
    assert "zstrat-worker = zstrat.daemons.worker:main" in text
    assert "zstrat = zstrat.cli:main" in text
    on_disk = {
        str(path.relative_to(ROOT)).replace("daemons/", "zstrat/daemons/", 1)
        for folder in ("zstrat", "daemons")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".service", ".target", ".typed", *PAGE)
    }
    assert on_disk <= set(names), on_disk - set(names)


def test_importable_from_anywhere(installed: dict[str, str], tmp_path: Path) -> None:
    program = """
import importlib.resources, importlib.util, zstrat
import zstrat.cli, zstrat.daemons.ps, zstrat.daemons.worker
assert importlib.util.find_spec("daemons") is None
units = importlib.resources.files("zstrat.daemons") / "systemd"
from zstrat.transport.health import HealthServer, dashboard
with dashboard() as server:
    import urllib.request
    assert b"Steps per second" in urllib.request.urlopen(server.url).read()
print(zstrat.__file__)
print(*sorted(unit.name for unit in units.iterdir()))
"""
    out = run(sys.executable, "-c", program, cwd=tmp_path, env=installed)
    where, units = out.splitlines()
    assert where.startswith(installed["PYTHONPATH"])
    assert units.split() == [
        "zstrat-evaluator@.service",
        "zstrat-ps@.service",
        "zstrat-worker@.service",
        "zstrat.target",
    ]


@pytest.mark.parametrize(
    "module", ["zstrat.daemons.ps", "zstrat.daemons.worker", "zstrat.cli", "zstrat"]
)
def test_programs_run(installed: dict[str, str], tmp_path: Path, module: str) -> None:
    out = run(sys.executable, "-m", module, "--help", cwd=tmp_path, env=installed)
    assert "usage" in out.lower()


def test_the_checkout_is_used_from_anywhere(tmp_path: Path) -> None:
    """An editable install: the packages of the checkout, and no other name of it."""
    program = """
import importlib.util, sys
import zstrat, zstrat.cli, zstrat.daemons.ps, zstrat.daemons.worker
for name in ("daemons", "tests", "benchmarks", "examples"):
    spec = importlib.util.find_spec(name)
    where = [] if spec is None else list(spec.submodule_search_locations or [])
    assert not any(path.startswith(sys.argv[1]) for path in where), (name, where)
assert importlib.util.find_spec("daemons") is None
print(zstrat.__file__, zstrat.daemons.ps.__file__, sep="\\n")
"""
    clean = {"PYTHONPATH": ""}
    out = run(sys.executable, "-c", program, ROOT, cwd=tmp_path, env=clean)
    if not out.startswith(str(ROOT)):
        pytest.skip("zstrat is installed from a wheel here, not from this checkout")
    assert out.splitlines() == [
        str(ROOT / "zstrat" / "__init__.py"),
        str(ROOT / "daemons" / "ps.py"),
    ]
