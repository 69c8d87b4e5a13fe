"""The program on the page of ParameterServerStrategy, line by line, on real daemons."""

import numpy as np
import optax
import pytest

import zstrat as zs

pytestmark = pytest.mark.processes

ROWS = np.arange(8, dtype=np.float32)


def dataset_fn():
    dataset = zs.data.Dataset.from_tensor_slices((ROWS, 3 * ROWS))
    return dataset.shuffle(8, seed=0).repeat().batch(4)


def program(cluster_resolver, checkpoint_dir, num_epoch, steps_per_epoch=5):
    """The page's coordinator: it goes on where the checkpoints end."""
    strategy = zs.experimental.ParameterServerStrategy(cluster_resolver)
    coordinator = zs.experimental.coordinator.ClusterCoordinator(strategy=strategy)
    distributed_dataset = coordinator.create_per_worker_dataset(dataset_fn)
    with strategy:
        with strategy.scope():
            w = zs.Variable(0.0, name="w")
            seen = zs.Variable(0.0, name="seen")
            optimizer = zs.Optimizer(optax.sgd(0.005), count_iterations=True)
            checkpoint = zs.Checkpoint(w=w, seen=seen, optimizer=optimizer)
            manager = zs.CheckpointManager(checkpoint, checkpoint_dir, max_to_keep=2)
            manager.restore_or_initialize()
        initial_epoch = int(optimizer.iterations.numpy()) // steps_per_epoch

        @zs.function
        def worker_fn(iterator):
            def replica_fn(inputs):
                batch_data, labels = inputs

                def loss(w):
                    return ((batch_data * w - labels) ** 2).mean()

                optimizer.apply_gradients([(zs.grad(loss)(w), w)])
                seen.assign_add(np.float32(len(labels)))

            strategy.run(replica_fn, args=(next(iterator),))

        for _ in range(initial_epoch, num_epoch):
            distributed_iterator = iter(distributed_dataset)
            for _ in range(steps_per_epoch):
                coordinator.schedule(worker_fn, args=(distributed_iterator,))
            coordinator.join()
            manager.save()
        kept = [path.rpartition("-")[2] for path in manager.checkpoints]
        return initial_epoch, float(w.numpy()), float(seen.numpy()), kept


@pytest.mark.shows("tf.distribute.experimental.ParameterServerStrategy")
@pytest.mark.shows("tf.distribute.experimental.coordinator.ClusterCoordinator")
@pytest.mark.shows("ClusterCoordinator.schedule", "ClusterCoordinator.join")
@pytest.mark.shows("CheckpointManager.save", "optimizer.iterations")
def test_the_program_of_the_page(daemons, tmp_path):
    found = program(daemons.resolver, tmp_path, num_epoch=3)
    assert (found[0], found[2], found[3]) == (0, 3 * 5 * 4, ["2", "3"])
    # It goes on from the third epoch, with what the first three have learnt.
    again = program(daemons.resolver, tmp_path, num_epoch=5)
    assert (again[0], again[2], again[3]) == (3, 5 * 5 * 4, ["4", "5"])
    assert abs(again[1] - 3) < abs(found[1] - 3) < 0.5
