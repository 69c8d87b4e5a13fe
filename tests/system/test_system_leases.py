"""Each example of a leased dataset is applied exactly once, whatever is killed.

The oracle is a counter for each example, to which a step adds 1 for each that it reads.
"""

import asyncio
import contextlib
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
from click.testing import CliRunner
from killed_leases import CountingLeases

import zstrat as zs
from zstrat.cli import main
from zstrat.data import Lease, LeasedSource
from zstrat.errors import ClosureInputError, InvalidArgumentError
from zstrat.testing import leak_check

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]

SIZE, BATCH, SEED = 3001, 8, 11


@pytest.fixture(scope="module")
def cluster():
    with leak_check(), zs.LocalCluster(2, 3, transport="tcp") as cluster:
        yield cluster


def resolver_of(cluster, ps, workers):
    spec = cluster.spec
    jobs = {"ps": ps, "worker": workers}
    return zs.cluster_resolver.SimpleClusterResolver(
        zs.ClusterSpec(
            {job: [spec.task_address(job, n) for n in ns] for job, ns in jobs.items()}
        )
    )


class Counting:
    """A program with a counter for each example."""

    def __init__(self, strategy, size=SIZE, batch=BATCH, **options):
        self.coordinator, self.size = zs.ClusterCoordinator(strategy), size
        with strategy.scope():
            counts = self.counts = zs.Variable(np.zeros(size, "i4"), name="counts")
            total = self.total = zs.Variable(np.int32(0), name="total")
        data = self.coordinator.create_leased_dataset(
            np.arange(size), batch, shuffle_seed=SEED, **options
        )
        iterator = self.iterator = iter(data)
        self.checkpoint = zs.Checkpoint(counts=counts, total=total, iterator=iterator)

        @zs.function
        def count(iterator):
            ids = next(iterator)
            counts.assign_add(jnp.zeros(size, jnp.int32).at[ids].add(1))
            total.assign_add(len(ids))
            return ids

        self.step = count

    def schedule(self, steps):
        for _ in range(steps):
            self.coordinator.schedule(self.step, (self.iterator,))

    def rest(self):
        for epoch in self.iterator.epochs:
            for _ in epoch:
                self.coordinator.schedule(self.step, (self.iterator,))

    def require_all(self, epochs):
        assert np.unique(self.counts.numpy()).tolist() == [epochs]
        assert self.total.numpy() == epochs * self.size


