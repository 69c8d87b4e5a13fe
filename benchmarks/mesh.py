"""Cases of one process with several devices: a mirrored step, reductions, datasets.

The devices are eight parts of the CPU. What a mirrored step costs beside the program
that it runs is the difference to the same step written by hand, in turns with it: both
wait for the same cores.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.case import Case, Reading, rate

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICES, BATCH, STEPS = 8, 64, 300


def overhead() -> Reading:
    """Microseconds of a step beyond the same by hand, and those of the latter."""
    return _beyond(_our_step(), _step_by_hand())


def overhead_of_results() -> Reading:
    """The same of a step whose losses are asked for one by one, there as here."""
    return _beyond(_our_step(is_reduced=False), _step_by_hand(is_reduced=False))


def _beyond(ours: Callable[[], None], by_hand: Callable[[], None]) -> Reading:
    times: list[list[float]] = [[], []]
    for _ in range(20):
        ours()
        by_hand()
    for _ in range(STEPS):
        for once, found in zip((ours, by_hand), times, strict=True):
            began = time.perf_counter()
            once()
            found.append(1e6 * (time.perf_counter() - began))
    mirrored, alone = (statistics.median(found) for found in times)
    return Reading(mirrored - alone, alone)


def reduction() -> Reading:
    """GB/s of what is read to sum a value of every replica."""
    value, strategy = _per_replica(), _strategy()
    wait = partial(strategy.reduce, "sum", value, axis=None)
    nbytes = DEVICES * _COLUMNS * 4
    parts = [np.ones(_COLUMNS, np.float32) for _ in range(DEVICES)]
    total = np.empty_like(parts[0])

    def by_hand() -> None:
        np.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            np.add(total, part, out=total)

    return Reading(_rate(nbytes, wait), rate(nbytes / 1e9, by_hand, 30))


def gathering() -> Reading:
    """GB/s of what a gather along the second axis gives, whose rows come from all
    replicas in turn."""
    shape = (1024, _COLUMNS // 1024)
    value, strategy = _per_replica(shape), _strategy()
    wait = partial(strategy.gather, value, axis=1)
    nbytes = DEVICES * _COLUMNS * 4
    parts = [np.ones(shape, np.float32) for _ in range(DEVICES)]
    by_hand = partial(np.concatenate, parts, axis=1, out=np.hstack(parts))
    return Reading(_rate(nbytes, wait), rate(nbytes / 1e9, by_hand, 30))


def standing() -> Reading:
    """Microseconds of a gather along the first axis, where the values stand one after
    the other already, and those of a copy of its result."""
    value, strategy = _per_replica(), _strategy()
    wait = partial(strategy.gather, value, axis=0)
    source = np.ones(DEVICES * _COLUMNS, np.float32)
    target = np.empty_like(source)
    copy = rate(1, partial(np.copyto, target, source), 30)
    return Reading(1e6 / _rate(1e9, wait), 1e6 / copy)


def dataset() -> Reading:
    """Batches a second that a step could begin with; the limit puts them on the devices
    by hand."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    ours = _distributed()
    by_rows = NamedSharding(_mesh(), PartitionSpec("replica"))
    put = iter(_batches())
    by_hand = rate(1, lambda: _ready(jax.device_put(next(put), by_rows)), 200)
    return Reading(ours, by_hand)


def bare_dataset() -> Reading:
    """The same beside the dataset alone, whose batches stay where they are."""
    alone = iter(_batches())
    return Reading(_distributed(), rate(1, lambda: next(alone), 200))


def _distributed() -> float:
    ours = iter(_strategy().experimental_distribute_dataset(_batches()))
    # The whole, as a step takes it: the value of each replica is made when it is asked
    # for, and costs more than all the rest.
    return rate(1, lambda: _ready(next(ours).whole), 200)


def _batches() -> Any:
    import zstrat as zs

    # Not zeros: the rows would all be one page of memory.
    rows = np.ones((BATCH * 64, 64, 64), np.float32)
    data = zs.data.Dataset.from_tensor_slices(rows)
    return data.shuffle(1000, seed=0).repeat().batch(BATCH, drop_remainder=True)


_COLUMNS = 1 << 20
"""Float32 numbers of each replica."""


def _strategy() -> Any:
    import jax

    import zstrat as zs

    jax.config.update("jax_num_cpu_devices", DEVICES)
    return zs.MirroredStrategy()


def _mesh() -> Any:
    import jax
    from jax.sharding import Mesh

    return Mesh(np.array(jax.devices()), ("replica",))


