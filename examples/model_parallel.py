"""One layer split over the logical devices of a replica, and the same numbers.

No device computes the whole hidden layer of this two-layer network: its weights and
activations are cut along the hidden axis. Eight devices are two replicas of four
logical devices; the losses of a few steps are compared with those of one device. With
no TPU the devices are parts of the CPU.

    python examples/model_parallel.py
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zstrat as zs

TOLERANCE = 1e-5
"""Of the loss, relative: what float32 leaves of sums in another order."""
CORES, LOGICAL = 8, 4


def init_params(hidden, seed):
    """Weights of variance 1/n for n inputs."""
    random = np.random.default_rng(seed)

    def weights(rows, columns):
        return random.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)

    return {"up": weights(32, hidden), "down": weights(hidden, 1)}


def batches(options):
    """Regression on a fixed random function; the whole batch of each step."""
    random = np.random.default_rng(options.seed + 1)
    teacher = random.normal(0, 1, (32, 1)).astype(np.float32)
    for _ in range(options.steps):
        x = random.normal(0, 1, (options.batch, 32)).astype(np.float32)
        yield x, np.tanh(x @ teacher)


def loss_fn(params, x, y, split=lambda array, dims: array):
    """Mean squared error; ``split`` says how arrays are cut."""
    up = split(params["up"], [1, LOGICAL])
    down = split(params["down"], [LOGICAL, 1])
    hidden = split(jax.nn.gelu(x @ up), [1, LOGICAL])
    return jnp.mean((hidden @ down - y) ** 2)


def train_split(options):
    """Loss of every step, over replicas and logical devices."""
    resolver = zs.cluster_resolver.TPUClusterResolver(tpu="local")
    topology = zs.tpu.experimental.initialize_tpu_system(
        resolver, mesh_shape=[1, 2, 2, 2]
    )
    assignment = zs.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 2, 2], num_replicas=CORES // LOGICAL
    )
    strategy = zs.TPUStrategy(
        resolver,
        experimental_device_assignment=assignment,
        experimental_spmd_xla_partitioning=True,
    )
    with strategy.scope():
        params = zs.create_variables(init_params(options.hidden, options.seed))
        optimizer = zs.Optimizer(optax.sgd(options.rate))
    split = strategy.experimental_split_to_logical_devices

    @zs.function
    def train_step(iterator):
        def replica_fn(batch):
            x, y = batch

            def share(params):
                return loss_fn(params, x, y, split) / strategy.num_replicas_in_sync

            loss, grads = zs.value_and_grad(share)(params)
            optimizer.apply_gradients(grads, params)
            return loss

        losses = strategy.run(replica_fn, args=(next(iterator),))
        return strategy.reduce("sum", losses, axis=None)

    dataset = zs.data.Dataset.from_generator(lambda: batches(options))
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    return np.array([float(train_step(iterator)) for _ in range(options.steps)])


def train_whole(options):
    """The same steps on one device, without zstrat."""
    params = init_params(options.hidden, options.seed)
    step = jax.jit(jax.value_and_grad(loss_fn))
    losses = []
    for x, y in batches(options):
        loss, grads = step(params, x, y)
        params = jax.tree.map(lambda w, g: w - options.rate * g, params, grads)
        losses.append(float(loss))
    return np.array(losses)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--hidden", type=int, default=256, help="width of the layer that is split")
    add("--steps", type=int, default=50)
    add("--batch", type=int, default=64)
    add("--rate", type=float, default=0.05, help="learning rate")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    options = arguments()
    # Before jax looks for its devices; no accelerator takes notice of it.
    jax.config.update("jax_num_cpu_devices", CORES)
    split, whole = train_split(options), train_whole(options)
    difference = float(np.max(np.abs(split - whole) / np.abs(whole)))
    print(f"loss {whole[0]:.4f} -> {whole[-1]:.4f} on one device")
    print(
        f"loss {split[0]:.4f} -> {split[-1]:.4f} split over {LOGICAL} logical devices"
    )
    print(f"largest difference {difference:.1e} (goal {TOLERANCE:.0e})")
    return 0 if difference <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
