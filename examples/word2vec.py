"""Vectors of Python's words, trained asynchronously on parameter servers.

Skip-gram with negative sampling over the standard library's own source: each name and
keyword learns to predict its neighbours. Two tables of vectors are sharded over the
parameter servers, which also run Adagrad; a step moves only the rows that it touches.
By default on 2 ps + 2 worker daemons that this program starts on this machine; on a
cluster that runs already if TF_CONFIG is set or ``--cluster FILE.toml`` is given.

    python examples/word2vec.py
    python examples/word2vec.py --cluster cluster.toml --keys keys/

Ctrl-C saves a checkpoint; the next run goes on from the latest one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import deque
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import source_tokens
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import zstrat as zs

GOAL = 0.3
"""How much nearer than words drawn at random the pairs below must be (cosine)."""
KIN = (
    ("int", "float"),
    ("str", "bytes"),
    ("True", "False"),
    ("try", "except"),
    ("return", "if"),
    ("self", "def"),
    ("dict", "list"),
    ("Lock", "RLock"),
    ("Lock", "Condition"),
    ("Lock", "Semaphore"),
)
SMOKE_PACKAGES = ("threading", "queue", "multiprocessing", "asyncio", "concurrent")


def sampling(corpus, threshold):
    """Chance of each word to be kept in a pass, and cumulated chance to be a negative.

    As word2vec has them: frequent words say little about their neighbours, so most of
    them are dropped; negatives follow the counts to the power 3/4.
    """
    share = corpus.counts / len(corpus.tokens)
    keep = np.minimum(1.0, np.sqrt(threshold / share) + threshold / share)
    noise = np.cumsum(corpus.counts**0.75)
    return keep, noise / noise[-1]


def batches(tokens, keep, noise, options, seed):
    """Batches for ever, each pass over the text in an order of its own.

    ``center`` [b], ``context`` [b, 2w] with ``mask`` of those that count (a window of a
    random size up to w, as word2vec has it), ``negative`` [s] for all of the batch.
    """
    random = np.random.default_rng(seed)
    size, width = options.batch, options.window
    offsets = np.r_[-width:0, 1 : width + 1]
    while True:
        text = tokens[random.random(len(tokens)) < keep[tokens]].astype(np.int32)
        order = random.permutation(len(text))
        for start in range(0, len(order) - size + 1, size):
            at = order[start : start + size]
            near = at[:, None] + offsets
            reach = random.integers(1, width + 1, size)[:, None]
            mask = (abs(offsets) <= reach) & (near >= 0) & (near < len(text))
            drawn = np.searchsorted(noise, random.random(options.negatives))
            yield {
                "center": text[at],
                "context": text[near.clip(0, len(text) - 1)],
                "mask": mask.astype(np.float32),
                "negative": drawn.astype(np.int32),
            }


def loss_fn(words, contexts, batch, weight):
    """Sum over the pairs of a batch for the gradient, and their mean to look at.

    The negatives are shared by the whole batch: one product of two matrices scores
    them, and ``weight`` makes them count as the five of each pair that word2vec draws.
    """
    center = zs.embedding_lookup(words, batch["center"])
    context = zs.embedding_lookup(contexts, batch["context"])
    negative = zs.embedding_lookup(contexts, batch["negative"])
    mask = batch["mask"]
    right = jnp.einsum("bd,bwd->bw", center, context)
    wrong = jax.nn.softplus(center @ negative.T).sum(-1)
    pairs = mask.sum(-1)
    loss = jnp.sum(mask * jax.nn.softplus(-right)) + weight * jnp.sum(pairs * wrong)
    return loss, loss / mask.sum()


class Training:
    """The variables, the step, the checkpoints and the closures that are under way."""

    def __init__(self, strategy, corpus, options):
        shape, seed = (len(corpus.words), options.dim), options.seed
        start = zs.initializers.uniform(-0.5 / options.dim, 0.5 / options.dim, seed)
        with strategy.scope():
            words = zs.Variable(start, shape=shape, dtype="float32", name="words")
            zeros = zs.initializers.zeros
            contexts = zs.Variable(zeros, shape=shape, dtype="float32", name="contexts")
            optimizer = zs.Optimizer(optax.adagrad(options.rate))
            self.done = zs.Variable(0, trainable=False, dtype="int32", name="done")
        self.words, self.scheduled = words, 0
        self.checkpoints = zs.CheckpointManager(
            zs.Checkpoint(
                words=words, contexts=contexts, optimizer=optimizer, done=self.done
            ),
            options.out / corpus.digest,
            max_to_keep=3,
        )
        weight = 5 / options.negatives

        @zs.function
        def train_step(iterator):
            (_, loss), grads = zs.value_and_grad(loss_fn, (0, 1), has_aux=True)(
                words, contexts, next(iterator), weight
            )
            optimizer.apply_gradients(grads, (words, contexts))
            return loss

        self.step = train_step
        self.coordinator = zs.ClusterCoordinator(strategy)
        keep, noise = sampling(corpus, options.subsample)
        self.total = int(options.epochs * (keep * corpus.counts).sum() / options.batch)
        # What is resumed continues with other random numbers than the run began with.
        self.scheduled = self._restored(options.fresh)
        first, tokens = self.scheduled, corpus.tokens

        def dataset_fn(context):
            source = (seed, first, context.input_pipeline_id)
            made = (tokens, keep, noise, options, source)
            return zs.data.Dataset.from_generator(batches, made).prefetch(4)

        self.iterator = iter(self.coordinator.create_per_worker_dataset(dataset_fn))

    def _restored(self, fresh):
        if not fresh and self.checkpoints.restore_or_initialize():
            return int(self.done.numpy())
        return 0

    def losses(self, ahead):
        """Loss of step after step, while ``ahead`` others are under way."""
        waiting = deque()
        while self.scheduled < self.total:
            waiting.append(self.coordinator.schedule(self.step, args=(self.iterator,)))
            self.scheduled += 1
            if len(waiting) > ahead:
                yield float(waiting.popleft().fetch())
        while waiting:
            yield float(waiting.popleft().fetch())

    def save(self, done):
        """A checkpoint of the tables, Adagrad's state, and how many steps made them."""
        self.done.assign(done)
        return self.checkpoints.save(checkpoint_number=done)


