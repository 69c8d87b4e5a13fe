"""Programs as users write them, of several transformations, each with what a parameter
server must do with it."""

from __future__ import annotations

import jax
import optax
from optax import contrib
from optax_model import kernels, parts, schedule, tables
from optax_recipes import Case, late, muon_numbers

_clip = optax.clip_by_global_norm


def _of_parts(slow: optax.GradientTransformation) -> optax.GradientTransformation:
    transforms = {
        "frozen": optax.set_to_zero(),
        "slow": slow,
        "rest": optax.sgd(0.1),
    }
    return optax.multi_transform(transforms, parts())


def _case(name: str, make: object, on_servers: str = "runs", **more: object) -> Case:
    return Case(name, make, on_servers=on_servers, **more)


PROGRAMS = [
    # Coupled through gradients alone: a number that the step computes.
    _case("chain(clip, sgd)", lambda: optax.chain(_clip(0.5), optax.sgd(0.1))),
    _case("chain(clip, adam)", lambda: optax.chain(_clip(0.1), optax.adam(0.1))),
    _case("chain(clip, adamw(mask by path))", lambda: optax.chain(
        _clip(0.1), optax.adamw(schedule(), weight_decay=0.1, mask=kernels))),
    _case("chain(clip, sgd(join_schedules([0, .5], [8])))", lambda: optax.chain(
        _clip(0.5), optax.sgd(schedule(0.0, 0.5)))),
    _case("conditionally_transform(clip, step > 8)", lambda: optax.chain(
        optax.conditionally_transform(_clip(0.1), late), optax.sgd(0.1))),
    _case("inject_hyperparams(chain(clip, adam))", lambda: optax.inject_hyperparams(
        lambda learning_rate, limit: optax.chain(
            _clip(limit), optax.adam(learning_rate)))(
                learning_rate=schedule(), limit=0.2)),
    _case("normalize_by_update_norm, sgd", lambda: optax.chain(
        optax.normalize_by_update_norm(), optax.sgd(0.1))),
    _case("masked(clip, by path), adam", lambda: optax.chain(
        optax.masked(_clip(0.1), kernels), optax.adam(0.1))),
    _case("apply_if_finite(chain(clip, adam))", lambda: optax.apply_if_finite(
        optax.chain(_clip(0.5), optax.adam(0.1)), 5), gradients="spoiled"),
    _case("apply_if_finite(adam), spoiled", lambda: optax.apply_if_finite(
        optax.adam(0.1), 5), gradients="spoiled"),
    # Each leaf by itself, by its path.
    _case("multi_transform that freezes by path", lambda: _of_parts(optax.adam(0.1))),
    _case("multi_transform, a schedule in one part",
          lambda: _of_parts(optax.sgd(schedule(0.0, 0.5)))),
    _case("adamw(decay by path)", lambda: optax.adamw(
        0.1, weight_decay=0.1, mask=kernels)),
    _case("lamb(decay by path)", lambda: optax.lamb(
        0.1, weight_decay=0.1, mask=kernels), "runs whole"),
    _case("masked(set_to_zero) after adam", lambda: optax.chain(
        optax.adam(0.1), optax.masked(optax.set_to_zero(), tables))),
    _case("masked(trace) by path, sgd", lambda: optax.chain(
        optax.masked(optax.trace(0.9), kernels), optax.sgd(0.1))),
    _case("muon, dimension numbers by path", lambda: contrib.muon(
        0.05, muon_weight_dimension_numbers=muon_numbers), "runs whole"),
    _case("MultiSteps(adam, every 4)", lambda: optax.MultiSteps(optax.adam(0.1), 4)),
    _case("MultiSteps(adamw(mask by path), 8)", lambda: optax.MultiSteps(
        optax.adamw(0.1, weight_decay=0.1, mask=kernels), 8)),
    _case("MultiSteps(multi_transform by path, 4)", lambda: optax.MultiSteps(
        _of_parts(optax.adam(0.1)), 4)),
    _case("masked(MultiSteps(sgd, 4)) of one leaf, adam", lambda: optax.chain(
        optax.masked(optax.MultiSteps(optax.sgd(1.0), 4), tables), optax.adam(0.1))),
    _case("apply_every(4), sgd", lambda: optax.chain(
        optax.apply_every(4), optax.sgd(0.1))),
    _case("adam, keep_params_nonnegative", lambda: optax.chain(
        optax.adam(0.1), optax.keep_params_nonnegative())),
    _case("flatten(adam by element)", lambda: optax.flatten(optax.adam(0.1)), ""),
    _case("ema of updates", lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1))),
    _case("schedule_free_sgd, warm", lambda: contrib.schedule_free_sgd(0.1, 3)),
    # Coupled through what a leaf keeps, or through values.
    _case("MultiSteps(chain(clip, sgd), 8)", lambda: optax.MultiSteps(
        optax.chain(_clip(0.1), optax.sgd(0.5)), 8), "refused"),
    _case("clip after adam", lambda: optax.chain(
        optax.scale_by_adam(), _clip(0.1), optax.scale(-0.1)), "refused"),
    _case("clip after trace", lambda: optax.chain(
        optax.trace(0.9), _clip(0.1), optax.scale(-0.1)), "refused"),
    _case("clip after decayed weights", lambda: optax.chain(
        optax.add_decayed_weights(0.1), _clip(0.1), optax.sgd(0.1)), "refused"),
    _case("flatten(chain(adam, clip))", lambda: optax.flatten(
        optax.chain(optax.scale_by_adam(), _clip(0.1), optax.scale(-0.1))), "refused"),
    _case("conditionally_transform(clip after adam, step > 8)", lambda: optax.chain(
        optax.scale_by_adam(), optax.conditionally_transform(_clip(0.1), late),
        optax.scale(-0.1)), "refused"),
    # Random numbers: as many as leaves, from one key.
    _case("noisy_sgd(key)", lambda: optax.noisy_sgd(0.1, key=jax.random.key(5)), ""),
    _case("chain(clip, add_noise, adam)", lambda: optax.chain(
        _clip(0.5), optax.add_noise(0.1, 0.5, key=jax.random.key(6)),
        optax.adam(0.1)), ""),
    # Extra arguments of update.
    _case("reduce_on_plateau after chain(clip, adam)", lambda: optax.chain(
        _clip(0.1), optax.adam(0.1),
        contrib.reduce_on_plateau(patience=1, cooldown=1)), extra=("value",)),
    _case("polyak_sgd with a value", optax.polyak_sgd, "", extra=("value",)),
]  # fmt: skip


