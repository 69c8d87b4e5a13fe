"""Handwritten digits, trained on parameter servers.

The 1,797 images that scikit-learn ships, a small convolutional network in plain JAX,
Adam on the parameter servers. By default on 2 ps + 2 worker daemons that this program
starts on this machine; on a cluster that runs already if TF_CONFIG is set or
``--cluster FILE.toml`` is given. Steps are asynchronous unless you say otherwise.

    python examples/digits.py
    python examples/digits.py --rounds 0 --rate 2e-3  # synchronous; 1: a backup worker
    python examples/digits.py --cluster cluster.toml --keys keys/
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
import numpy as np
import optax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import zstrat as zs

GOAL = 0.97
CLASSES = 10
TEST = 360
"""Images kept for the test: a fifth of them, drawn with a fixed seed."""


def load_digits():
    """Images [n, 8, 8, 1] in 0..1 and labels [n], split into training and test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    return (images[TEST:], labels[TEST:]), (images[:TEST], labels[:TEST])


def init_params(seed):
    """Weights of variance 2/n for n inputs (He), biases zero."""
    random = np.random.default_rng(seed)

    def layer(*shape):
        scale = np.sqrt(2 / np.prod(shape[:-1]))
        weights = random.normal(0, scale, shape).astype(np.float32)
        return {"w": weights, "b": np.zeros(shape[-1], np.float32)}

    return {
        "conv1": layer(3, 3, 1, 16),
        "conv2": layer(3, 3, 16, 32),
        "dense": layer(4 * 4 * 32, 64),
        "head": layer(64, CLASSES),
    }


