"""Pages of docs/ and examples that share one cluster, which each of them believes to
have started: the code of a page runs as it stands, block after block, as one program,
and an example from its arguments to its exit code."""

from __future__ import annotations

import importlib.util
import re
import sys
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from pathlib import Path

import jax
import numpy as np
import pytest

import zstrat as zs
from zstrat.launch import LocalCluster
from zstrat.transport.health import HealthServer

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
FENCED = re.compile(r"^```python *(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = {"optimizers", "slow_links", "testing", "tutorial", "which_consistency"}
"""Pages with tests of their own: test_optax_docs, test_testing_clusters, and below."""
PAGES = [
    page.stem
    for page in sorted((ROOT / "docs").glob("*.md"))
    if FENCED.search(page.read_text()) and page.stem not in ELSEWHERE
]


class SharedCluster:
    """Some tasks of a cluster that was started before and lasts longer."""

    def __init__(self, cluster, num_ps, num_workers):
        jobs = cluster.spec.as_dict()
        some = {"ps": jobs["ps"][:num_ps], "worker": jobs["worker"][:num_workers]}
        self.resolver = zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec(some))
        self.kill, self.restart = cluster.kill, cluster.restart

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


@pytest.fixture(scope="module")
def daemons():
    with zs.LocalCluster(num_ps=2, num_workers=2) as cluster:
        yield cluster


def share(cluster, monkeypatch, folder):
    """Gives a program these daemons when it starts a cluster, and a file that names
    them."""

    def started(num_ps, num_workers):
        return SharedCluster(cluster, num_ps, num_workers)

    monkeypatch.setattr(zs, "LocalCluster", started)
    monkeypatch.chdir(folder)
    jobs = cluster.spec.as_dict().items()
    lines = [f"{job} = {[*tasks]!r}".replace("'", '"') for job, tasks in jobs]
    (folder / "cluster.toml").write_text("\n".join(["[cluster]", *lines]))