def _rows(name: str, make: object, on_servers: str = "runs") -> Case:
    return Case(f"rows: {name}", make, gradients="rows", on_servers=on_servers)


ROWS = [
    _rows("sgd with momentum", lambda: optax.sgd(schedule(), momentum=0.9)),
    _rows("adam", lambda: optax.adam(schedule())),
    _rows("adagrad", lambda: optax.adagrad(0.1)),
    _rows("adamw(mask by path)", lambda: optax.adamw(
        0.1, weight_decay=0.1, mask=tables)),
    _rows("chain(clip, sgd)", lambda: optax.chain(_clip(0.3), optax.sgd(0.1))),
    _rows("chain(clip, adam)", lambda: optax.chain(_clip(0.3), optax.adam(0.1))),
    _rows("inject_hyperparams(chain(clip, adam))", lambda: optax.inject_hyperparams(
        lambda learning_rate, limit: optax.chain(
            _clip(limit), optax.adam(learning_rate)))(
                learning_rate=schedule(), limit=0.2)),
    _rows("conditionally_transform(clip, step > 8), sgd", lambda: optax.chain(
        optax.conditionally_transform(_clip(0.1), late), optax.sgd(0.1))),
    _rows("multi_transform by path", lambda: _of_parts(optax.adam(0.1))),
]  # fmt: skip
"""Elementwise, for some rows of a table are moved; or coupled by a norm of the rows,
duplicates summed, and of all other leaves."""


QUICK = {
    "chain(clip, sgd(join_schedules([0, .5], [8])))": "here",
    "conditionally_transform(clip, step > 8)": "both",
    "inject_hyperparams(chain(clip, adam))": "both",
    "apply_if_finite(chain(clip, adam))": "here",
    "multi_transform that freezes by path": "both",
    "chain(clip, adamw(mask by path))": "here",
    "lamb(decay by path)": "here",
    "masked(set_to_zero) after adam": "here",
    "muon, dimension numbers by path": "here",
    "MultiSteps(adamw(mask by path), 8)": "both",
    "MultiSteps(chain(clip, sgd), 8)": "both",
    "clip after adam": "both",
    "noisy_sgd(key)": "here",
    "reduce_on_plateau after chain(clip, adam)": "both",
    "rows: chain(clip, adam)": "both",
}
"""What `make test` runs in this process (``here``), and on parameter servers, too: one
of each way to go wrong."""
