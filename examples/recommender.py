"""A recommender with ten embedding tables that changes its number of servers.

Ten features of a visit (who, where, which item, ...) are looked up in ten tables, a
small network makes a logit of their rows, and the label is whether there was a click.
The script has two parts, which may run on different days:

- ``train``: on ``--ps`` parameter servers, which have the large tables in parts, and
  saves tables, network and the state of the optimizer;
- ``resume``: on ``--then-ps`` servers. Everything is compared with what was saved, bit
  by bit, and the training goes on.

The visits are made up: each value of a feature has an effect on clicks, and some values
come far more often than others. Prints a table of the loss and of the area under the
ROC curve (AUC: 50 % is guessing) on visits that were not trained on.

    python examples/recommender.py
    python examples/recommender.py --part train --ps 2 --folder run
    python examples/recommender.py --part resume --then-ps 5 --folder run
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zstrat as zs

SIZES = {
    "user": 50_000,
    "item": 20_000,
    "seller": 5_000,
    "city": 1_000,
    "category": 500,
    "referrer": 200,
    "device": 100,
    "brand": 50,
    "hour": 24,
    "language": 10,
}
"""Rows of the ten tables."""
GOAL = 0.7
"""AUC at the end; the effects that made the labels reach 0.82."""
SMALLEST = 64 << 10
"""Bytes of a part of a table: what is smaller stays whole."""


class Visits:
    """Batches of visits: ids int32 [n] by feature, and clicks float32 [n]."""

    def __init__(self):
        random = np.random.default_rng(0)
        self._effects = {name: random.normal(size=n) for name, n in SIZES.items()}

    def draw(self, seed, rows):
        """Some values come often: the logarithm of their number is uniform."""
        random = np.random.default_rng(seed)
        batch, logits = {}, np.zeros(rows)
        for name, size in SIZES.items():
            ids = np.exp(random.uniform(0, np.log(size), rows)).astype(np.int32)
            batch[name], logits = ids, logits + self._effects[name][ids] / 2
        clicks = random.random(rows) < 1 / (1 + np.exp(-logits))
        return batch, clicks.astype(np.float32)

    def batches(self, worker, rows):
        """An endless stream that is another one for each worker."""
        number = 0
        while True:
            yield self.draw((1, worker, number), rows)
            number += 1


def init_network(inputs, hidden):
    """Two layers; the first weights of variance 2/n for n inputs (He)."""
    random = np.random.default_rng(0)
    first = random.normal(0, np.sqrt(2 / inputs), (inputs, hidden))
    return {
        "first": first.astype(np.float32),
        "bias": np.zeros(hidden, np.float32),
        "last": np.zeros(hidden, np.float32),
    }


def logits_of(tables, network, ids):
    """Logits [n]; call it in a step, as it looks rows up."""
    rows = [zs.embedding_lookup(tables[name], ids[name]) for name in SIZES]
    x = jnp.concatenate(rows, axis=1)
    hidden = jax.nn.relu(x @ network["first"] + network["bias"])
    return hidden @ network["last"]


def auc(logits, clicks):
    """How often a visit with a click has the larger logit of two."""
    ranks = np.empty(len(logits))
    ranks[np.argsort(logits)] = np.arange(1, len(logits) + 1)
    yes = clicks > 0
    above = ranks[yes].sum() - yes.sum() * (yes.sum() + 1) / 2
    return above / (yes.sum() * (~yes).sum())


class Recommender:
    """The model on the servers of one cluster, and what is done with it."""

    def __init__(self, strategy, options):
        self._options, self._visits = options, Visits()
        with strategy.scope():
            start = zs.initializers.normal(0.05)
            self._tables = {
                name: zs.Variable(
                    start, shape=(n, options.width), dtype="float32", name=name
                )
                for name, n in SIZES.items()
            }
            inputs = len(SIZES) * options.width
            self._network = zs.create_variables(init_network(inputs, options.hidden))
            self._optimizer = zs.Optimizer(
                optax.adagrad(options.rate), params=(self._tables, self._network)
            )
        tables, network, optimizer = self._tables, self._network, self._optimizer

        def loss_fn(tables, network, batch):
            ids, clicks = batch
            logits = logits_of(tables, network, ids)
            return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()

        @zs.function
        def train_step(iterator):
            step = zs.value_and_grad(loss_fn, argnums=(0, 1))
            loss, grads = step(tables, network, next(iterator))
            optimizer.apply_gradients(grads, (tables, network))
            return loss

        @zs.function
        def score(ids):
            return logits_of(tables, network, ids)

        self._step, self._score = train_step, score
        self._coordinator = zs.ClusterCoordinator(strategy)
        self.checkpoint = zs.Checkpoint(
            tables=tables, network=network, optimizer=optimizer
        )

    def train(self, steps):
        visits, rows = self._visits, self._options.batch
        dataset = self._coordinator.create_per_worker_dataset(
            lambda context: visits.batches(context.input_pipeline_id, rows)
        )
        iterator = iter(dataset)
        for _ in range(steps):
            self._coordinator.schedule(self._step, args=(iterator,))
        self._coordinator.join()

    def quality(self):
        """Loss and AUC on visits that nobody trains on; a worker looks the rows up."""
        ids, clicks = self._visits.draw(2, 4096)
        logits = self._coordinator.schedule(self._score, args=(ids,)).fetch()
        losses = np.logaddexp(0, logits) - clicks * logits
        return losses.mean(), auc(logits, clicks)

    def parts(self):
        """How many parts the servers have all tables in."""
        return sum(len(getattr(t, "variables", [t])) for t in self._tables.values())

    def digests(self):
        """A number for each value and each leaf of the optimizer's state."""
        values = zs.values({"tables": self._tables, "network": self._network})
        leaves, _ = jax.tree.flatten_with_path((values, self._optimizer.state))
        return {
            jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf)).hexdigest()
            for path, leaf in leaves
        }


