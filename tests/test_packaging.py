"""The source distribution, which has the whole checkout, and the wheel that is built of
it, installed somewhere else and used from a folder that is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
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


MADE = ("PKG-INFO", "setup.cfg", "zstrat.egg-info")
"""What a build adds to a source distribution."""
LEFT = (".git", ".venv", "__pycache__", "build", "dist", "out", *MADE)
"""What git and tools leave in a checkout, with caches, whose names begin with a dot."""


def checkout(*options: str) -> set[str]:
    """The files of this checkout by their paths: what git says, or where there is no
    git, as in an unpacked source distribution, all that no tool has left."""
    if (ROOT / ".git").exists():
        names = run("git", "ls-files", "-z", *options, cwd=ROOT).split("\0")
        return {name for name in names if name and (ROOT / name).exists()}
    found = set()
    for folder, folders, files in os.walk(ROOT):
        kept = [name for name in folders if name not in LEFT]
        folders[:] = [name for name in kept if name == ".ci" or name[0] != "."]
        sources = [name for name in files if not name.endswith(".so")]
        found |= {str(Path(folder, name).relative_to(ROOT)) for name in sources}
    return found - set(LEFT)


BUILD = """
import sys
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""
"""What pip and build call, in the folder of the sources."""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built offline from a copy: a build in the checkout would leave files in it."""
    work = tmp_path_factory.mktemp("sdist")
    source = work / "source"
    source.mkdir()
    files = checkout("--cached", "--others", "--exclude-standard")
    run("cp", "--parents", "--target-directory", source, *sorted(files), cwd=ROOT)
    run(sys.executable, "-c", BUILD, "build_sdist", work, cwd=source)
    (built,) = work.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    work = sdist.parent
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    source = work / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-c", BUILD, "build_wheel", work, cwd=source)
    (built,) = work.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that sees the wheel and not the checkout."""
    target = tmp_path_factory.mktemp("target")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return {"PYTHONPATH": str(target), "PYTHONSAFEPATH": "1"}


def test_the_source_distribution_has_what_a_checkout_has(sdist: Path) -> None:
    """So `make test` works in it."""
    with tarfile.open(sdist) as archive:
        files = {each.name: each for each in archive.getmembers() if each.isfile()}
    top = f"{sdist.name.removesuffix('.tar.gz')}/"
    names = {name.removeprefix(top) for name in files}
    wanted = checkout()
    assert wanted <= names, sorted(wanted - names)
    added = {name.split("/")[0] for name in names - checkout("--cached", "--others")}
    assert added <= set(MADE)
    assert files[f"{top}.ci/run"].mode & 0o100, "it is to be run"


def test_what_is_said_of_the_project(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        said = Parser().parsestr(archive.read(name).decode())
    assert said["Author"] == "The zstrat authors"
    assert said["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in said.get_all("Classifier")


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


@pytest.mark.skipif(
    shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is None,
    reason="needs the C compiler that this Python was built with",
)
def test_the_compiled_loops_are_for_all_versions_of_python(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert "zstrat/native/_loops.abi3.so" in archive.namelist()


def test_without_a_compiler_it_is_installed_without_loops(
    sdist: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    none = {"CC": "false"}
    run(sys.executable, "-c", BUILD, "build_wheel", tmp_path, cwd=source, env=none)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
    assert "zstrat/native/_rows.py" in names
    assert not [name for name in names if name.endswith(".so")]


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
