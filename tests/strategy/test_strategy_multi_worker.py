"""Several processes in step, here as threads: what they compute together."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ranks import ranks

import zstrat as zs


def test_a_step_is_two_programs_with_one_collective_between_them():

    def program(strategy, rank):
        with strategy.scope():
            params = [zs.Variable(np.ones(shape, np.float32)) for shape in (5, 7, 3)]
            optimizer = zs.Optimizer(optax.adam(0.1))

        @zs.function
        def train_step(x):
            def replica(x):
                def loss(params):
                    return sum(jnp.sum(each) ** 2 for each in params) * x

                optimizer.apply_gradients(zs.grad(loss)(params), params)

            strategy.run(replica, args=(x,))

        calls = strategy._channel.collective.board.calls
        train_step(np.float32(1))
        before = len(calls)
        train_step(np.float32(2))
        return calls[before:]

    calls = ranks(2, program)[0]
    assert [(what, len(kinds)) for what, kinds in calls] == [("sum", 3)]


def test_values_are_overwritten_where_they_are():
    def program(strategy, rank):
        with strategy.scope():
            w = zs.Variable(np.ones((64, 64), np.float32))
            optimizer = zs.Optimizer(optax.adam(0.1))

        @zs.function
        def train_step(x):
            def replica(x):
                optimizer.apply_gradients(zs.grad(lambda w: jnp.sum(w @ x))(w), w)

            strategy.run(replica, args=(x,))

        x = np.ones((64, 4), np.float32)
        train_step(x)
        train_step(x)
        before = w.storage.value()
        address = before.unsafe_buffer_pointer()
        train_step(x)
        assert before.is_deleted()
        del before
        found = {w.storage.value().unsafe_buffer_pointer() == address}
        # A value that somebody looks at stays as it is.
        seen = w.numpy()
        copy = seen.copy()
        train_step(x)
        np.testing.assert_array_equal(seen, copy)
        return found

    assert ranks(2, program) == [{True}, {True}]


def test_the_first_value_is_that_of_the_first_process():
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable(np.random.default_rng(rank).normal(size=3), dtype=float)
            whole = zs.Variable(np.arange(3) + rank)
        return v.numpy().tolist(), whole.numpy().tolist()

    first, second = ranks(2, program)
    assert first == second
    assert first[0] == np.random.default_rng(0).normal(size=3).tolist()
    assert first[1] == [0, 1, 2]


def test_on_read_variables_are_summed_when_they_are_read():
    def program(strategy, rank):
        with strategy.scope():
            total = zs.Variable(
                0.0,
                aggregation=zs.VariableAggregation.SUM,
                synchronization=zs.VariableSynchronization.ON_READ,
            )
            count = zs.Variable(
                np.int32(0),
                aggregation=zs.VariableAggregation.SUM,
                synchronization=zs.VariableSynchronization.ON_READ,
            )
            mean = zs.Variable(
                [0.0],
                aggregation=zs.VariableAggregation.MEAN,
                synchronization=zs.VariableSynchronization.ON_READ,
            )

        @zs.function
        def step(x):
            def replica(x):
                total.assign_add(x)
                mean.assign(x[None])
                return total.value()

            return strategy.run(replica, args=(x,)), total.value(), mean.value()

        calls = strategy._channel.collective.board.calls
        own, seen, average = (float(jnp.squeeze(x)) for x in step(np.float32(rank + 1)))
        assert own == rank + 1
        assert (seen, average) == (3.0, 1.5)
        assert (float(total.numpy()), mean.numpy().tolist()) == (3.0, [1.5])
        total.assign(8.0)  # a half of it each
        assert float(total.local_value) == 4.0
        assert float(total.numpy()) == 8.0
        count.assign(np.int32(7))
        assert (int(count.local_value), int(count.numpy())) == (4 - rank, 7)
        with pytest.raises(ValueError, match=r"assign_add.*SUM"):
            total.assign_add(1.0)
        mean.assign_add([1.0])
        with pytest.raises(NotImplementedError):
            mean.scatter_add(zs.IndexedSlices(np.ones(1), np.zeros(1, np.int32)))
        return float(mean.numpy()[0]), len(calls)

    assert [value for value, _ in ranks(2, program)] == [2.5, 2.5]


def test_a_value_is_read_after_its_optimizer_moved_it():
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable(1.0)
            optimizer = zs.Optimizer(optax.sgd(0.5), count_iterations=True)

        @zs.function
        def step():
            def replica():
                optimizer.apply_gradients([(jnp.float32(1), v)])
                return v.value()

            return strategy.run(replica)

        return float(step()), int(optimizer.iterations.numpy())

    assert ranks(2, program) == [(0.0, 1), (0.0, 1)]


def test_a_gradient_that_is_reduced_already_is_applied_as_it_is():
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable(0.0)
            optimizer = zs.Optimizer(optax.sgd(1.0))

        @zs.function
        def step(x):
            def replica(x):
                context = zs.get_replica_context()
                whole = jnp.minimum(context.all_reduce("sum", x), 2.0)
                context.merge_call(
                    lambda strategy, g: optimizer.apply_gradients([(g, v)]), (whole,)
                )

            strategy.run(replica, args=(x,))

        step(np.float32(rank + 1))
        return float(v.numpy())

    assert ranks(2, program) == [-2.0, -2.0]


def test_a_step_that_fails_in_a_collective_has_changed_nothing():
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable(1.0)
            optimizer = zs.Optimizer(optax.adam(0.5))
        drawn = zs.StepIterator([np.float32(n) for n in range(1, 5)])

        @zs.function
        def step(iterator):
            def replica(x):
                optimizer.apply_gradients([(x, v)])

            x = next(iterator)
            strategy.run(replica, args=(x,))
            return x

        assert float(step(drawn)) == 1
        collective = strategy._channel.collective
        whole = collective.all_reduce
        before = float(v.numpy())

        def lost(tree, op="sum"):
            raise zs.PeerLostError("/job:worker/task:1", "gone")

        collective.all_reduce = lost
        with pytest.raises(zs.PeerLostError, match="task:1"):
            step(drawn)
        assert float(v.numpy()) == before
        collective.all_reduce = whole
        return float(step(drawn)), float(v.numpy()) != before

    assert ranks(2, program) == [(2.0, True)] * 2


def test_checkpoints_have_values_and_slots(tmp_path):
    def program(strategy, rank, path):
        with strategy.scope():
            v = zs.Variable([1.0, 2.0])
            optimizer = zs.Optimizer(optax.adam(0.1))

        @zs.function
        def step():
            strategy.run(lambda: optimizer.apply_gradients([(jnp.ones(2), v)]), args=())

        saved = zs.Checkpoint(v=v, optimizer=optimizer)
        step()
        if rank == 0:
            saved.write(str(path / "one"))
        step()
        expected = v.numpy().copy()
        strategy._channel.collective.board.barrier.wait()
        saved.read(str(path / "one"))
        assert not np.array_equal(v.numpy(), expected)
        step()
        np.testing.assert_array_equal(v.numpy(), expected)

    ranks(2, lambda strategy, rank: program(strategy, rank, tmp_path))


def test_one_process_needs_no_group():
    strategy = zs.MultiWorkerMirroredStrategy(
        zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec({}))
    )
    with strategy.scope():
        v = zs.Variable(1.0, aggregation=zs.VariableAggregation.SUM)

    @zs.function
    def step():
        strategy.run(lambda: [v.assign_add(1.0)][1:])
        return strategy.reduce("sum", v.value(), None)

    assert strategy.num_replicas_in_sync == 1
    assert float(step()) == 2.0
    strategy.reform()
    strategy.close()


def test_options_are_those_of_tensorflow():
    options = zs.CommunicationOptions(bytes_per_pack=10, implementation="ring")
    assert options.implementation is zs.CommunicationImplementation.RING
    merged = options.merge(zs.CommunicationOptions(timeout_seconds=3.0))
    assert merged == zs.CommunicationOptions(10, 3.0, options.implementation)
    assert options.merge(None) is options
    with pytest.raises(ValueError, match="bytes_per_pack"):
        zs.CommunicationOptions(bytes_per_pack=-1)
    with pytest.raises(
        ValueError, match=r"`implementation`.*CommunicationImplementation"
    ):
        zs.CommunicationOptions(implementation=3)
    with pytest.raises(ValueError, match="'RING'"):
        zs.CommunicationOptions(implementation="carrier pigeon")