def train(cluster, options):
    """Trains and saves; leaves the digests of what it has saved."""
    with strategy_of(cluster, options.ps) as strategy:
        model = Recommender(strategy, options)
        show(0, options.ps, model)
        for done in range(options.every, options.steps + 1, options.every):
            model.train(options.every)
            show(done, options.ps, model)
        model.checkpoint.write(options.folder / "model")
        (options.folder / "digests.json").write_text(json.dumps(model.digests()))


def resume(cluster, options):
    """Restores, compares and goes on; returns the AUC at the end."""
    with strategy_of(cluster, options.then_ps) as strategy:
        model = Recommender(strategy, options)
        model.checkpoint.read(options.folder / "model").assert_consumed()
        saved = json.loads((options.folder / "digests.json").read_text())
        if model.digests() != saved:
            raise SystemExit("the restored values are not those that were saved")
        show("saved", options.then_ps, model)
        print(f"equal: {len(saved)} arrays, of tables, network and optimizer")
        model.train(options.every)
        return show(f"+{options.every}", options.then_ps, model)


def strategy_of(cluster, ps):
    cut = zs.partitioners.MinSizePartitioner(SMALLEST, max_shards=ps)
    return zs.ParameterServerStrategy(cluster.resolver, variable_partitioner=cut)


def show(step, ps, model):
    loss, area = model.quality()
    print(f"{step:>6} {ps:>4} {model.parts():>6} {loss:>8.4f} {area:>8.2%}", flush=True)
    return area


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--part", choices=("both", "train", "resume"), default="both")
    add("--folder", type=Path, help="of what is saved; default: one that is removed")
    add("--ps", type=int, default=3, help="parameter servers of the first part")
    add("--then-ps", type=int, default=2, help="those of the second")
    add("--workers", type=int, default=2, help="workers to start here")
    add("--steps", type=int, default=600, help="of the first part")
    add("--every", type=int, default=200, help="steps between two lines")
    add("--batch", type=int, default=256)
    add("--width", type=int, default=8, help="of a row")
    add("--hidden", type=int, default=32, help="width of the network")
    add("--rate", type=float, default=0.1, help="learning rate of Adagrad")
    options = parser.parse_args()
    if options.part != "both" and options.folder is None:
        parser.error(f"--part {options.part} needs --folder, where the model is saved")
    return options


def main():
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = options.folder or Path(folder)
        options.folder.mkdir(parents=True, exist_ok=True)
        print(f"{'step':>6} {'ps':>4} {'parts':>6} {'loss':>8} {'AUC':>8}")
        if options.part != "resume":
            with zs.LocalCluster(options.ps, options.workers) as cluster:
                train(cluster, options)
        if options.part == "train":
            return 0
        with zs.LocalCluster(options.then_ps, options.workers) as cluster:
            area = resume(cluster, options)
    print(f"AUC {area:.2%} (goal {GOAL:.0%})")
    return 0 if area >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