def train_all(training, options):
    """Trains with a progress bar, a checkpoint now and then. Returns the losses.

    Raises:
        KeyboardInterrupt: Ctrl-C; what was under way is in a checkpoint.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
    )
    done, history, rate = training.scheduled, [], 0.0
    began = time.perf_counter()
    with Progress(*columns, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(
            "compiling", total=training.total, completed=done, loss=np.nan, rate=rate
        )
        try:
            for loss in training.losses(options.ahead):
                done += 1
                now = time.perf_counter()
                if history:
                    rate = len(history) * options.batch / (now - began)
                else:
                    began = now
                history.append(loss)
                bar.update(
                    task, description="training", completed=done, loss=loss, rate=rate
                )
                if done % options.every == 0:
                    recent = np.mean(history[-options.every :])
                    if not sys.stdout.isatty():
                        print(
                            f"step {done}/{training.total}  loss {recent:.3f}  "
                            f"{rate:,.0f} tokens/s",
                            flush=True,
                        )
                if done % options.save_every == 0:
                    training.save(done)
        except KeyboardInterrupt:
            # Steps under way are few; each of them is applied or none.
            training.coordinator.join()
            path = training.save(training.scheduled)
            print(f"\nstopped at step {training.scheduled}: {path}; run again to go on")
            raise
    training.coordinator.join()
    if history:
        training.save(done)
    return history


def nearest(vectors, corpus, word, count, common):
    """The words whose vectors point most nearly where this one's does, with cosines.

    Of those seen at least ``common`` times: a vector learned from five places in one
    file is near everything in that file.
    """
    at = corpus.number(word)
    cosines = vectors @ vectors[at]
    order = np.argsort(-np.where(corpus.counts >= common, cosines, -2.0))
    found = [int(i) for i in order[: count + 1] if i != at]
    return [(corpus.words[i], float(cosines[i])) for i in found[:count]]


def margin(vectors, corpus, common):
    """How much nearer pairs that belong together are than words drawn at random."""
    known = [[w for w in pair if w in corpus.words] for pair in KIN]
    pairs = [[corpus.number(w) for w in pair] for pair in known if len(pair) == 2]
    kin = np.mean([vectors[a] @ vectors[b] for a, b in pairs])
    frequent = vectors[corpus.counts >= common]
    n = len(frequent)
    # All pairs of different words: |sum of vectors|^2 less the n that are themselves.
    chance = (np.square(frequent.sum(0)).sum() - n) / (n * (n - 1))
    return float(kin - chance)


def find_cluster(options, stack):
    """The resolver of the cluster to use: named, from TF_CONFIG, or started here."""
    if options.cluster:
        return zs.cluster_resolver.TomlClusterResolver(options.cluster)
    if os.environ.get("TF_CONFIG"):
        return zs.cluster_resolver.TFConfigClusterResolver()
    print(f"starting {options.ps} ps and {options.workers} workers on this machine")
    return stack.enter_context(zs.LocalCluster(options.ps, options.workers)).resolver


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cluster", metavar="FILE.toml", help="a running cluster; or set TF_CONFIG")
    add("--keys", metavar="DIR", help="its key folder; or set ZSTRAT_KEYS")
    add("--ps", type=int, default=2, help="parameter servers to start here")
    add("--workers", type=int, default=2, help="workers to start here")
    add("--epochs", type=float, default=6, help="passes over the subsampled text")
    add("--batch", type=int, default=1024, help="words in a step")
    add("--dim", type=int, default=64, help="length of a vector")
    add("--window", type=int, default=3, help="words to look at on either side")
    add("--negatives", type=int, default=256, help="shared by a batch")
    add("--rate", type=float, default=0.2, help="learning rate of Adagrad")
    add("--min-count", type=int, default=5, help="rarer words are left out")
    add("--common", type=int, default=40, help="rarer words are no neighbours")
    add("--subsample", type=float, default=1e-4, help="threshold of frequent words")
    add("--shard-bytes", type=int, default=256 << 10, help="smallest part of a table")
    add("--ahead", type=int, default=32, help="steps under way at a time")
    add("--every", type=int, default=500, help="steps between two lines of a log")
    add("--save-every", type=int, default=1000, help="steps between two checkpoints")
    add("--seed", type=int, default=0)
    add("--cache", type=Path, default=source_tokens.default_cache(), metavar="DIR")
    add("--out", type=Path, default=Path("out/word2vec"), help="checkpoints")
    add("--fresh", action="store_true", help="do not go on from the latest checkpoint")
    add("--smoke", action="store_true", help="a few packages and steps, to try it")
    add("words", nargs="*", default=["self", "int", "return", "Lock"])
    if parser.parse_args().smoke:
        small = {"batch": 256, "negatives": 64, "min_count": 3, "common": 10}
        parser.set_defaults(**small, epochs=4, subsample=1e-3, shard_bytes=64 << 10)
    return parser.parse_args()


def main():
    options = arguments()
    if options.keys:
        os.environ["ZSTRAT_KEYS"] = options.keys
    packages = SMOKE_PACKAGES if options.smoke else None
    corpus = source_tokens.load(options.cache, options.min_count, packages)
    print(f"{len(corpus.tokens):,} tokens of {len(corpus.words):,} words")
    if unknown := set(options.words).difference(corpus.words):
        print(f"seen less than {options.min_count} times: {', '.join(unknown)}")
        return 2
    options.out = options.out.resolve()  # the daemons write it, too
    with contextlib.ExitStack() as stack:
        resolver = find_cluster(options, stack)
        servers = resolver.cluster_spec().num_tasks("ps")
        parts = zs.partitioners.MinSizePartitioner(options.shard_bytes, servers)
        strategy = zs.ParameterServerStrategy(resolver, variable_partitioner=parts)
        training = Training(strategy, corpus, options)
        # Daemons that this program started end with it; others serve the next one.
        ours = not (options.cluster or os.environ.get("TF_CONFIG"))
        stack.callback(training.coordinator.shutdown, cluster=ours)
        stack.callback(training.checkpoints.close)
        if training.scheduled:
            print(f"going on from step {training.scheduled}")
        began = time.perf_counter()
        try:
            history = train_all(training, options)
        except KeyboardInterrupt:
            return 130
        seconds = time.perf_counter() - began
        vectors = training.words.numpy()
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    print(f"{len(history)} steps in {seconds:.1f} s")
    for word in options.words:
        found = nearest(vectors, corpus, word, 8, options.common)
        print(f"{word:>8}:", "  ".join(f"{w} {cosine:.2f}" for w, cosine in found))
    nearer = margin(vectors, corpus, options.common)
    print(f"kindred words are nearer than chance by {nearer:.2f} (goal {GOAL})")
    return 0 if nearer >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
