"""``python -m benchmarks.local_loss``: what local steps cost in loss.

Four workers train the character transformer of the examples with the same number of
characters: synchronously, and with local steps whose differences travel in several
formats. Prints the bits per character of texts that were not trained on. Nothing here
is timed, so it may run on a busy machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

WORKERS = 4
BATCH = 4
EXAMPLES = Path(__file__).parent.parent / "examples"


def bits_after(steps: int, every: int, wire: str | None, seed: int) -> float:
    """Trains on workers that make ``steps`` each, and exchange the model once in
    ``every``; 1: in synchronous rounds. Returns bits per character of other texts."""
    import jax
    import optax

    import zstrat as zs

    sys.path.insert(0, str(EXAMPLES))
    from char_transformer import CONTEXT, bits, init_params
    from plain_texts import load_texts

    text, other = load_texts()
    rounds = zs.Rounds(workers=WORKERS)
    # Bytes in shared memory are never encoded.
    with (
        zs.LocalCluster(1, WORKERS, transport="tcp") as cluster,
        zs.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        with strategy.scope():
            params = zs.create_variables(init_params(seed, 1))
            if every == 1:
                optimizer: Any = zs.Optimizer(optax.adamw(3e-3), rounds=rounds)
            else:
                outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
                optimizer = zs.LocalOptimizer(
                    optax.adamw(3e-3), outer, every=every, rounds=rounds, wire=wire
                )
        coordinator = zs.ClusterCoordinator(strategy)

        def train_step(iterator: Any) -> Any:
            loss, grads = zs.value_and_grad(bits)(params, next(iterator))
            optimizer.apply_gradients(grads, params)
            return loss

        def dataset_fn(context: Any) -> Any:
            random = np.random.default_rng([seed, context.input_pipeline_id])
            while True:
                starts = random.integers(0, len(text) - CONTEXT, (BATCH, 1))
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
    return float(jax.jit(bits)(values, batch))


def main() -> None:
    parser = argparse.ArgumentParser(description="What local steps cost in loss.")
    parser.add_argument("--steps", type=int, default=600, help="of each worker")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    given = options.steps, options.seed
    synchronous = bits_after(given[0], 1, None, given[1])
    print(f"synchronous: {synchronous:.4f} bits per character", flush=True)
    exact = 0.0
    for wire in (None, "int8", "int4", "e3m0"):
        found = bits_after(given[0], options.every, wire, given[1])
        exact = exact or found
        print(
            f"every {options.every}, {wire or 'float32'}: {found:.4f} "
            f"({found / synchronous - 1:+.2%} of synchronous, "
            f"{found / exact - 1:+.2%} of float32)",
            flush=True,
        )


if __name__ == "__main__":
    main()
