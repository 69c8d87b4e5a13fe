"""Checkpoints of variables on parameter servers: from any layout to any other."""

from __future__ import annotations

import asyncio
import contextlib
import os

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saving_cluster import FakeCluster

from zstrat import saving
from zstrat.checkpoint import Manifest, verify
from zstrat.errors import NotFoundError, PSUnavailableError, ResourceExhaustedError
from zstrat.saving import Checkpoint, CheckpointManager, export_safetensors
from zstrat.variables import IndexedSlices, Optimizer, Variable

ROWS = 7
ADAM = optax.adam(0.1)  # one for all examples, so that it is traced once
layouts = st.tuples(
    st.integers(1, 3), st.integers(1, ROWS), st.sets(st.integers(0, 2), max_size=3)
)


def program(servers: int, parts: int, shared: set[int]):
    cluster = FakeCluster(servers, shared)
    table = cluster.variable(np.zeros((ROWS, 2), "f4"), parts, "table")
    bias = cluster.variable(np.zeros(3, "f4"), 1, "bias")
    optimizer = cluster.optimizer(ADAM)
    return cluster, {"table": table, "bias": bias}, optimizer


def trained(variables, optimizer, seeds):
    for seed in seeds:
        draw = np.random.default_rng(seed).normal
        optimizer.apply_gradients(
            {n: draw(size=v.shape).astype("f4") for n, v in variables.items()},
            variables,
        )


@pytest.fixture(scope="module")
def after_four_steps():
    _, variables, optimizer = program(1, 1, set())
    trained(variables, optimizer, range(4))
    return {name: variable.numpy() for name, variable in variables.items()}


@settings(max_examples=12)
@given(layouts, layouts)
def test_from_any_layout_to_any_other(tmp_path_factory, after_four_steps, one, other):
    """The textbook: saved after two steps, restored elsewhere, and two steps more give
    what four steps give."""
    folder = tmp_path_factory.mktemp("c")
    cluster, variables, optimizer = program(*one)
    trained(variables, optimizer, range(2))
    path = Checkpoint(v=variables, o=optimizer).write(folder / "c")
    assert not cluster.client.snapshots  # let go
    manifest = Manifest.of(path)
    verify(path, manifest)
    assert manifest.tensors["v/table"].shape == (ROWS, 2)
    assert manifest.tensors["o/.slots/v/table/[0].mu"].shape == (ROWS, 2)

    cluster, variables, optimizer = program(*other)
    trained(variables, optimizer, [9])  # slots that have to go
    Checkpoint(v=variables, o=optimizer).restore(path).assert_consumed()
    trained(variables, optimizer, range(2, 4))
    for name, variable in variables.items():
        np.testing.assert_array_equal(variable.numpy(), after_four_steps[name])
    assert not cluster.client.snapshots


def test_who_writes_what(tmp_path):
    cluster, variables, optimizer = program(3, 3, {0, 2})
    path = Checkpoint(v=variables, o=optimizer).write(tmp_path / "c")
    asked = cluster.client.asked
    assert sorted(set(asked)) == ["read 1", "write 0", "write 2"]
    assert len(Manifest.of(path).files) == 3
    asked.clear()
    Checkpoint(v=variables, o=optimizer).restore(path)
    assert sorted(asked) == ["load 0", "load 2", "store 1"]


def test_saving_restoring_and_exporting_are_between_two_steps(tmp_path):
    cluster = FakeCluster(2)
    table = cluster.variable(np.arange(4, dtype="f4"), 2)
    step = cluster.variable(np.int64(5), 1, "step")
    checkpoint = Checkpoint(t=table)
    cluster.on_rest = lambda: step.assign(6)
    manager = CheckpointManager(checkpoint, tmp_path / "c", 1, step_counter=step)
    path = manager.save()
    about = Manifest.of(path).metadata
    assert about["steps"] == [{"below": 7, "besides": [[9, 11]]}]
    assert about["step"] == 6, "as it was at that moment"
    assert cluster.rests == 1
    checkpoint.restore(path)
    assert cluster.rests == 2
    export_safetensors(checkpoint, tmp_path / "e.safetensors")
    assert cluster.rests == 3


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_an_export_begins_again_when_a_server_has_moved(tmp_path, form):
    """What it had pinned is gone with the process that served it."""
    if form == "orbax":
        pytest.importorskip("orbax.checkpoint")
    cluster, export = FakeCluster(2), getattr(saving, f"export_{form}")
    table = cluster.variable(np.arange(4, dtype="f4"), 2)
    moves = iter([True])

    @contextlib.asynccontextmanager
    async def at_rest():
        cluster.rests += 1
        if next(moves, False):
            cluster.outages = 1
            raise NotFoundError("it holds no snapshot")
        yield cluster.cut

    async def settled(since, error):
        return cluster.outages != since

    cluster.at_rest, cluster.settled = at_rest, settled
    export(Checkpoint(t=table), tmp_path / "e")
    assert cluster.rests == 2
    assert sorted(os.listdir(tmp_path)) == ["e"]


