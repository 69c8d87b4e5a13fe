"""A trainer of Ray whose workers train with zstrat, and report."""

import json
import sys
import tempfile
from pathlib import Path

import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig

import zstrat as zs
from zstrat.integrations.ray import ZstratConfig


def train():
    import jax.numpy as jnp

    strategy = zs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weight = zs.Variable(jnp.zeros(()), name="weight")

    @zs.function
    def step(x):
        def replica(x):
            total = zs.get_replica_context().all_reduce("sum", x)
            weight.assign_add(total)
            return total

        return strategy.run(replica, args=(x,))

    rank = ray.train.get_context().get_world_rank()
    for n in range(3):
        step(jnp.float32(rank + 1))
        with tempfile.TemporaryDirectory() as folder:
            # Ray keeps metrics with checkpoints: rank 0 has one to give.
            Path(folder, "weight").write_text(str(weight.numpy()))
            kept = Checkpoint.from_directory(folder) if rank == 0 else None
            metrics = {"step": n, "weight": float(weight.numpy())}
            ray.train.report(metrics, checkpoint=kept)


def main():
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = DataParallelTrainer(
            train,
            backend_config=ZstratConfig(),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        )
        result = trainer.fit()
    print(json.dumps(result.metrics), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