def _per_replica(shape: tuple[int, ...] = (_COLUMNS,)) -> Any:
    import jax.numpy as jnp

    import zstrat as zs

    strategy = _strategy()

    def one() -> Any:
        context = zs.get_replica_context()
        return jnp.ones(shape, jnp.float32) * context.replica_id_in_sync_group

    return strategy.run(zs.function(one))


def _rate(nbytes: int, once: Callable[[], Any]) -> float:
    return rate(nbytes / 1e9, lambda: _ready(once()), 30)


def _ready(value: Any) -> None:
    import jax

    jax.block_until_ready(value)


def _digits() -> Any:
    """The example, whose model and loss are measured here."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    import digits  # type: ignore[import-not-found]

    return digits


def _batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((BATCH, 8, 8, 1), np.float32)
    return {"image": images, "label": rng.integers(0, 10, BATCH).astype(np.int32)}


def _our_step(*, is_reduced: bool = True) -> Callable[[], None]:
    import itertools

    import optax

    import zstrat as zs

    digits, strategy = _digits(), _strategy()
    with strategy.scope():
        params = zs.create_variables(digits.init_params(0))
        optimizer = zs.Optimizer(optax.adam(1e-3))
    whole = next(
        iter(strategy.experimental_distribute_dataset(itertools.repeat(_batch(), 1)))
    )

    @zs.function
    def step(batch: Any) -> Any:
        def replica_fn(batch: Any) -> Any:
            loss, grads = zs.value_and_grad(digits.loss_fn)(params, batch)
            optimizer.apply_gradients(grads, params)
            return loss

        losses = strategy.run(replica_fn, (batch,))
        return strategy.reduce("mean", losses, axis=None) if is_reduced else losses

    if is_reduced:
        return lambda: _ready(step(whole))
    return lambda: _ready(strategy.experimental_local_results(step(whole)))


def _step_by_hand(*, is_reduced: bool = True) -> Callable[[], None]:
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    digits = _digits()
    mesh = _mesh()
    whole, rows = PartitionSpec(), PartitionSpec("replica")
    adam = optax.adam(1e-3)

    def replica(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(digits.loss_fn)(params, batch)
        told = jax.lax.pmean(loss, "replica") if is_reduced else loss[None]
        return told, jax.lax.psum(grads, "replica")

    mapped = jax.shard_map(
        replica,
        mesh=mesh,
        in_specs=(whole, rows),
        out_specs=(whole if is_reduced else rows, whole),
        check_vma=False,
    )

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = mapped(params, batch)
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params = jax.device_put(digits.init_params(0), NamedSharding(mesh, whole))
    held = [params, jax.device_put(adam.init(params), NamedSharding(mesh, whole))]
    batch = jax.device_put(_batch(), NamedSharding(mesh, rows))

    def once() -> None:
        held[0], held[1], loss = compiled(held[0], held[1], batch)
        # Of each replica the part that its device has, of one number.
        _ready(loss if is_reduced else [x.data for x in loss.addressable_shards])

    return once


CASES = [
    Case(
        "mirrored digits step on 8 devices, beyond jit by hand",
        "us",
        50,
        "the same step, shard_map and jit by hand",
        overhead,
        lower=True,
    ),
    Case(
        "the same, and the loss of each replica as an array",
        "us",
        60,
        "the same step by hand, and the part of its losses that each device has",
        overhead_of_results,
        lower=True,
    ),
    Case(
        "reduce of 4 MB of each of 8 devices",
        "GB/s",
        0.5,
        "numpy, adding arrays that are there",
        reduction,
        of_limit=True,
    ),
    Case(
        "gather of 4 MB of each of 8 devices, second axis",
        "GB/s",
        0.5,
        "numpy, concatenating arrays that are there",
        gathering,
        of_limit=True,
    ),
    Case(
        "gather of 4 MB of each of 8 devices, first axis",
        "us",
        0.1,
        "one memcpy of its result: here nothing is copied",
        standing,
        lower=True,
        of_limit=True,
    ),
    Case(
        "distributed dataset over 8 devices, beside by hand",
        "batches/s",
        0.9,
        "the dataset alone, each batch put on the devices by hand",
        dataset,
        of_limit=True,
    ),
    Case(
        "distributed dataset over 8 devices, beside the bare",
        "batches/s",
        0.9,
        "the bare iterator: the dataset alone, its batches left to numpy",
        bare_dataset,
        of_limit=True,
    ),
]
