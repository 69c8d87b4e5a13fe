"""What old gradients cost: ``python -m benchmarks.staleness docs/staleness.png``, and
``python -m benchmarks.staleness --cluster``.

The picture is drawn without a cluster, so that nothing but the age differs: Adam in
plain jax takes gradients at the parameters of exactly so many updates before. It shows
the steps that a model needs until its loss stays below a goal; a curve ends where the
goal is out of reach. The table is of real clusters on this machine: steps and seconds
to the same goals, by workers and ``prefetch``.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXAMPLES: Final = Path(__file__).parent.parent / "examples"
AGES: Final = [0, 1, 3, 7, 15]
"""In updates. W workers without prefetch make W - 1, and with prefetch=1 2W - 1."""
SPAN: Final = 20
"""Steps whose mean loss has to be below the goal."""


class Model(NamedTuple):
    name: str
    start: Any
    loss: Callable[[Any, Any], Any]
    batches: Callable[[int], Iterator[Any]]
    """Of a worker."""
    rates: list[float]
    """The first is the one that suits a single process."""
    goal: float
    steps: int
    """At most."""


def digits() -> Model:
    """An MLP on the handwritten digits of scikit-learn, in nats."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    sizes = list(itertools.pairwise([64, 256, 256, 10]))
    random = np.random.default_rng(0)
    start = [
        (random.normal(0, (2 / n) ** 0.5, (n, m)).astype(np.float32), np.zeros(m, "f"))
        for n, m in sizes
    ]

    def loss(params: Any, batch: Any) -> Any:
        x, labels = batch
        for weights, bias in params[:-1]:
            x = jax.nn.relu(x @ weights + bias)
        x = x @ params[-1][0] + params[-1][1]
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    def batches(worker: int) -> Iterator[Any]:
        random = np.random.default_rng([1, worker])
        while True:
            at = random.integers(0, len(images), 64)
            yield images[at], labels[at].astype(np.int32)

    name = "MLP on digits: 0.1 nats"
    return Model(name, start, loss, batches, [3e-3, 1e-3, 3e-4], 0.1, 1000)


def characters() -> Model:
    """The transformer of the example with two blocks, in bits per character."""
    sys.path.insert(0, str(EXAMPLES))
    import char_transformer as example
    from plain_texts import load_texts

    text, _ = load_texts()

    def batches(worker: int) -> Iterator[Any]:
        random = np.random.default_rng([1, worker])
        window = np.arange(example.CONTEXT + 1)
        while True:
            starts = random.integers(0, len(text) - example.CONTEXT, (16, 1))
            yield text[starts + window].astype(np.int32)

    start = example.init_params(0, 2)
    name = "transformer on text: 4.3 bits per character"
    return Model(name, start, example.bits, batches, [3e-3, 1e-3, 3e-4], 4.3, 500)


def steps_to_goal(losses: Iterator[float], model: Model) -> int | None:
    """How many steps it took; None if the goal was not reached."""
    last: deque[float] = deque(maxlen=SPAN)
    for step in range(1, model.steps + 1):
        last.append(next(losses))
        if len(last) == SPAN and sum(last) < SPAN * model.goal:
            return step
    return None


def delayed(model: Model, rate: float, age: int) -> Iterator[float]:
    """Losses of Adam whose gradients are so many updates old."""
    transformation = optax.adam(rate)
    params = jax.tree.map(jnp.asarray, model.start)
    state = transformation.init(params)
    old = deque([params], maxlen=age + 1)

    @jax.jit
    def step(params: Any, read: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(model.loss)(read, batch)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for batch in model.batches(0):
        params, state, loss = step(params, old[0], state, batch)
        old.append(params)
        yield float(loss)


def on_cluster(model: Model, workers: int, prefetch: int) -> str:
    """A row of the table."""
    import zstrat as zs

    with zs.LocalCluster(1, workers) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver, prefetch=prefetch)
        with strategy.scope():
            params = zs.create_variables(model.start)
            optimizer = zs.Optimizer(optax.adam(model.rates[0]), params=params)

        @zs.function
        def step(iterator: Any) -> Any:
            loss, grads = zs.value_and_grad(model.loss)(params, next(iterator))
            optimizer.apply_gradients(grads, params)
            return loss

        coordinator = zs.ClusterCoordinator(strategy)
        data = coordinator.create_per_worker_dataset(
            lambda context: model.batches(context.input_pipeline_id)
        )
        iterator = iter(data)
        # All workers have compiled before the clock starts.
        warm = [coordinator.schedule(step, args=(iterator,)) for _ in range(SPAN)]
        first = [float(value.fetch()) for value in warm]
        began = time.perf_counter()
        values = [
            coordinator.schedule(step, args=(iterator,))
            for _ in range(model.steps - SPAN)
        ]
        losses = itertools.chain(first, (float(value.fetch()) for value in values))
        found = steps_to_goal(losses, model)
        seconds = time.perf_counter() - began
        age = coordinator.metrics()["staleness"]["p50"]
        coordinator.cancel()
    row = f"{model.name} | {workers} | {prefetch} | {age:g} | "
    if found is None:
        return row + f"not in {model.steps} | |"
    rate = (found - SPAN) / seconds
    return row + f"{found} | {rate:.1f} | {found / rate:.1f}"


def main() -> None:
    models = [digits(), characters()]
    if sys.argv[1] == "--cluster":
        print("model | workers | prefetch | age | steps | steps/s | seconds")
        for model, workers, prefetch in itertools.product(models, (2, 4, 8), (0, 1, 4)):
            print(on_cluster(model, workers, prefetch), flush=True)
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(models), figsize=(11, 4.2))
    for panel, model in zip(panels, models, strict=True):
        for rate, style in zip(model.rates, ("o-", "s-", "^-"), strict=True):
            found = [steps_to_goal(delayed(model, rate, age), model) for age in AGES]
            print(model.name, rate, dict(zip(AGES, found, strict=True)), flush=True)
            reached = [(a, n) for a, n in zip(AGES, found, strict=True) if n]
            panel.plot(*zip(*reached, strict=True), style, label=f"{rate:g}")
        panel.set(title=model.name, xlabel="age of the gradients (updates)")
        panel.set(xticks=AGES, ylim=(0, model.steps))
        panel.grid(axis="y", linewidth=0.3)
        panel.legend(title="learning rate of Adam", fontsize=8)
    panels[0].set_ylabel("steps to the goal")
    figure.tight_layout()
    figure.savefig(Path(sys.argv[1]), dpi=110)


if __name__ == "__main__":
    main()