def test_where_others_go_on_it_says_that_it_is_no_cut(tmp_path, caplog):
    cluster = FakeCluster(2)
    cluster.cut = None
    table = cluster.variable(np.arange(4, dtype="f4"), 2)
    path = Checkpoint(t=table).save(tmp_path / "c")
    assert Manifest.of(path).metadata["steps"] == [None]
    assert "is not one moment of the training: other programs update" in caplog.text


def test_rows_that_no_gradient_has_reached_are_initialized(tmp_path):
    """Slots of one component only: the others have none, and get none."""
    cluster = FakeCluster(2)
    table = cluster.variable(np.zeros((4, 1), "f4"), 2)
    optimizer = cluster.optimizer(optax.sgd(1.0, momentum=0.5))
    first = table.variables[0]
    optimizer.apply_gradients([(np.ones((2, 1), "f4"), first)])
    path = Checkpoint(t=table, o=optimizer).write(tmp_path / "c")
    stored = Manifest.of(path).tensors["o/.slots/t/[0].trace"]
    assert (stored.shape, stored.is_whole) == ((4, 1), False)
    for parts in (1, 2, 4):
        cluster = FakeCluster(2)
        table = cluster.variable(np.zeros((4, 1), "f4"), parts)
        optimizer = cluster.optimizer(optax.sgd(1.0, momentum=0.5))
        optimizer.apply_gradients([(np.full((4, 1), 9, "f4"), table)])
        Checkpoint(t=table, o=optimizer).restore(path).assert_consumed()
        optimizer.apply_gradients([(np.ones((4, 1), "f4"), table)])
        assert table.numpy().tolist() == [[-2.5], [-2.5], [-1.0], [-1.0]]


@pytest.mark.parametrize("shared", [set(), {0}, {0, 1}])
@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 3), (3, 1)])
def test_a_table_that_has_grown(tmp_path, before, after, shared):
    def program(rows, parts, fill):
        cluster = FakeCluster(2, shared)
        table = cluster.variable(np.full((rows, 1), fill, "f4"), parts)
        optimizer = cluster.optimizer(optax.sgd(1.0, momentum=0.5), params=[table])
        return Checkpoint(t=[table], o=optimizer), table, optimizer

    checkpoint, table, optimizer = program(3, before, 0)
    optimizer.apply_gradients([np.ones((3, 1), "f4")], [table])
    path = checkpoint.write(tmp_path / "c")
    checkpoint, table, optimizer = program(5, after, 7)
    checkpoint.restore(path, partial="rows").assert_consumed()
    assert table.numpy().tolist() == [[-1.0]] * 3 + [[7.0]] * 2
    optimizer.apply_gradients([np.ones((5, 1), "f4")], [table])
    assert table.numpy().tolist() == [[-2.5]] * 3 + [[6.0]] * 2


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("shared", [set(), {0}])
def test_what_is_kept_beside_no_rows_is_restored_with_the_counts(
    tmp_path, parts, shared
):
    nothing = np.zeros((0, 3), "f4")

    def trained_on(servers):
        cluster = FakeCluster(servers, shared)
        empty, optimizer = cluster.variable(nothing, parts), cluster.optimizer(ADAM)
        return Checkpoint(t=empty, o=optimizer), [(nothing, empty)], optimizer

    checkpoint, pairs, optimizer = trained_on(1)
    optimizer.apply_gradients(pairs)
    path = checkpoint.write(tmp_path / "c")
    checkpoint, pairs, optimizer = trained_on(2)
    checkpoint.restore(path).assert_consumed()
    optimizer.apply_gradients(pairs)  # takes what was restored, all of it or none
    path = checkpoint.write(tmp_path / "again")
    assert Manifest.of(path).tensors.keys() == {
        "t",
        *[f"o/.slots/t/[0].{leaf}" for leaf in ("count", "mu", "nu")],
    }


def test_variables_of_here_and_there_in_one_checkpoint(tmp_path):
    cluster = FakeCluster(2)
    there, here = cluster.variable(np.arange(4, dtype="f4"), 2), Variable(5.0)
    checkpoint = Checkpoint(a=there, b=here)
    path = checkpoint.save(tmp_path / "c")
    there.assign(np.zeros(4))
    here.assign(0.0)
    checkpoint.restore(path).assert_consumed()
    assert there.numpy().tolist() == [0, 1, 2, 3]
    assert here.numpy() == 5.0
    out = export_safetensors(checkpoint, tmp_path / "all.safetensors")
    from safetensors.numpy import load_file

    assert load_file(out)["a"].tolist() == [0, 1, 2, 3]