@pytest.fixture
def shared(daemons, monkeypatch, tmp_path):
    """The folder of a program that uses the daemons of other tests."""
    share(daemons, monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Daemons of a program that kills some."""
    with LocalCluster(num_ps=2, num_workers=2) as cluster:
        share(cluster, monkeypatch, tmp_path)
        yield


@pytest.fixture
def run(shared, monkeypatch, capsys):
    """Runs an example; returns its exit code and what it printed."""

    def run(name, *arguments):
        script = ROOT / "examples" / name
        spec = importlib.util.spec_from_file_location(script.stem, script)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.syspath_prepend(str(script.parent))
        monkeypatch.setitem(sys.modules, script.stem, module)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        spec.loader.exec_module(module)
        return module.main(), capsys.readouterr().out

    return run


def blocks(page):
    """For each fenced block of Python: the library that it needs beside those of the
    tests, and its code, with the numbers of its lines in the page."""
    text = page.read_text()
    for block in FENCED.finditer(text):
        line = text[: block.start()].count("\n") + 1
        yield block[1], compile("\n" * line + block[2], str(page), "exec")


def test_a_model_of_flax_learns_in_few_steps(run):
    for module in ("flax", "sklearn"):
        if is_missing(module):
            pytest.skip(f"needs {module}, for this jax: install zstrat[examples]")
    few = ["--ps", "1", "--workers", "1", "--epochs", "3"]
    code, out = run("flax_nnx_ps.py", *few)
    (accuracy,) = re.findall(r"test accuracy (\S+)% \(goal 95%\)$", out, re.MULTILINE)
    assert float(accuracy) > 80
    assert code == (0 if float(accuracy) >= 95 else 1)


def test_a_recommender_goes_on_with_another_number_of_servers(run):
    few = ["--workers", "1", "--steps", "8", "--every", "8", "--rate", "1"]
    code, out = run("recommender.py", *few, "--ps", "1", "--then-ps", "2")
    line = r"^ *(\S+) +(\d) +(\d+) +(\S+) +(\S+)%$"
    start, trained, saved, more = re.findall(line, out, re.MULTILINE)
    assert float(start[3]) == pytest.approx(0.6931, abs=1e-4)  # log 2: it knows nothing
    assert [row[:2] for row in (start, trained, more)] == [
        ("0", "1"),
        ("8", "1"),
        ("+8", "2"),
    ]
    # Ten tables; three of them have more than 2 * 64 KiB, so two servers have parts.
    assert (trained[2], saved[2]) == ("10", "13")
    assert saved[3:] == trained[3:] != start[3:]
    assert saved[3:] != more[3:]
    # Three arrays of the network beside the ten tables, and what Adagrad sums of each.
    assert "equal: 26 arrays, of tables, network and optimizer\n" in out
    (area,) = re.findall(r"^AUC (\S+)% \(goal 70%\)$", out, re.MULTILINE)
    assert area == more[4]
    assert code == (0 if float(area) >= 70 else 1)


def test_items_that_come_and_go(run):
    few = ["--ps", "2", "--workers", "1", "--steps", "160", "--every", "80"]
    code, out = run("new_ids.py", *few, "--sold", "200", "--new", "10")
    lines = re.findall(r"^ *(\d+) +(\S+)% +(\S+)% +(\d+)$", out, re.MULTILINE)
    assert [line[0] for line in lines] == ["80", "160"]
    assert float(lines[-1][1]) > float(lines[-1][2])
    assert int(lines[-1][3]) < 200 + 160 * 10, "old rows are evicted"
    assert code == 0


STEP = """
import jax.numpy as jnp, numpy as np, optax
import zstrat as zs

strategy = zs.ParameterServerStrategy(resolver)
with strategy.scope():
    params = zs.create_variables({"w": jnp.ones(64)})

model = lambda params, rows: rows @ params["w"]
train_step = zs.function(lambda iterator: next(iterator))
dataset_fn = lambda: zs.data.Dataset.range(1).repeat()
"""
"""What the parts of programs in the README take as given."""


async def test_the_parts_of_programs_in_the_readme_run(daemons, request, tmp_path):
    text = (ROOT / "README.md").read_text()
    text = text.replace("100_000_000", "100").replace("/mnt/shared", str(tmp_path))
    parts = [block[2] for block in FENCED.finditer(text)]
    of_async, tables, saving = [
        next(part for part in parts if word in part)
        for word in ("AsyncClusterCoordinator", "embedding_lookup", "CheckpointManager")
    ]
    names = {"__name__": "__main__", "resolver": daemons.resolver}
    request.addfinalizer(lambda: ended(names))
    exec(STEP, names)
    await eval(compile(of_async, "README", "exec", PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    exec(tables, names)
    with names["strategy"].scope():
        exec('params = zs.create_variables({"w": jnp.ones(64)})', names)
    coordinator = zs.ClusterCoordinator(names["strategy"])
    batch = {"ids": np.array([[3, 99]]), "y": np.ones((1, 2), "float32")}
    iterator = iter(coordinator.create_per_worker_dataset([batch] * 2))
    coordinator.schedule(names["train_step"], args=(iterator,)).fetch()
    exec(saving, names)
    assert [path.name for path in (tmp_path / "run1").glob("ckpt-*")] == ["ckpt-1"]
    names["manager"].close()


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, shared, request):
    run_page(page, request)


@pytest.mark.usefixtures("alone")
def test_the_tutorial_runs(request):
    run_page("tutorial", request)


def test_rounds_of_two_workers_run(request):
    run_page("which_consistency", request)


def test_windows_of_two_workers_run(request):
    run_page("slow_links", request)


def run_page(page, request):
    names = {"__name__": "__main__"}
    request.addfinalizer(lambda: ended(names))
    for needed, code in blocks(ROOT / "docs" / f"{page}.md"):
        if needed and is_missing(needed):
            continue
        exec(code, names)


def is_missing(library):
    """Whether a library is not installed, or was made for another jax."""
    if importlib.util.find_spec(library) is None:
        return True
    try:
        importlib.import_module("flax.nnx" if library == "flax" else library)
    except AttributeError:
        if library != "flax" or jax.version.__version_info__ < (0, 12):
            raise
        return True  # as flax 0.12.8 with jax 0.12
    return False


def ended(names):
    """A page that failed, or does not say goodbye, lets the cluster go."""
    strategy, served = names.get("strategy"), names.get("page")
    cluster = names.get("cluster")
    if isinstance(served, HealthServer):
        served.close()
    if isinstance(strategy, zs.ParameterServerStrategy):
        strategy.close()
    if isinstance(cluster, LocalCluster):
        cluster.close()
