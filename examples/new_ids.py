"""Items that come and go: a table of any id beside one of fixed size.

A shop has new items all the time, and old ones are no longer sold. Their ids are drawn
from 10¹²; nobody has a list of them. Whether a visitor clicks depends on the item. Two
models learn that from the same visits, each in about three times as many rows as items
are sold at a time:

- ``hashed``: a `zs.HashTable`, which evicts rows that no visit has used for long;
- ``modulo``: a `zs.Variable`, in which an item has the row of its id modulo the number
  of rows, as others have it, today's and those of long ago.

Prints a table of the area under the ROC curve (AUC: 50 % is guessing) over time, each
of visits that the models had not seen; ``--out`` draws it.

    python examples/new_ids.py
    python examples/new_ids.py --steps 3000 --out out/new_ids.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from recommender import auc

import zstrat as zs

ROWS = 3
"""Rows of the table of fixed size for each item that is sold at a time: as many as the
other one has in the end."""


class Shop:
    """Batches of visits. Step t has the items t · new to t · new + sold."""

    def __init__(self, options):
        self._options = options
        random = np.random.default_rng(0)
        count = options.steps * options.new + options.sold
        self._ids = random.choice(10**12, count, replace=False)
        self._effects = random.normal(scale=2.0, size=count)

    def visits(self, step):
        """Returns ids int64 [batch], of which some come often, and clicks float32."""
        random = np.random.default_rng((1, step))
        rank = np.exp(
            random.uniform(0, np.log(self._options.sold), self._options.batch)
        )
        item = step * self._options.new + (rank.astype(int) * 7919) % self._options.sold
        chance = 1 / (1 + np.exp(-self._effects[item]))
        clicks = random.random(len(item)) < chance
        return self._ids[item], clicks.astype(np.float32)


def models(strategy, options):
    """Returns the table of any id, and a step that trains both: logits [2, batch]."""
    zeros = zs.initializers.constant(0.0)
    with strategy.scope():
        rule = zs.eviction.steps(2 * options.sold // options.new)
        hashed = zs.HashTable(1, initializer=zeros, eviction=rule, name="hashed")
        shape = (ROWS * options.sold, 1)
        modulo = zs.Variable(zeros, shape=shape, dtype="float32", name="modulo")
        optimizer = zs.Optimizer(optax.adagrad(options.rate))

    @zs.function
    def train_step(ids, places, clicks):
        def loss(tables):
            one = zs.embedding_lookup(tables[0], ids)[:, 0]
            other = zs.embedding_lookup(tables[1], places)[:, 0]
            logits = jnp.stack([one, other])
            losses = optax.sigmoid_binary_cross_entropy(logits, clicks[None])
            return losses.mean(axis=1).sum(), logits

        tables = [hashed, modulo]
        grads, logits = zs.grad(loss, has_aux=True)(tables)
        optimizer.apply_gradients(grads, tables)
        return logits

    return hashed, train_step


def train(coordinator, hashed, step, shop, options):
    """Returns lines: step, AUC of both, rows of the table of any id."""
    lines, logits, clicks = [], [], []
    for number in range(options.steps):
        ids, own = shop.visits(number)
        args = (ids, ids % (ROWS * options.sold), own)
        logits.append(coordinator.schedule(step, args=args))
        clicks.append(own)
        if (number + 1) % options.every == 0:
            both = np.concatenate([each.fetch() for each in logits], axis=1)
            areas = [auc(each, np.concatenate(clicks)) for each in both]
            hashed.evict()
            lines.append((number + 1, *areas, len(hashed)))
            print("{:>6} {:>8.1%} {:>8.1%} {:>7}".format(*lines[-1]), flush=True)
            logits, clicks = [], []
    return lines


def draw(lines, path):
    """Draws both AUC over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, hashed, modulo, _ = zip(*lines, strict=True)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(steps, hashed, label="table of any id, old rows evicted")
    axes.plot(steps, modulo, label="as many rows, id modulo rows")
    axes.set(xlabel="step", ylabel="AUC on visits that were not seen")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--ps", type=int, default=2, help="parameter servers to start here")
    add("--workers", type=int, default=2, help="workers to start here")
    add("--steps", type=int, default=2000)
    add("--every", type=int, default=200, help="steps between two lines")
    add("--batch", type=int, default=256)
    add("--sold", type=int, default=2000, help="items that are sold at a time")
    add("--new", type=int, default=10, help="items that are new with each step")
    add("--rate", type=float, default=0.5, help="learning rate of Adagrad")
    add("--out", type=Path, help="the picture; default: none")
    return parser.parse_args()


def main():
    options = arguments()
    with zs.LocalCluster(options.ps, options.workers) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        with strategy:
            coordinator = zs.ClusterCoordinator(strategy)
            hashed, step = models(strategy, options)
            print(f"{'step':>6} {'hashed':>8} {'modulo':>8} {'rows':>7}")
            lines = train(coordinator, hashed, step, Shop(options), options)
    if options.out is not None:
        draw(lines, options.out)
    _, one, other, _ = lines[-1]
    print(f"at the end {one:.1%} by a table of any id, {other:.1%} by modulo")
    return 0 if one > other else 1


if __name__ == "__main__":
    sys.exit(main())