def test_large_tensors_go_in_pieces(tmp_path):
    # Of each server two pieces of 4 MiB and a bit.
    whole = np.random.default_rng(0).random((600_000, 7), "f4")
    cluster = FakeCluster(2, set())
    table = cluster.variable(whole, 2)
    path = Checkpoint(t=table).write(tmp_path / "c")
    assert cluster.client.asked.count("read 0") == 3
    table.assign(np.zeros_like(whole))
    Checkpoint(t=table).restore(path)
    np.testing.assert_array_equal(table.numpy(), whole)
    assert cluster.client.asked.count("store 1") == 3


def test_long_names_go_into_several_files(tmp_path):
    """Three of them into the header of each."""
    cluster = FakeCluster(1)
    tree = {f"v{n}" + 30_000 * "x": cluster.variable(np.full(2, n)) for n in range(9)}
    path = Checkpoint(t=tree).write(tmp_path / "c")
    assert len(Manifest.of(path).files) == 3
    for each in tree.values():
        each.assign(np.zeros(2, int))
    Checkpoint(t=tree).restore(path).assert_consumed()
    assert [int(v.numpy()[0]) for v in tree.values()] == list(range(9))


def test_a_lost_server_leaves_the_checkpoint_before(tmp_path):
    cluster, variables, optimizer = program(2, 2, {0, 1})
    checkpoint = Checkpoint(v=variables, o=optimizer)
    path = checkpoint.write(tmp_path / "c")
    before = Manifest.of(path)

    def dies(ps: int) -> None:
        if ps == 1:
            cluster.lost = 1
            raise PSUnavailableError("/job:ps/task:1", "killed")

    cluster.client.on_write = dies
    with pytest.raises(PSUnavailableError, match="task:1"):
        checkpoint.write(tmp_path / "c")
    assert Manifest.of(path) == before
    verify(path, before)
    assert len(list((tmp_path / "c").iterdir())) == 1 + len(before.files)
    with pytest.raises(PSUnavailableError):
        checkpoint.restore(path)


def test_a_full_disk_of_a_server_leaves_the_checkpoint_before(tmp_path):
    cluster, variables, optimizer = program(2, 2, {0, 1})
    checkpoint = Checkpoint(v=variables, o=optimizer)
    path = checkpoint.save(tmp_path / "c")

    def full(ps: int) -> None:
        raise ResourceExhaustedError(f"ps {ps}: No space left on device")

    cluster.client.on_write = full
    with pytest.raises(ResourceExhaustedError, match="No space left"):
        checkpoint.save(tmp_path / "c")
    assert [p.name for p in tmp_path.glob("c-*")] == ["c-1"]
    assert not cluster.client.snapshots
    cluster.client.on_write = None
    assert checkpoint.save(tmp_path / "c").endswith("c-2")
    verify(path, Manifest.of(path))


async def _lost(_):
    raise PSUnavailableError("/job:ps/task:1", "killed")


def test_what_was_written_is_whole_without_its_servers(tmp_path):
    cluster, variables, optimizer = program(2, 2, {0, 1})
    cluster.client.release = _lost
    path = Checkpoint(v=variables, o=optimizer).write(tmp_path / "c")
    verify(path, Manifest.of(path))


@pytest.mark.parametrize("lost", [False, True])
async def test_a_cancelled_save_lets_go_of_the_snapshot(tmp_path, lost):
    """And is cancelled though a server is gone."""
    cluster, variables, optimizer = program(2, 2, {0, 1})
    reached = asyncio.Event()

    async def never(*_):
        reached.set()
        await asyncio.Event().wait()

    cluster.client.write_snapshot = never
    if lost:
        cluster.client.release = _lost
    checkpoint = Checkpoint(v=variables, o=optimizer)
    saving = asyncio.create_task(checkpoint.write_async(tmp_path / "c"), name="saving")
    await reached.wait()
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert lost or not cluster.client.snapshots
    assert list(tmp_path.iterdir()) == []


def test_handles_from_elsewhere_are_refused(tmp_path):
    import pickle

    cluster = FakeCluster(1)
    foreign = pickle.loads(pickle.dumps(cluster.variable(np.zeros(2, "f4"))))
    with pytest.raises(RuntimeError, match="CPU"):
        Checkpoint(v=foreign).write(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_rows_of_a_local_optimizer(tmp_path):
    table, optimizer = Variable(np.zeros((4, 2), "f4")), Optimizer(optax.adagrad(0.1))
    rows = IndexedSlices(np.ones((1, 2), "f4"), np.array([2]), (4, 2))
    optimizer.apply_gradients([(rows, table)])
    path = Checkpoint(t=table, o=optimizer).write(tmp_path / "c")
    again, second = Variable(np.zeros((4, 2), "f4")), Optimizer(optax.adagrad(0.1))
    Checkpoint(t=again, o=second).restore(path).assert_consumed()
    for o, t in ((optimizer, table), (second, again)):
        o.apply_gradients([(rows, t)])
    np.testing.assert_array_equal(again.numpy(), table.numpy())
