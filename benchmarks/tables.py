"""Cases of embedding tables: lookups, optimizers of rows, the wide model, growth."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import local
from benchmarks.case import Case, Reading, cluster, per_second

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS, WIDTH, IDS = 1_000_000, 64, 4096


def _ids(rows: int) -> Any:
    """A dataset function: ``IDS`` numbers of rows at random, for ever."""

    def dataset(context: Any) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(context.input_pipeline_id)
        while True:
            yield rng.integers(0, rows, IDS, np.int32)

    return dataset


def _half_squares(table: Any, ids: Any) -> Any:
    """Its gradient is the rows themselves: nothing to compute but the lookup."""
    import zstrat as zs

    rows = zs.embedding_lookup(table, ids)
    return 0.5 * (rows * rows).sum()


@contextlib.contextmanager
def _table(rows: int, workers: int) -> Iterator[tuple[Any, Any, Any]]:
    """A table on two parameter servers, made there."""
    import zstrat as zs

    halves = zs.partitioners.FixedShardsPartitioner(2)
    with cluster(2, workers, partitioner=halves) as (strategy, coordinator):
        with strategy.scope():
            start = zs.initializers.normal(0.01, seed=0)
            table = zs.Variable(
                start, shape=(rows, WIDTH), dtype="float32", name="table"
            )
        yield strategy, coordinator, table


def row_training(optimizer_name: str, workers: int) -> Reading:
    import optax

    import zstrat as zs

    made = {"sgd": optax.sgd, "adagrad": optax.adagrad}[optimizer_name](0.01)
    with _table(ROWS, workers) as (strategy, coordinator, table):
        with strategy.scope():
            optimizer = zs.Optimizer(made)

        @zs.function
        def step(iterator: Any) -> None:
            _, gradient = zs.value_and_grad(_half_squares)(table, next(iterator))
            optimizer.apply_gradients(gradient, table)

        iterator = iter(coordinator.create_per_worker_dataset(_ids(ROWS)))
        value = per_second(coordinator, step, 2000, (iterator,))
    return Reading(value, local.table_steps(ROWS, WIDTH, IDS, optimizer_name))


def wide_model() -> Reading:
    import optax

    import zstrat as zs

    with cluster(2, 2) as (strategy, coordinator):
        with strategy.scope():
            parameters = zs.create_variables(local.wide_parameters())
            tables = [_wide_table(i) for i in range(local.FEATURES)]
            optimizer = zs.Optimizer(optax.adagrad(0.01))

        def loss_fn(parameters: Any, tables: Any, batch: Any) -> Any:
            ids = batch["ids"]
            rows = [zs.embedding_lookup(t, ids[i]) for i, t in enumerate(tables)]
            return local.wide_loss(parameters, rows, batch["labels"])

        @zs.function
        def step(iterator: Any) -> Any:
            loss, gradients = zs.value_and_grad(loss_fn, (0, 1))(
                parameters, tables, next(iterator)
            )
            optimizer.apply_gradients(gradients, (parameters, tables))
            return loss

        def dataset(context: Any) -> Iterator[Any]:
            rng = np.random.default_rng(context.input_pipeline_id)
            while True:
                yield local.wide_batch(rng)

        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        value = per_second(coordinator, step, 600, (iterator,))
    others = {_ONE_PROCESS: local.wide_steps()}
    return Reading(value, local.wide_gradients(), others)


def _wide_table(feature: int) -> Any:
    """The table of one feature, whole on one of the parameter servers."""
    import zstrat as zs

    start = zs.initializers.normal(0.01, seed=feature)
    shape = (local.ROWS, local.WIDTH)
    return zs.Variable(start, shape=shape, dtype="float32", name=f"table{feature}")


def growth() -> Reading:
    """The dearest lookup over that in the smallest of the tables."""
    sizes = (100_000, 1_000_000, 10_000_000)
    ours = [1 / _lookups_per_second(rows) for rows in sizes]
    alone = [1 / local.lookups(rows, WIDTH, IDS) for rows in sizes]
    return Reading(max(ours) / ours[0], max(alone) / alone[0])


def _lookups_per_second(rows: int) -> float:
    import zstrat as zs

    with _table(rows, 1) as (_, coordinator, table):

        @zs.function
        def step(iterator: Any) -> Any:
            return zs.embedding_lookup(table, next(iterator)).sum()

        iterator = iter(coordinator.create_per_worker_dataset(_ids(rows)))
        return per_second(coordinator, step, 2000, (iterator,))


_NUMPY_SGD = "one process, numpy: take, then subtract.at"
_ONE_PROCESS = "one process, tables and Adagrad in numpy"
_NUMPY_ADAGRAD = "one process, numpy: take, unique, add.at, Adagrad on these rows"

CASES = [
    Case(
        "1M x 64 table, 4096 ids, SGD, 2 ps, 1 worker",
        "steps/s",
        500,
        _NUMPY_SGD,
        partial(row_training, "sgd", 1),
    ),
    Case(
        "1M x 64 table, 4096 ids, SGD, 2 ps, 2 workers",
        "steps/s",
        600,
        _NUMPY_SGD,
        partial(row_training, "sgd", 2),
    ),
    Case(
        "1M x 64 table, 4096 ids, Adagrad, 2 ps, 1 worker",
        "steps/s",
        400,
        _NUMPY_ADAGRAD,
        partial(row_training, "adagrad", 1),
    ),
    Case(
        "1M x 64 table, 4096 ids, Adagrad, 2 ps, 2 workers",
        "steps/s",
        400,
        _NUMPY_ADAGRAD,
        partial(row_training, "adagrad", 2),
    ),
    Case(
        "wide model, 26 tables 100k x 16, Adagrad, 2 workers",
        "steps/s",
        180,
        "its gradients alone, one process, all cores, rows given",
        wide_model,
        others={_ONE_PROCESS: 0},
    ),
    Case(
        "growth of a lookup step, 1e5 to 1e7 rows",
        "x",
        1.2,
        "the same ratio of numpy's take in one process",
        growth,
        lower=True,
    ),
]
