"""What consistency costs and gains where one of four workers is slow:
``python -m benchmarks.consistency_picture docs/consistency.png``.

The transformer of the example, with two blocks, is trained on a cluster of this machine
by each rule for the same time. Every worker rests for a moment in each step, as if it
computed on a device of its own, and the last worker rests several times as long. The
picture shows the loss by steps, so what the gradients were worth, and by seconds.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import optax

import zstrat as zs

from .staleness import characters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .staleness import Model

WORKERS: Final = 4
REST: Final = 0.15
"""Seconds that a worker rests in each step,"""
SLOWER: Final = 4
"""and the last one so many times as long."""
RATE: Final = 3e-3
"""The learning rate of Adam that suits a single process."""
SECONDS: Final = 35.0
"""Of each rule, when all workers have compiled."""
WARM: Final = 5 * WORKERS
"""Steps before the clock starts."""
SPAN: Final = 40
"""Steps whose mean loss a point of the picture is."""
MOST: Final = 4000
"""Steps, more than there is time for."""


@dataclass
class Rule:
    """One line of the picture."""

    label: str
    staleness: int | None = None
    rounds: zs.Rounds | None = None
    points: list[tuple[float, float]] = field(default_factory=list)
    """Seconds and loss of each step."""


def rules() -> list[Rule]:
    return [
        Rule("asynchronous"),
        Rule("staleness=2", staleness=2),
        Rule("Rounds(): synchronous", rounds=zs.Rounds()),
        Rule("Rounds(backup=1)", rounds=zs.Rounds(backup=1)),
    ]


def train(rule: Rule, model: Model) -> dict[str, Any]:
    """Adds the points of the rule; returns the metrics at the end."""
    with zs.LocalCluster(1, WORKERS) as cluster:
        strategy = zs.ParameterServerStrategy(
            cluster.resolver, staleness=rule.staleness
        )
        with strategy.scope():
            params = zs.create_variables(model.start)
            optimizer = zs.Optimizer(optax.adam(RATE), "adam", rounds=rule.rounds)

        @zs.function
        def step(iterator: Any) -> Any:
            loss, grads = zs.value_and_grad(model.loss)(params, next(iterator))
            optimizer.apply_gradients(grads, params)
            return loss

        coordinator = zs.ClusterCoordinator(strategy)

        def batches(context: zs.InputContext) -> Iterator[Any]:
            worker = context.input_pipeline_id
            for batch in model.batches(worker):
                time.sleep(REST * (SLOWER if worker == WORKERS - 1 else 1))
                yield batch

        iterator = iter(coordinator.create_per_worker_dataset(batches))
        values = [coordinator.schedule(step, args=(iterator,)) for _ in range(MOST)]
        for value in values[:WARM]:
            value.fetch()
        began = time.perf_counter()
        for value in values[WARM:]:
            loss = float(value.fetch())
            seconds = time.perf_counter() - began
            if seconds > SECONDS:
                break
            rule.points.append((seconds, loss))
        metrics = coordinator.metrics()
        coordinator.cancel()
    return metrics


def smooth(rule: Rule) -> Iterator[np.ndarray]:
    """Yields the means of the step number, the seconds and the loss over `SPAN` steps.
    Values are fetched in order, so one that comes late holds up the clock of others:
    seconds have to be means, too."""
    for column in (np.arange(len(rule.points)), *np.array(rule.points).T):
        yield np.convolve(column, np.full(SPAN, 1 / SPAN), "valid")


def main() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    model = characters()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for rule, style in zip(rules(), ("-", "--", "-.", ":"), strict=True):
        metrics = train(rule, model)
        steps, seconds, losses = smooth(rule)
        rounds = metrics["rounds"].get("adam", {})
        print(
            f"{rule.label}: {len(rule.points) / SECONDS:.1f} steps/s, "
            f"{losses[-1]:.2f} bits after {seconds[-1]:.0f} s; "
            f"lead {metrics['largest_lead']}, rounds {rounds}",
            flush=True,
        )
        for panel, along in zip(panels, (steps, seconds), strict=True):
            panel.plot(along, losses, style, label=rule.label)
    panels[0].set(xlabel="steps of all workers", ylabel="bits per character")
    panels[1].set(xlabel="seconds")
    for panel in panels:
        panel.grid(linewidth=0.3)
    panels[1].legend(fontsize=8)
    figure.suptitle(
        f"{WORKERS} workers, of which one takes {SLOWER} times as long", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(Path(sys.argv[1]), dpi=110)


if __name__ == "__main__":
    main()
