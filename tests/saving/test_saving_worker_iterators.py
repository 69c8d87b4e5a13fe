"""The places of per-worker iterators in a checkpoint: real workers, one of them killed.

What each worker has to draw is said by a pass over the same dataset in this process.
"""

import json
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.data import Dataset
from zstrat.errors import ClosureInputError, InvalidArgumentError

pytestmark = pytest.mark.processes

WORKERS = 2


def part(index):
    rows = Dataset.range(400).shuffle(400, seed=3).shard(WORKERS, index)
    return rows.map(lambda x: x * 2).batch(2).prefetch(2)


def dataset_fn(context):
    return part(context.input_pipeline_id)


STREAMS = [[tuple(batch.tolist()) for batch in part(n)] for n in range(WORKERS)]


class Program:
    """A model and data on workers, and what was drawn of them."""

    def __init__(self, cluster, **options):
        self.strategy = zs.ParameterServerStrategy(cluster.resolver, **options)
        with self.strategy.scope():
            self.w = zs.Variable(jnp.zeros(3))
            self.trained = zs.Variable(jnp.zeros(800, jnp.int32))
        self.coordinator = zs.ClusterCoordinator(self.strategy)

        @zs.function
        def draw(iterator):
            return next(iterator)

        @zs.function
        def train(iterator):
            drawn = jnp.zeros_like(self.trained).at[next(iterator)].set(1)
            self.trained.assign_add(drawn)

        self.draw, self.trains = draw, train

    def iterator(self, function=dataset_fn):
        return iter(self.coordinator.create_per_worker_dataset(function))

    def begin(self, iterator, steps):
        return [self.coordinator.schedule(self.draw, (iterator,)) for _ in range(steps)]

    def train(self, iterator, steps):
        """Begins steps that count what they have drawn."""
        for _ in range(steps):
            self.coordinator.schedule(self.trains, (iterator,))

    def drawn(self, values):
        self.coordinator.join()
        return [tuple(value.fetch().tolist()) for value in values]

    def steps(self, iterator, count):
        return self.drawn(self.begin(iterator, count))


@pytest.fixture(scope="module")
def cluster():
    with zs.LocalCluster(num_ps=1, num_workers=WORKERS) as cluster:
        yield cluster


@pytest.fixture
def program(cluster):
    program = Program(cluster)
    yield program
    program.strategy.close()


def counts(drawn, starts):
    """Behind these draws, how many each worker has made; each in its order, and none
    left out."""
    ends = []
    for stream, start in zip(STREAMS, starts, strict=True):
        mine = sorted(set(drawn) & set(stream))
        assert mine == sorted(stream[start : start + len(mine)])
        ends.append(start + len(mine))
    assert sum(ends) - sum(starts) == len(drawn)
    return ends


def require_trained_in_order(program):
    """The model has seen of each worker's data all to some place, each once."""
    counts = program.trained.numpy()
    for stream in STREAMS:
        seen = [counts[list(batch)].tolist() for batch in stream]
        to = seen.count([1, 1])
        assert seen == [[1, 1]] * to + [[0, 0]] * (len(seen) - to)


def manifest_of(path):
    return json.loads(Path(path, "manifest.json").read_text())["manifest"]


def drawn_at(path):
    """How many draws of each worker a checkpoint has."""
    nodes = manifest_of(path)["objects"]["nodes"]
    (state,) = [x["state"] for x in nodes if x["kind"] == "iterator"]
    return [0 if each is None else each["drawn"] for each in state["pipelines"]]


def saved(path):
    """The same; as many as it has steps."""
    found = drawn_at(path)
    (cut,) = manifest_of(path)["metadata"]["steps"]
    besides = sum(stop - start for start, stop in cut["besides"])
    assert sum(found) == cut["below"] - 1 + besides
    return found


def test_workers_go_on_where_a_save_amid_steps_found_them(program, tmp_path):
    iterator = program.iterator()
    checkpoint = zs.Checkpoint(w=program.w, iterator=iterator)
    values = program.begin(iterator, 40)
    path = checkpoint.save(tmp_path / "c")
    at = saved(path)
    assert 0 <= sum(at) <= 40
    assert sum(counts(program.drawn(values), [0, 0])) == 40

    checkpoint.restore(path)
    counts(program.steps(iterator, 30), at)
    other = program.iterator()  # as a program makes it that was started anew
    zs.Checkpoint(w=program.w, iterator=other).restore(path)
    counts(program.steps(other, 30), at)


def test_a_worker_that_was_killed_goes_on_from_the_last_save(
    program, cluster, tmp_path
):
    iterator = program.iterator()
    program.steps(iterator, 20)
    path = zs.Checkpoint(iterator=iterator).save(tmp_path / "c")
    at = saved(path)
    program.steps(iterator, 20)
    cluster.kill("worker:0")
    cluster.kill("worker:1")
    cluster.restart("worker:0")
    mine = program.steps(iterator, 10)
    cluster.restart("worker:1")
    assert sorted(mine) == sorted(STREAMS[0][at[0] : at[0] + 10])


