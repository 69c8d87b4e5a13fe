"""``python -m benchmarks.local_loss``: what local steps cost in loss.

Four workers train the character transformer of the examples synchronously for a while.
From there they go on with the same number of characters each time: synchronously, and
with local steps whose differences travel in several formats, at a rate that falls to
its twentieth. Prints the bits per character of texts that were not trained on. Nothing
here is timed, so it may run on a busy machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

WORKERS = 4
EXAMPLES = Path(__file__).parent.parent / "examples"


def trained(
    values: Any,
    rate: Any,
    steps: int,
    every: int,
    options: argparse.Namespace,
    wire: str | None = None,
    seed: int = 0,
) -> tuple[Any, float]:
    """Trains on workers that make ``steps`` each, and exchange the model once in
    ``every``; 1: in synchronous rounds. Returns the values, and bits per character of
    other texts."""
    import jax
    import optax
    from char_transformer import CONTEXT, bits
    from plain_texts import load_texts

    import zstrat as zs

    text, other = load_texts()
    rounds = zs.Rounds(workers=WORKERS)
    # Bytes in shared memory are never encoded.
    with (
        zs.LocalCluster(1, WORKERS, transport="tcp") as cluster,
        zs.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        with strategy.scope():
            params = zs.create_variables(values)
            if every == 1:
                optimizer: Any = zs.Optimizer(optax.adamw(rate), rounds=rounds)
            else:
                outer = optax.sgd(0.7, momentum=options.momentum, nesterov=True)
                optimizer = zs.LocalOptimizer(
                    optax.adamw(rate), outer, every=every, rounds=rounds, wire=wire
                )
        coordinator = zs.ClusterCoordinator(strategy)

        def train_step(iterator: Any) -> Any:
            loss, grads = zs.value_and_grad(bits)(params, next(iterator))
            optimizer.apply_gradients(grads, params)
            return loss

        def dataset_fn(context: Any) -> Any:
            random = np.random.default_rng([seed, context.input_pipeline_id])
            while True:
                starts = random.integers(0, len(text) - CONTEXT, (options.batch, 1))
                yield text[starts + np.arange(CONTEXT + 1)].astype(np.int32)

        function = (
            zs.function(train_step) if every == 1 else optimizer.window(train_step)
        )
        iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
        for _ in range(WORKERS * steps // every):
            coordinator.schedule(function, args=(iterator,))
        coordinator.join()
        values = jax.tree.map(
            lambda x: x.numpy(), params, is_leaf=lambda x: isinstance(x, zs.Variable)
        )
    starts = np.random.default_rng(0).integers(0, len(other) - CONTEXT, (512, 1))
    batch = other[starts + np.arange(CONTEXT + 1)].astype(np.int32)
    return values, float(jax.jit(bits)(values, batch))


def main() -> None:
    sys.path.insert(0, str(EXAMPLES))
    import optax
    from char_transformer import init_params

    parser = argparse.ArgumentParser(description="What local steps cost in loss.")
    add = parser.add_argument
    add("--first", type=int, default=400, help="synchronous steps before")
    add("--steps", type=int, default=800, help="of each worker")
    add("--every", type=int, default=20)
    add("--batch", type=int, default=16, help="windows of text, of each worker")
    add("--momentum", type=float, default=0.6, help="of the outer optimizer")
    options = parser.parse_args()
    begin, bits = trained(init_params(0, 1), 3e-3, options.first, 1, options)
    print(f"after {options.first} synchronous steps: {bits:.4f}", flush=True)
    falling = optax.cosine_decay_schedule(3e-3, options.steps, 0.05)
    given = begin, falling, options.steps
    _, synchronous = trained(*given, 1, options, seed=1)
    print(f"synchronous: {synchronous:.4f} bits per character", flush=True)
    exact = 0.0
    for wire in (None, "int8", "int4", "e3m0"):
        _, found = trained(*given, options.every, options, wire, seed=1)
        exact = exact or found
        print(
            f"every {options.every}, {wire or 'float32'}: {found:.4f} "
            f"({found / synchronous - 1:+.2%} of synchronous, "
            f"{found / exact - 1:+.2%} of float32)",
            flush=True,
        )


if __name__ == "__main__":
    main()