@pytest.mark.parametrize(
    ("size", "batch"),
    [(SIZE, BATCH), pytest.param(100_000, 32, marks=pytest.mark.thorough)],
)
def test_kills_a_join_a_leave_and_a_restore_on_other_counts(
    local, tmp_path, size, batch
):
    """3 workers and a server are killed, one worker joins and leaves, and a checkpoint
    of the midst is restored on one server, not two, and three workers."""
    workers = [local.spec.task_address("worker", n) for n in range(3)]
    part = -(-size // batch) // 3
    options = {"size": size, "batch": batch, "epochs": 2}
    with zs.ParameterServerStrategy(
        resolver_of(local, (0, 1), (0, 1)), replicas=1
    ) as strategy:
        program = Counting(strategy, **options)
        program.schedule(part)
        local.kill("worker:0")
        strategy.workers.add(workers[2])
        program.schedule(part)
        local.restart("worker:0")
        local.kill("worker:1")
        program.schedule(part)
        strategy.workers.remove(workers[2])
        local.restart("worker:1")
        local.kill("ps:1")
        program.schedule(part)
        path = program.checkpoint.save(tmp_path / "c")  # amid the steps
        program.schedule(20)
        program.coordinator.join()
        assert program.coordinator.metrics()["failovers"] == 1
    local.restart("ps:1")
    with zs.ParameterServerStrategy(resolver_of(local, (0,), (0, 1, 2))) as strategy:
        program = Counting(strategy, **options)
        program.checkpoint.restore(path)
        before = int(program.total.numpy())
        assert 0 < before < 2 * size
        program.schedule(20)
        local.kill("worker:2")
        program.rest()
        program.require_all(2)
        program.schedule(1)
        with pytest.raises(zs.OutOfRangeError):
            program.coordinator.join()


def test_servers_that_are_restored_count_what_was_lost_again(local, tmp_path):
    with zs.ParameterServerStrategy(
        local.resolver, on_ps_loss="restore", ps_wait_timeout=300
    ) as strategy:
        program = Counting(strategy)
        manager = zs.CheckpointManager(program.checkpoint, tmp_path, 3)
        program.schedule(100)
        manager.save()
        program.schedule(150)
        program.coordinator.join()
        program.schedule(40)
        local.kill("ps:0")
        program.schedule(10)
        local.restart("ps:0")
        program.rest()
        metrics = program.coordinator.metrics()
        assert metrics["ps_restores"] == 1
        assert metrics["steps_lost"] >= 150
        program.require_all(1)


def test_a_program_that_resumes_a_session_reads_what_was_not_applied(local, tmp_path):
    """One that was killed had restored a checkpoint, and was amid an epoch. One server:
    of several a step that is under way may be on some alone."""
    size = 701
    spec = resolver_of(local, (0,), (0, 1)).cluster_spec()
    resolver = resolver_of(local, (0,), (0, 1))
    with zs.ParameterServerStrategy(resolver) as strategy:
        work = CountingLeases(strategy, size)
        work.schedule(35)
        path = work.checkpoint.save(tmp_path / "c")  # amid the steps
    script = Path(__file__).with_name("killed_leases.py")
    run = [str(script), json.dumps(spec.as_dict()), str(size), str(path)]
    assert programs.run(run).returncode == -9
    with zs.ParameterServerStrategy(resolver, resume="leases") as strategy:
        assert strategy.resumed
        work = CountingLeases(strategy, size)
        before = work.counts.numpy().sum()
        assert before >= (30 + 1) * 8
        work.schedule(1)
        work.coordinator.join()
        (seen,) = work.coordinator.metrics()["leases"].values()
        assert seen["done"] == before + 8 == work.counts.numpy().sum()

        @zs.function
        def number(iterator):
            return len(next(iterator))

        assert work.coordinator.evaluate(number, work.data) == size
        work.rest()
        assert np.unique(work.counts.numpy()).tolist() == [3]


def test_one_worker_reads_the_order_of_the_seed(local, tmp_path, capsys):
    with zs.ParameterServerStrategy(resolver_of(local, (0,), (0,))) as strategy:
        program = Counting(strategy, epochs=2)
        coordinator, iterator = program.coordinator, program.iterator
        reader = LeasedSource(np.arange(SIZE), BATCH, SEED).open()
        with iterator.progress():
            for epoch in range(2):
                values = coordinator.schedule_epoch(program.step, iterator)
                found = np.concatenate(coordinator.fetch(values))
                wanted = reader.read(Lease(epoch, 0, SIZE))
                np.testing.assert_array_equal(found, wanted)
        assert f"{2 * SIZE}/{2 * SIZE}" in capsys.readouterr().out
        with pytest.raises(zs.OutOfRangeError):
            coordinator.schedule_epoch(program.step, iterator)
        (seen,) = coordinator.metrics()["leases"].values()
        worker = "/job:worker/task:0"
        assert seen == {
            "epoch": 2, "epochs": 2, "examples": SIZE, "total": 2 * SIZE, "open": 0,
            "to_lease_again": 0, "done": 2 * SIZE, "skipped": 0, "workers": {worker: 0},
        }  # fmt: skip
        file = tmp_path / "cluster.toml"
        jobs = local.spec.as_dict().items()
        lines = [f"{job} = {json.dumps(addresses)}\n" for job, addresses in jobs]
        file.write_text("[cluster]\n" + "".join(lines))
        looks = ["top", "--cluster", str(file), "--count", "1"]
        shown = CliRunner().invoke(main, looks).stdout
        assert re.search(r"dataset of ndarray: epoch \d, \d+ of 6002 \(", shown)
        state = asyncio.run(iterator.get_state_async())
        assert state["leases"]["open"] == []
        other = iter(coordinator.create_leased_dataset(np.arange(SIZE), 2))
        with pytest.raises(InvalidArgumentError, match="shuffle_seed"):
            asyncio.run(other.set_state_async(state))


def test_a_step_that_fails_loses_nothing_or_skips_its_examples(local):
    with zs.ParameterServerStrategy(resolver_of(local, (0,), (0, 1))) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)

        @zs.function(eager=True)
        def step(iterator, allowed):
            ids = np.asarray(next(iterator))
            if 5 in ids and not allowed:
                raise ValueError("five")
            return ids.sum()

        for on_error in ("skip", "raise"):
            data = coordinator.create_leased_dataset(
                np.arange(20), 4, on_error=on_error
            )
            iterator = iter(data)
            args = iterator, False
            if on_error == "skip":
                values = coordinator.schedule_epoch(step, iterator, args)
                errors = [value.error for value in values if value.error is not None]
                assert [type(error) for error in errors] == [ValueError]
                sums = [v.fetch() for v in values if v.error is None]
                assert sum(sums) == 190 - (4 + 5 + 6 + 7)
                continue
            with pytest.raises(ValueError, match="five") as caught:
                coordinator.schedule_epoch(step, iterator, args)
            assert any("examples 4 to 8" in note for note in caught.value.__notes__)
            values = coordinator.schedule_epoch(step, iterator, (iterator, True))
            assert 4 + 5 + 6 + 7 in [value.fetch() for value in values]
            assert [epoch.number for epoch in iterator.epochs] == []


