"""A character-level transformer, trained synchronously by several processes.

It has about a million parameters, and reads licences and documentation of this machine.
Every process computes gradients of its share of the batch; they are summed over all
before each update. By default this program starts four of itself on this machine; if
TF_CONFIG is set it is that one task of a cluster.

    python examples/char_transformer.py
    python examples/char_transformer.py --workers 2 --steps 2000
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from plain_texts import ALPHABET, load_texts

import zstrat as zs

GOAL = 2.5
"""Bits per character of texts that were not trained on."""

WIDTH, HEADS, CONTEXT = 128, 4, 64


def init_params(seed, layers):
    """Weights of variance 1/n for n inputs; what adds to the stream scaled down."""
    random = np.random.default_rng(seed)

    def matrix(rows, columns, scale=None):
        scale = rows**-0.5 if scale is None else scale
        return random.normal(0, scale, (rows, columns)).astype(np.float32)

    def block():
        deep = (2 * layers) ** -0.5
        return {
            "norm1": np.ones(WIDTH, np.float32),
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH, deep * WIDTH**-0.5),
            "norm2": np.ones(WIDTH, np.float32),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH, deep * (4 * WIDTH) ** -0.5),
        }

    return {
        "embed": matrix(len(ALPHABET), WIDTH, 0.02),
        "position": matrix(CONTEXT, WIDTH, 0.02),
        "blocks": [block() for _ in range(layers)],
        "norm": np.ones(WIDTH, np.float32),
    }


def apply(params, text):
    """Logits [n, length, alphabet] of the characters that follow those of ``text``."""
    n, length = text.shape
    mask = jnp.tril(jnp.ones((length, length), bool))
    x = params["embed"][text] + params["position"][:length]
    for block in params["blocks"]:
        mixed = normed(x, block["norm1"]) @ block["qkv"]
        q, k, v = jnp.split(mixed.reshape(n, length, 3 * HEADS, -1), 3, axis=2)
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) * (WIDTH // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        seen = jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(x.shape)
        x = x + seen @ block["out"]
        x = x + jax.nn.gelu(normed(x, block["norm2"]) @ block["up"]) @ block["down"]
    return normed(x, params["norm"]) @ params["embed"].T


def normed(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def bits(params, text):
    """Mean bits per character of texts [n, length + 1]."""
    logits = apply(params, text[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return losses.mean() / np.log(2)


def schedule(steps, rate):
    return optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps, rate / 10)


class Training:
    """The variables and the step of one process."""

    def __init__(self, strategy, text, options):
        replicas = strategy.num_replicas_in_sync
        if options.batch % replicas:
            raise SystemExit(f"--batch {options.batch}: not a multiple of {replicas}")
        share = options.batch // replicas
        with strategy.scope():
            start = init_params(options.seed, options.layers)
            self.params = zs.create_variables(start)
            self.optimizer = zs.Optimizer(
                optax.adamw(schedule(options.steps, options.rate))
            )
        params, optimizer = self.params, self.optimizer

        @zs.function
        def train_step(iterator):
            def replica_fn(batch):
                # Gradients are summed over the replicas, so each gives its share.
                def loss_fn(params):
                    return bits(params, batch) / replicas

                loss, grads = zs.value_and_grad(loss_fn)(params)
                optimizer.apply_gradients(grads, params)
                return loss

            losses = strategy.run(replica_fn, args=(next(iterator),))
            return strategy.reduce("sum", losses, axis=None)

        def dataset_fn(context):
            random = np.random.default_rng([options.seed, context.input_pipeline_id])
            rows = share * replicas // context.num_input_pipelines
            while True:
                starts = random.integers(0, len(text) - CONTEXT, (rows, 1))
                yield text[starts + np.arange(CONTEXT + 1)].astype(np.int32)

        self.step = train_step
        data = strategy.distribute_datasets_from_function(dataset_fn)
        self.iterator = iter(data)

    def test(self, text, most):
        """Bits per character of ``text``, in at most so many windows side by side."""
        rows = min(len(text) // (CONTEXT + 1), most)
        windows = text[: rows * (CONTEXT + 1)].reshape(rows, -1)
        weights = jax.tree.map(lambda variable: variable.numpy(), self.params)
        return float(jax.jit(bits)(weights, windows.astype(np.int32)))


def train_all(training, test, options, tell):
    """Trains; returns the bits per character of the test at the end."""
    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        loss = training.step(training.iterator)
        if step % options.every == 0:
            rate = step / (time.perf_counter() - began)
            tell(
                f"step {step}/{options.steps}  {float(loss):.3f} bits per character  "
                f"{rate:.1f} steps/s"
            )
    found = training.test(test, options.windows)
    seconds = time.perf_counter() - began
    tell(f"test: {found:.3f} bits per character (goal {GOAL}) in {seconds:.0f} s")
    return found


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=int, default=4, help="processes to start here")
    add("--steps", type=int, default=1000)
    add("--batch", type=int, default=16, help="windows of text, over all processes")
    add("--rate", type=float, default=3e-3, help="highest learning rate of AdamW")
    add("--every", type=int, default=50, help="steps between two lines")
    add("--layers", type=int, default=5, help="blocks of the model")
    add("--windows", type=int, default=1000, help="of text to test, at most")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    options = arguments()
    if not os.environ.get("TF_CONFIG"):
        copies = [sys.executable, "-m", "zstrat.cli", "run", "-n", str(options.workers)]
        return subprocess.call([*copies, __file__, *sys.argv[1:]])
    train, test = load_texts()
    with zs.MultiWorkerMirroredStrategy() as strategy:
        training = Training(strategy, train, options)
        saves = strategy.extended.should_checkpoint
        tell = print if saves else lambda line: None
        parameters = sum(variable.size for variable in jax.tree.leaves(training.params))
        tell(f"{len(train):,} characters, {parameters:,} parameters, {strategy}")
        found = train_all(training, test, options, tell)
    return 0 if found < GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
