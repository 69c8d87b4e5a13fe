"""A program of a user, as a type checker and an editor see it. mypy reads it with the
rest of the source; it is not run."""

from __future__ import annotations

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax

import zstrat as zs


def loss_fn(params: dict[str, jax.Array], batch: Any) -> jax.Array:
    return jnp.mean(batch["x"] @ params["w"])


def dataset_fn(context: zs.InputContext) -> zs.data.Dataset:
    return zs.data.Dataset.range(10).shard(context.num_input_pipelines, 0).batch(2)


def train(cluster: zs.LocalCluster) -> str:
    strategy = zs.ParameterServerStrategy(cluster.resolver)
    assert_type(strategy, zs.ParameterServerStrategy)
    with strategy.scope():
        step_count = zs.Variable(0)
        params = zs.create_variables({"w": jnp.zeros(8)})
        optimizer = zs.Optimizer(optax.adam(0.05))
    assert_type(step_count.assign_add(1), zs.Variable)

    @zs.function
    def train_step(iterator: zs.StepIterator) -> Any:
        loss, grads = zs.value_and_grad(loss_fn)(params, next(iterator))
        optimizer.apply_gradients(grads, params)
        return loss

    assert_type(train_step, zs.Function)
    coordinator = zs.ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    loss = coordinator.schedule(train_step, args=(iterator,))
    assert_type(loss, zs.RemoteValue)
    coordinator.join()
    return zs.Checkpoint(params=params, step=step_count).save("/tmp/model")


async def evaluate(resolver: zs.cluster_resolver.TFConfigClusterResolver) -> None:
    strategy = zs.MirroredStrategy(cross_device_ops=zs.ReductionToOneDevice())
    try:
        strategy.run(jnp.sum, args=(jnp.zeros(3),))
    except zs.ZstratError as error:
        assert_type(error.retryable, bool)
    resolver.cluster_spec().as_dict()
