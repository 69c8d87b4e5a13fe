"""The examples of docs/optimizers.md run as they stand, in this process and on
parameter servers; there the last optimizer of each section then moves as plain optax.
(In one process this is what test_optax_quick.py and test_optax_everywhere.py show.)"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
FENCED = re.compile(
    r"^```python *(.*?)\n(.*?)^```$|^## (.*?)$", re.MULTILINE | re.DOTALL
)


def sections():
    """By title: for each fenced block its line in the page, where it runs, and its
    source. The first section has no title, and what it defines is there in all."""
    page, title = PAGE.read_text(), ""
    found = {title: []}
    for each in FENCED.finditer(page):
        if each[3]:
            title = each[3]
        else:
            line = page[: each.start()].count("\n") + 2
            found.setdefault(title, []).append((line, each[1], each[2]))
    return found


SECTIONS = sections()


def run(title, names, where, after):
    """The blocks of a section that run in one place; ``after``: called after each."""
    for line, only, source in SECTIONS[title]:
        if only in ("", where):
            code = compile("\n" * (line - 1) + source, str(PAGE), "exec")
            exec(code, names)
            after()


def halves(shape, dtype):
    """A partitioner: tables lie on both parameter servers."""
    del dtype
    is_table = shape == (6, 2)
    return [2 if is_table and n == 0 else 1 for n in range(len(shape))]


@pytest.fixture(scope="module")
def servers(daemons):
    """Of one worker: a second one would only compile all steps again."""
    jobs = daemons.spec.as_dict()
    some = zs.ClusterSpec({"ps": jobs["ps"], "worker": jobs["worker"][:1]})
    resolver = zs.cluster_resolver.SimpleClusterResolver(some)
    with zs.ParameterServerStrategy(resolver, variable_partitioner=halves) as strategy:
        yield strategy, zs.ClusterCoordinator(strategy)


def assert_close(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-7
        )


def assert_moves_as_optax(optimizer, params):
    """Two updates of it, beside the same of plain optax."""
    transformation = optimizer.transformation
    is_told = isinstance(transformation, optax.GradientTransformationExtraArgs)
    extra = {"value": np.float32(2)} if is_told else {}

    @jax.jit
    def moved(gradients, state, values):
        updates, state = transformation.update(gradients, state, values, **extra)
        return optax.apply_updates(values, updates), state

    values, state = zs.values(params), optimizer.state
    for number in range(2):
        gradients = jax.tree.map(lambda leaf, n=number: np.cos(leaf + n), values)
        optimizer.apply_gradients(gradients, params, **extra)
        values, state = moved(gradients, state, values)
        values = jax.tree.map(np.asarray, values)
    assert_close(zs.values(params), values)
    assert_close(optimizer.state, state)


def of_a_process():
    """The sections with a block of their own for it; `make test-thorough` runs all,
    most of which are the same blocks as on servers."""
    for title, blocks in SECTIONS.items():
        if title:
            has_own = any(only == "in-process" for _, only, _ in blocks)
            yield pytest.param(title, marks=[] if has_own else pytest.mark.thorough)


@pytest.mark.parametrize("title", [*of_a_process()])
def test_the_examples_run_in_a_process(title, tmp_path):
    strategy = zs.OneDeviceStrategy("CPU:0")
    names = {"strategy": strategy, "folder": tmp_path / "saved"}

    def after():
        for step in [name for name in names if name.endswith("_step")]:
            with strategy.scope():
                names.pop(step)(names["batch"])

    run("", names, "in-process", after)
    run(title, names, "in-process", after)


@pytest.mark.parametrize("title", [title for title in SECTIONS if title])
def test_the_examples_run_on_servers(servers, title, tmp_path):
    strategy, coordinator = servers
    names = {"strategy": strategy, "folder": tmp_path / "saved"}

    def after():
        for step in [name for name in names if name.endswith("_step")]:
            coordinator.schedule(names.pop(step), args=(names["batch"],))
            coordinator.join()

    run("", names, "servers", after)
    run(title, names, "servers", after)
    if title == "Clipping":
        assert "mixes variables" in names["refusal"]
    if "optimizer" in names:
        assert_moves_as_optax(names["optimizer"], names["params"])


def test_the_clipping_of_a_step_is_that_of_the_dense_gradient():
    """The page says that rows count once, however often they are looked up."""
    names = {"strategy": zs.OneDeviceStrategy("CPU:0")}
    run("", names, "", lambda: None)
    run("Clipping", names, "", lambda: None)
    params, batch, start = names["params"], names["batch"], names["start"]

    def loss_fn(values):
        rows = values["table"][batch["ids"]]
        made = rows @ values["dense"]["kernel"] + values["dense"]["bias"]
        return jnp.mean((made - batch["y"]) ** 2)

    names["train_step"](batch)
    transformation = names["optimizer"].transformation
    values = jax.tree.map(jnp.asarray, start)

    @jax.jit
    def moved(values):
        updates, _ = transformation.update(
            jax.grad(loss_fn)(values), transformation.init(values), values
        )
        return optax.apply_updates(values, updates)

    assert_close(zs.values(params), moved(values))