def apply(params, images):
    """Logits [n, 10] of images [n, 8, 8, 1]."""

    def conv(layer, x):
        dims = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, layer["w"], (1, 1), "SAME", dimension_numbers=dims
        )
        return jax.nn.gelu(y + layer["b"])

    x = conv(params["conv2"], conv(params["conv1"], images))
    n, h, w, c = x.shape
    x = x.reshape(n, h // 2, 2, w // 2, 2, c).mean((2, 4)).reshape(n, -1)
    x = jax.nn.gelu(x @ params["dense"]["w"] + params["dense"]["b"])
    return x @ params["head"]["w"] + params["head"]["b"]


def loss_fn(params, batch):
    """Mean cross entropy of a batch."""
    logits = apply(params, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean()


predict = jax.jit(lambda params, images: apply(params, images).argmax(-1))


class Training:
    """The variables, the step and the closures that are under way."""

    def __init__(self, strategy, train, options):
        images, labels = train
        batch, seed = options.batch, options.seed

        with strategy.scope():
            self.params = zs.create_variables(init_params(seed))
            backup = options.rounds
            rounds = None if backup is None else zs.Rounds(backup=backup)
            self.optimizer = zs.Optimizer(optax.adam(options.rate), rounds=rounds)
        params, optimizer = self.params, self.optimizer

        @zs.function
        def train_step(iterator):
            def replica_fn(batch):
                loss, grads = zs.value_and_grad(loss_fn)(params, batch)
                optimizer.apply_gradients(grads, params)
                return loss

            losses = strategy.run(replica_fn, args=(next(iterator),))
            return strategy.reduce("mean", losses, axis=None)

        def dataset_fn(context):
            data = zs.data.Dataset.from_tensor_slices(
                {"image": images, "label": labels}
            )
            data = data.shuffle(len(labels), seed=seed + context.input_pipeline_id)
            return data.repeat().batch(batch, drop_remainder=True)

        self.step = train_step
        self.coordinator = zs.ClusterCoordinator(strategy)
        self.iterator = iter(self.coordinator.create_per_worker_dataset(dataset_fn))

    def losses(self, steps, ahead):
        """Loss of step after step, while ``ahead`` others are under way."""
        waiting = deque()
        for _ in range(steps):
            waiting.append(self.coordinator.schedule(self.step, args=(self.iterator,)))
            if len(waiting) > ahead:
                yield float(waiting.popleft().fetch())
        while waiting:
            yield float(waiting.popleft().fetch())
        self.coordinator.join()

    def predictions(self, images):
        """Class of each image by the weights as they are on the ps now."""
        weights = jax.tree.map(lambda variable: variable.numpy(), self.params)
        return np.asarray(predict(weights, images))


def train_all(training, test, options):
    """Trains with a progress bar; returns the losses, the predictions, the seconds."""
    images, labels = test
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(
            "loss {task.fields[loss]:.4f}  accuracy {task.fields[accuracy]:6.2%}"
        ),
        TextColumn("{task.fields[rate]:.0f} steps/s"),
    )
    history, rate = [], 0.0
    began = compiled = time.perf_counter()
    with Progress(*columns, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(
            "compiling", total=options.steps, loss=np.nan, accuracy=0.0, rate=rate
        )
        for loss in training.losses(options.steps, options.ahead):
            now = time.perf_counter()
            if history:
                rate = len(history) / (now - compiled)
            else:
                compiled = now
            history.append(loss)
            bar.update(task, description="training", advance=1, loss=loss, rate=rate)
            if len(history) % options.every == 0:
                accuracy = np.mean(training.predictions(images) == labels)
                bar.update(task, accuracy=accuracy)
                if not sys.stdout.isatty():
                    print(
                        f"step {len(history)}/{options.steps}  loss {loss:.4f}  "
                        f"accuracy {accuracy:.2%}  {rate:.0f} steps/s",
                        flush=True,
                    )
    seconds = time.perf_counter() - began
    return history, training.predictions(images), seconds


def draw(path, history, predicted, labels):
    """Loss curve and confusion matrix, side by side, as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    window = max(1, len(history) // 50)
    smooth = np.convolve(history, np.ones(window) / window, "valid")
    left.semilogy(history, color="0.8", linewidth=0.7, label="each step")
    left.semilogy(
        np.arange(len(smooth)) + window - 1, smooth, label=f"mean of {window}"
    )
    left.set(xlabel="step", ylabel="cross entropy", title="Training loss")
    left.legend()
    matrix = np.zeros((CLASSES, CLASSES), int)
    np.add.at(matrix, (labels, predicted), 1)
    right.imshow(matrix, cmap="Blues")
    for (row, column), count in np.ndenumerate(matrix):
        if count:
            shade = "white" if count > matrix.max() / 2 else "black"
            right.text(column, row, count, ha="center", va="center", color=shade)
    ticks = range(CLASSES)
    right.set(xlabel="predicted", ylabel="true", xticks=ticks, yticks=ticks)
    right.set_title(f"Test images, {np.mean(predicted == labels):.2%} right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


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
    add("--steps", type=int, default=1500)
    add("--batch", type=int, default=64)
    add("--rate", type=float, default=1e-3, help="learning rate of Adam")
    add("--rounds", type=int, metavar="BACKUP", help="synchronous, without the last")
    add("--staleness", type=int, help="steps that a worker may be ahead")
    add("--ahead", type=int, default=32, help="steps under way at a time")
    add("--every", type=int, default=100, help="steps between two tests")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("out/digits.png"), help="the picture")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps: expected 1 or more")
    return options


def main():
    options = arguments()
    options.out.parent.mkdir(parents=True, exist_ok=True)  # before anything is trained
    if options.keys:
        os.environ["ZSTRAT_KEYS"] = options.keys
    train, test = load_digits()
    with contextlib.ExitStack() as stack:
        resolver = find_cluster(options, stack)
        strategy = zs.ParameterServerStrategy(resolver, staleness=options.staleness)
        training = Training(strategy, train, options)
        # Daemons that this program started end with it; others serve the next one.
        ours = not (options.cluster or os.environ.get("TF_CONFIG"))
        stack.callback(training.coordinator.shutdown, cluster=ours)
        history, predicted, seconds = train_all(training, test, options)
    accuracy = float(np.mean(predicted == test[1]))
    draw(options.out, history, predicted, test[1])
    print(f"{len(history)} steps in {seconds:.1f} s; picture: {options.out}")
    print(f"test accuracy {accuracy:.2%} (goal {GOAL:.0%})")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
