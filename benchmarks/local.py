"""One process and no network: the limits of tables and checkpoints.

numpy does what the parameter servers do to their rows, as one would write it; JAX does
what the workers compute, with the rows handed to it.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.case import rate

if TYPE_CHECKING:
    from pathlib import Path

FEATURES, ROWS, WIDTH, BATCH, HIDDEN = 26, 100_000, 16, 1024, 256
"""The wide model: tables, their rows and columns; examples of a step; hidden units."""


def table_steps(rows: int, width: int, ids: int, optimizer: str) -> float:
    """Steps per second: look rows up, move them by themselves."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((rows, width), np.float32)
    squares = np.full_like(table, 0.1) if optimizer == "adagrad" else None
    drawn = iter(rng.integers(0, rows, (1000, ids)))

    def once() -> None:
        at = next(drawn)
        gradient = table[at]
        if squares is None:
            np.subtract.at(table, at, 0.01 * gradient)
        else:
            adagrad(table, squares, at, gradient)

    return rate(1, once, 300)


def lookups(rows: int, width: int, ids: int) -> float:
    """Lookups per second."""
    rng = np.random.default_rng(0)
    table = np.ones((rows, width), np.float32)
    drawn = iter(rng.integers(0, rows, (2000, ids)))
    return rate(1, lambda: table[next(drawn)].sum(), 1000)


def adagrad(
    table: np.ndarray, squares: np.ndarray, at: np.ndarray, gradient: np.ndarray
) -> None:
    """Adagrad on some rows, duplicates summed first."""
    distinct, inverse = np.unique(at, return_inverse=True)
    summed = np.zeros((len(distinct), *table.shape[1:]), table.dtype)
    np.add.at(summed, inverse, gradient)
    moved = squares[distinct] + summed * summed
    squares[distinct] = moved
    table[distinct] -= 0.01 * summed / np.sqrt(moved + 1e-7)


def wide_parameters() -> dict[str, np.ndarray]:
    """Weights of the wide model's MLP."""
    rng = np.random.default_rng(0)
    wide = FEATURES * WIDTH
    first = rng.standard_normal((wide, HIDDEN)) / wide**0.5
    second = rng.standard_normal((HIDDEN, 1)) / HIDDEN**0.5
    return {
        "w1": first.astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": second.astype(np.float32),
        "b2": np.zeros(1, np.float32),
    }


def wide_loss(parameters: Any, rows: list[Any], labels: Any) -> Any:
    """Logistic loss. ``rows``: [batch, width] of each feature; ``labels`` [batch]."""
    import jax
    import jax.numpy as jnp

    x = jnp.concatenate(rows, 1)
    x = jax.nn.relu(x @ parameters["w1"] + parameters["b1"])
    logits = (x @ parameters["w2"] + parameters["b2"])[:, 0]
    return jnp.mean(jax.nn.softplus(logits) - labels * logits)


def wide_batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Ids [features, batch] and labels [batch], all at random."""
    ids = rng.integers(0, ROWS, (FEATURES, BATCH)).astype(np.int32)
    return {"ids": ids, "labels": rng.integers(0, 2, BATCH).astype(np.float32)}


def wide_gradients() -> float:
    """Gradients per second, on all cores, with the rows given."""
    import jax

    gradient = jax.jit(jax.value_and_grad(wide_loss, (0, 1)))
    rows = [jax.device_put(np.ones((BATCH, WIDTH), np.float32))] * FEATURES
    parameters = jax.device_put(wide_parameters())
    labels = wide_batch(np.random.default_rng(1))["labels"]
    return rate(
        1, lambda: jax.block_until_ready(gradient(parameters, rows, labels)), 300
    )


def wide_steps() -> float:
    """Whole steps per second: the tables and Adagrad in numpy, the gradient in JAX."""
    import jax

    gradient = jax.jit(jax.value_and_grad(wide_loss, (0, 1)))
    tables = [np.full((ROWS, WIDTH), 0.01, np.float32) for _ in range(FEATURES)]
    squares = [np.full((ROWS, WIDTH), 0.1, np.float32) for _ in range(FEATURES)]
    parameters = wide_parameters()
    sums = {name: np.full_like(value, 0.1) for name, value in parameters.items()}
    rng = np.random.default_rng(1)

    def once() -> None:
        batch = wide_batch(rng)
        rows = [table[at] for table, at in zip(tables, batch["ids"], strict=True)]
        _, (dense, sparse) = gradient(parameters, rows, batch["labels"])
        for table, square, at, each in zip(
            tables, squares, batch["ids"], sparse, strict=True
        ):
            adagrad(table, square, at, np.asarray(each))
        for name, each in dense.items():
            slope = np.asarray(each)
            sums[name] += slope * slope
            parameters[name] -= 0.01 * slope / np.sqrt(sums[name] + 1e-7)

    return rate(1, once, 60)


def write(folder: Path, size: int, repeats: int = 3) -> float:
    """Bytes per second of writing a file in 4 MiB blocks with fsync, as ``dd
    conv=fsync`` does. Each is removed when the next one is whole, as checkpoints are:
    a file that goes before the next one comes leaves it the warmest pages there are.
    """
    block = np.random.default_rng(0).bytes(4 * 2**20)
    times = []
    for number in range(2 + repeats):
        began = time.perf_counter()
        with open(folder / f"limit{number}", "xb", buffering=0) as file:
            file.writelines(block[: size - at] for at in range(0, size, len(block)))
            os.fsync(file.fileno())
        (folder / f"limit{number - 1}").unlink(missing_ok=True)
        times.append(time.perf_counter() - began)
    (folder / f"limit{number}").unlink()
    return size / statistics.median(times[2:])


def read(folder: Path, repeats: int = 3) -> float:
    """Bytes per second of reading all files below a folder in 4 MiB blocks, into memory
    that is there, none of them in the page cache."""
    block = bytearray(4 * 2**20)
    files = [path for path in folder.rglob("*") if path.is_file()]
    times = []
    for _ in range(repeats):
        forget(folder)
        began = time.perf_counter()
        for path in files:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(block):
                    pass
        times.append(time.perf_counter() - began)
    return sum(path.stat().st_size for path in files) / statistics.median(times)


def forget(folder: Path) -> None:
    """Drops all files below a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