def test_examples_of_updates_that_a_failed_eager_step_has_pushed_come_once(local):
    with zs.ParameterServerStrategy(resolver_of(local, (0,), (0, 1))) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            seen = zs.Variable(np.zeros(20, np.float32), name="seen")

        @zs.function(eager=True)
        def step(iterator, allowed):
            ids = np.asarray(next(iterator))
            seen.assign_add(np.bincount(ids, minlength=20).astype(np.float32))
            seen.value()  # pushes
            if 5 in ids and not allowed:
                raise ValueError("five")

        iterator = iter(coordinator.create_leased_dataset(np.arange(20), 4))
        with pytest.raises(ValueError, match="five") as caught:
            coordinator.schedule_epoch(step, iterator, (iterator, False))
        assert any("left out" in note for note in caught.value.__notes__)
        with contextlib.suppress(zs.OutOfRangeError):  # steps beside may have had all
            coordinator.schedule_epoch(step, iterator, (iterator, True))
        coordinator.join()
        assert seen.numpy().tolist() == [1.0] * 20


def test_steps_that_draw_several_batches_or_another_number_than_leased(local):
    with zs.ParameterServerStrategy(resolver_of(local, (0,), (0, 1))) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)

        @zs.function
        def window(iterator):
            return jnp.stack([next(iterator).sum() for _ in range(3)])

        data = coordinator.create_leased_dataset(lambda: np.arange(24), 4)
        values = coordinator.schedule_epoch(window, iter(data))
        assert sum(coordinator.fetch(values)).sum() == 276
        with pytest.raises(ValueError, match="drop_remainder"):
            other = coordinator.create_leased_dataset(np.arange(16), 4)
            coordinator.schedule_epoch(window, iter(other))

        for options in ({"fragments": 2}, {"adapt": True}):
            with strategy.scope():
                both, sgd = [zs.Variable(0.0), zs.Variable(0.0)], optax.sgd(1.0)
                local_steps = zs.LocalOptimizer(sgd, sgd, every=3, **options)

            def trains(iterator, both=both, local_steps=local_steps):
                total = next(iterator).sum()
                local_steps.apply_gradients([w + total for w in both], both)

            uneven = local_steps.window(trains)
            with pytest.raises(ValueError, match=f"{next(iter(options))}=.*per_worker"):
                coordinator.schedule_epoch(uneven, iter(data))

        held = iter(coordinator.create_leased_dataset(np.arange(8), 4))

        @zs.function(eager=True)
        def twice(iterator):  # the same iterator as the one that it holds
            return np.asarray(next(held)).sum()

        assert sum(coordinator.fetch(coordinator.schedule_epoch(twice, held))) == 28

        @zs.function(eager=True)
        def none(iterator):
            return 0

        coordinator.schedule(none, (iter(other),))
        with pytest.raises(RuntimeError, match="left 1 batches"):
            coordinator.join()
        with pytest.raises(TypeError, match="iter"):
            coordinator.schedule(none, (other,))
        # Nothing waits for it but the step, as it is not traced.
        coordinator.schedule(none, (iter(coordinator.create_leased_dataset(list, 4)),))
        with pytest.raises(ClosureInputError, match="without examples"):
            coordinator.join(timeout=60)
        with pytest.raises(RuntimeError, match="schedule_epoch"):
            list(other.epochs)
        with pytest.raises(RuntimeError, match="schedule_epoch"):
            next(n for epoch in other.epochs for n in epoch if n > 9)