def test_the_place_of_a_worker_that_is_away_stays(program, cluster, tmp_path, caplog):
    iterator = program.iterator()
    program.steps(iterator, 20)
    checkpoint = zs.Checkpoint(iterator=iterator)
    before = drawn_at(checkpoint.save(tmp_path / "c"))
    program.steps(iterator, 20)
    cluster.kill("worker:0")
    program.steps(iterator, 1)
    after = drawn_at(checkpoint.save(tmp_path / "c"))
    cluster.restart("worker:0")
    assert after[0] == before[0]
    assert "input pipeline 0" in caplog.text


def test_what_has_no_place_is_refused(program, tmp_path):
    listed = program.iterator(lambda: [np.arange(2)] * 5)
    program.steps(listed, 1)
    with pytest.raises(InvalidArgumentError, match=r"zs\.data\.Dataset"):
        zs.Checkpoint(it=listed).save(tmp_path / "listed")
    assert zs.latest_checkpoint(tmp_path) is None

    iterator = program.iterator()
    program.steps(iterator, 1)  # one that no worker has yet has no place to be wrong
    path = zs.Checkpoint(w=program.w, it=iterator).save(tmp_path / "c")
    with pytest.raises(InvalidArgumentError, match="pipelines"):
        zs.Checkpoint(w=program.w, it=iter(part(0))).restore(path)
    program.w.assign(jnp.ones(3))
    other = program.iterator(lambda: part(0).take(3))
    with pytest.raises(InvalidArgumentError):
        zs.Checkpoint(w=program.w, it=other).restore(path)
    assert program.w.numpy().tolist() == [1, 1, 1]
    # Nothing was built a second time; one worker may draw all that it has.
    assert len(program.steps(other, 3)) == 3


def test_a_restore_amid_steps_takes_values_and_data_back_together(program, tmp_path):
    iterator = program.iterator()
    program.train(iterator, 20)
    checkpoint = zs.Checkpoint(trained=program.trained, iterator=iterator)
    path = checkpoint.save(tmp_path / "c")
    for _ in range(10):
        program.train(iterator, 35)
        checkpoint.restore(path)
        program.coordinator.join()
        require_trained_in_order(program)


def test_a_save_that_fails_takes_no_place_along(program, cluster, tmp_path):
    iterator = program.iterator()
    program.steps(iterator, 20)
    path = zs.Checkpoint(iterator=iterator).save(tmp_path / "c")
    at = drawn_at(path)
    program.steps(iterator, 20)
    listed = program.iterator(lambda: [np.arange(2)] * 5)
    with pytest.raises(InvalidArgumentError, match=r"zs\.data"):
        zs.Checkpoint(iterator=iterator, listed=listed).save(tmp_path / "d")
    cluster.kill("worker:0")
    cluster.kill("worker:1")
    cluster.restart("worker:0")
    cluster.restart("worker:1")
    counts(program.steps(iterator, 30), at)


def test_an_iterator_that_is_being_built_is_saved_at_its_beginning(program, tmp_path):
    built = tmp_path / "built"

    def slow(context):
        while not built.exists():
            time.sleep(0.01)
        return part(context.input_pipeline_id)

    iterator = program.iterator(slow)
    path = zs.Checkpoint(iterator=iterator).save(tmp_path / "c")
    built.touch()
    program.steps(iterator, 10)
    zs.Checkpoint(iterator=iterator).restore(path)
    counts(program.steps(iterator, 20), [0, 0])


def test_an_iterator_that_cannot_be_built_is_saved_where_it_was_to_begin(
    program, tmp_path
):
    broken = tmp_path / "broken"

    def fragile(context):
        if broken.exists():
            raise OSError("no disk")
        return part(context.input_pipeline_id)

    iterator = program.iterator(fragile)
    program.steps(iterator, 20)
    checkpoint = zs.Checkpoint(iterator=iterator)
    path = checkpoint.save(tmp_path / "c")
    broken.touch()
    checkpoint.restore(path)
    with pytest.raises(ClosureInputError, match="OSError"):
        program.steps(iterator, 1)
    again = checkpoint.save(tmp_path / "c")
    assert drawn_at(again) == drawn_at(path)
    broken.unlink()
    checkpoint.restore(again)
    counts(program.steps(iterator, 30), drawn_at(path))


def test_servers_that_are_filled_again_and_data_go_on_from_one_checkpoint(
    tmp_path, caplog
):
    with zs.LocalCluster(num_ps=1, num_workers=WORKERS) as cluster:
        program = Program(cluster, on_ps_loss="restore")
        iterator = program.iterator()
        checkpoint = zs.Checkpoint(
            w=program.w, trained=program.trained, iterator=iterator
        )
        for _ in range(2):
            program.train(iterator, 20)
            program.coordinator.join()
            path = checkpoint.save(tmp_path / "c")
        for part_of_it in Path(path).glob("*.safetensors"):
            part_of_it.write_bytes(b"damaged")
        program.train(iterator, 20)
        program.coordinator.join()
        data_alone = zs.Checkpoint(iterator=iterator)
        for _ in range(4):  # of which no server can be filled
            data_alone.save(tmp_path / "data")
        assert "data" not in caplog.text
        cluster.kill("ps:0")
        cluster.restart("ps:0")
        program.train(iterator, 30)
        program.coordinator.join()
        assert program.coordinator.metrics()["steps_lost"] == 40
        require_trained_in_order(program)
        program.strategy.close()
