"""One task of a MultiWorkerMirroredStrategy, in a process of its own: linear regression
with Adam, on this task's rows of a batch. Prints a line of JSON at the end.

    python mirrored_task.py IMPLEMENTATION STEPS [DIES_BEFORE_STEP]
"""

import json
import os
import signal
import sys

import jax.numpy as jnp
import numpy as np
import optax

import zstrat as zs

X = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
W = np.random.default_rng(2).normal(size=(5, 3)).astype(np.float32)
LOST = (zs.PeerLostError, zs.CollectiveTimeoutError, zs.UnavailableError)


def main(implementation, steps, dies_before=-1):
    options = zs.CommunicationOptions(
        implementation=implementation, timeout_seconds=30.0
    )
    with zs.MultiWorkerMirroredStrategy(communication_options=options) as strategy:
        resolver = strategy.cluster_resolver
        rank, size = resolver.task_id, resolver.cluster_spec().num_tasks("worker")
        devices = strategy.num_replicas_in_sync // size
        with strategy.scope():
            w = zs.Variable(W if rank == 0 else np.zeros_like(W))
            step = zs.Variable(0, aggregation=zs.VariableAggregation.ONLY_FIRST_REPLICA)
            optimizer = zs.Optimizer(optax.adam(0.1))

        @zs.function
        def train_step(x, y):
            def replica(x, y):
                def loss(w):
                    return jnp.sum((x @ w - y) ** 2) / Y.size / devices

                value, gradient = zs.value_and_grad(loss)(w)
                optimizer.apply_gradients(gradient, w)
                step.assign_add(1)
                context = zs.get_replica_context()
                # Broadcast: of that XLA takes a constant for the same in all processes.
                numbers = jnp.full((1, 2), context.replica_id_in_sync_group)
                return value, context.all_gather(numbers, 0)

            value, numbers = strategy.run(replica, args=(x, y))
            first = strategy.experimental_local_results(numbers)[0]
            return strategy.reduce("sum", value, None), first

        mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
        losses, errors = {}, []
        while (now := int(step.numpy())) < steps:
            if now == dies_before:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                loss, numbers = train_step(X[mine], Y[mine])
                losses[now] = float(loss)
                assert numbers[:, 0].tolist() == list(range(size * devices))
            except LOST as error:
                errors.append(str(error))
                strategy.reform(timeout=60)
        if implementation == "xla":  # its processes stay together or end together
            try:
                strategy.reform()
            except RuntimeError as error:
                errors.append(str(error))
        print(
            json.dumps(
                {
                    "losses": losses,
                    "w": w.numpy().tolist(),
                    "errors": errors,
                    "saves": strategy.extended.should_checkpoint,
                    "traces": train_step.trace_count,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