def test_evaluation_sums_all_examples_once(local):
    rows = {"x": np.arange(101, dtype="f4"), "y": np.ones(101, "i4")}

    @zs.function
    def sums(iterator):
        batch = next(iterator)
        return {"loss": batch["x"].sum(), "examples": batch["y"].sum()}

    async def evaluated(strategy):
        coordinator = zs.AsyncClusterCoordinator(strategy)
        data = await coordinator.create_leased_dataset(rows, 16, shuffle_seed=2)
        total = await coordinator.evaluate(sums, data)
        numbers = []
        async for epoch in data.epochs:
            async for number in epoch:
                numbers.append(number)
                await coordinator.schedule(sums, (epoch.iterator,))
        return total, numbers

    with zs.ParameterServerStrategy(local.resolver) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)
        data = coordinator.create_leased_dataset(zs.data.Dataset.from_indexed(rows, 16))
        with pytest.raises(TypeError, match="from_indexed"):
            coordinator.create_leased_dataset(rows, epochs=2)
        assert coordinator.evaluate(sums, data) == {"loss": 5050.0, "examples": 101}
        with pytest.raises(TypeError, match="evaluate"):
            coordinator.evaluate(zs.function(lambda it: (next(it), "text")[1]), data)
        for wrong in (iter([rows]), iter(coordinator.create_per_worker_dataset([1]))):
            with pytest.raises(TypeError, match="create_leased_dataset"):
                coordinator.schedule_epoch(sums, wrong)
        total, numbers = asyncio.run(evaluated(strategy))
        assert total == {"loss": 5050.0, "examples": 101}
        assert numbers == list(range(7))


def test_gradients_that_wait_for_a_round_are_not_done_in_a_checkpoint(local, tmp_path):
    def program(strategy):
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            counts = zs.Variable(np.zeros(90, "f4"), name="counts")
            rounds = zs.Rounds(workers=4, merge="sum", late="next")
            sgd = zs.Optimizer(optax.sgd(1.0), rounds=rounds)
        data = coordinator.create_leased_dataset(np.arange(90), 6, shuffle_seed=3)
        iterator = iter(data)

        @zs.function
        def step(iterator):
            seen = jnp.zeros(90).at[next(iterator)].add(-1.0)
            sgd.apply_gradients([(seen, counts)])

        checkpoint = zs.Checkpoint(counts=counts, sgd=sgd, iterator=iterator)
        return coordinator, iterator, step, counts, checkpoint

    with zs.ParameterServerStrategy(resolver_of(local, (0,), (0,))) as strategy:
        coordinator, iterator, step, counts, checkpoint = program(strategy)
        values = [coordinator.schedule(step, (iterator,)) for _ in range(6)]
        coordinator.fetch(values)
        path = checkpoint.save(tmp_path / "c")
        # Contributions that come together may be of one round.
        applied = int(counts.numpy().sum()) // 6
        assert applied in (4, 5, 6)
        state = asyncio.run(iterator.get_state_async())
        assert len(state["leases"]["open"]) == 6 - applied
    with zs.ParameterServerStrategy(resolver_of(local, (0, 1), (0, 1))) as strategy:
        coordinator, iterator, step, counts, checkpoint = program(strategy)
        checkpoint.restore(path)
        assert len(coordinator.schedule_epoch(step, iterator)) == 15 - applied
        assert counts.numpy().tolist() == [1] * 90
