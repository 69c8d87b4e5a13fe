"""The examples of docs/optimizers.md run as they stand, in this process and on
parameter servers; there each optimizer that they make then moves as plain optax does.
(In one process this is what test_optax_quick.py and test_optax_everywhere.py show.)"""

import re
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
FENCED = re.compile(r"^```python *(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks():
    """For each fenced block: its line in the page, where it runs, and its source."""
    page = PAGE.read_text()
    return [
        (page[: found.start()].count("\n") + 2, found[1], found[2])
        for found in FENCED.finditer(page)
    ]


def halves(shape, dtype):
    """A partitioner: tables lie on both parameter servers."""
    del dtype
    is_table = shape == (6, 2)
    return [2 if is_table and n == 0 else 1 for n in range(len(shape))]


@contextmanager
def in_process():
    yield zs.OneDeviceStrategy("CPU:0"), None


@contextmanager
def servers():
    with zs.LocalCluster(num_ps=2, num_workers=1) as cluster:
        with zs.ParameterServerStrategy(
            cluster.resolver, variable_partitioner=halves
        ) as strategy:
            yield strategy, zs.ClusterCoordinator(strategy)


def ran(step, batch, strategy, coordinator):
    """One step, as programs of that strategy take it."""
    if coordinator is None:
        with strategy.scope():
            step(batch)
    else:
        coordinator.schedule(step, args=(batch,))
        coordinator.join()


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
    values, state = zs.values(params), optimizer.state
    for number in range(2):
        gradients = jax.tree.map(lambda leaf, n=number: np.cos(leaf + n), values)
        optimizer.apply_gradients(gradients, params, **extra)
        updates, state = transformation.update(gradients, state, values, **extra)
        values = jax.tree.map(np.asarray, optax.apply_updates(values, updates))
    assert_close(zs.values(params), values)
    assert_close(optimizer.state, state)


@pytest.mark.parametrize("place", [in_process, servers])
def test_the_examples_run(place, tmp_path):
    with place() as (strategy, coordinator):
        names = {"strategy": strategy, "folder": tmp_path / "saved"}
        for line, where, source in blocks():
            if where and where != place.__name__.replace("_", "-"):
                continue
            if place is servers and "zs.Optimizer(" in source and "optimizer" in names:
                assert_moves_as_optax(names.pop("optimizer"), names["params"])
            code = compile("\n" * (line - 1) + source, str(PAGE), "exec")
            exec(code, names)
            for step in [name for name in names if name.endswith("_step")]:
                ran(names.pop(step), names["batch"], strategy, coordinator)
        assert ("refusal" in names) == (place is servers)


def test_the_clipping_of_a_step_is_that_of_the_dense_gradient():
    """The page says that rows count once, however often they are looked up."""
    names = {"strategy": zs.OneDeviceStrategy("CPU:0")}
    clipping = [source for _, where, source in blocks()[:3] if not where]
    for source in clipping:
        exec(source, names)
    params, batch, start = names["params"], names["batch"], names["start"]

    def loss_fn(values):
        rows = values["table"][batch["ids"]]
        made = rows @ values["dense"]["kernel"] + values["dense"]["bias"]
        return jnp.mean((made - batch["y"]) ** 2)

    names["train_step"](batch)
    transformation = names["optimizer"].transformation
    values = jax.tree.map(jnp.asarray, start)
    updates, _ = transformation.update(
        jax.grad(loss_fn)(values), transformation.init(values), values
    )
    assert_close(zs.values(params), optax.apply_updates(values, updates))
