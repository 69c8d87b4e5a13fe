"""What the signature of a transformation does not say: how to build it, and what it
needs beside gradients.

The law of the file: a recipe is for what introspection cannot build, or for ways to
build it that it does not try; a name is listed as no transformation with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib
from optax_model import by_path, kernels, objective, parameters, parts, schedule, tables

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Case:
    """One program that is compared with plain optax.

    Args:
        name: What reports call it.
        make: Builds the transformation anew.
        covers: The public name whose case it is; empty for a program of several.
        extra: What ``update`` gets beside gradients and values: ``value``, ``grad``,
            and the functions of `FUNCTIONS`.
        gradients: ``plain``, ``spoiled``, ``of the value`` (of `objective`, where the
            training stands), ``of examples``, or ``rows``: of the table some rows.
        tree: ``model``; less of it, ``no scalar`` or ``matrices`` alone; or
            ``lookahead``: values in pairs, and gradients of the fast ones.
        on_servers: What a parameter server must do: ``runs``, ``runs whole`` (and may
            refuse parts of a variable), ``refused``; empty where all are right.
        anywhere: A pattern of words with which any home may refuse it.
        rounds: Its first state has scalars of bfloat16 where any leaf is, and later
            ones of float32, so that leaves of float32 may differ by such a rounding.
    """

    name: str
    make: Callable[[], Any]
    covers: str = ""
    extra: tuple[str, ...] = ()
    gradients: str = "plain"
    tree: str = "model"
    on_servers: str = ""
    anywhere: str = ""
    rounds: bool = False


def _grad_fn(tree: Any, index: int) -> Any:
    del index
    return jax.grad(objective)(tree)


FUNCTIONS = {"value_fn": objective, "obj_fn": objective, "grad_fn": _grad_fn}
"""Extra arguments that are functions: the same ones in each step."""


def late(step: Any, *_: Any, **__: Any) -> Any:
    return step > 8


def muon_numbers(tree: Any) -> Any:
    """Muon's are the matrices of the layers, in another order of axes than its own; the
    table is a matrix, but adam's."""
    numbers = contrib.MuonDimensionNumbers(1, 0)
    return by_path(lambda path, leaf: numbers if "kernel" in path else None)(tree)


def _all_of_muon(tree: Any) -> Any:
    numbers = contrib.MuonDimensionNumbers(0, 1)
    return by_path(lambda path, leaf: numbers)(tree)


def _galore_numbers(tree: Any) -> Any:
    numbers = contrib.GaLoreDimensionNumbers(0, 1)
    return by_path(lambda path, leaf: numbers if "kernel" in path else None)(tree)


def _layerwise() -> Any:
    rates = by_path(lambda path, leaf: 0.01 if path.startswith("embed") else 0.1)
    return optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda update, rate: -rate * update, updates, rates(updates)
        )
    )


def _means(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.mean(leaf, 0), tree)


def _sam(opaque: bool) -> Any:
    ascent = optax.chain(contrib.normalize(), optax.sgd(0.05))
    return contrib.sam(optax.sgd(0.1), ascent, sync_period=2, opaque_mode=opaque)


def _schedule_of_partition() -> Any:
    rest = optax.chain(optax.clip_by_global_norm(0.2), optax.adam(0.1))
    rules = {"frozen": optax.set_to_zero(), "slow": optax.sgd(0.1), "rest": rest}
    return optax.partition(rules, parts())


def _by_example(aggregator: Any) -> Any:
    from optax.experimental import aggregating

    return aggregating.process(optax.clip(0.3), aggregator, optax.sgd(0.1))


def _aggregating(name: str) -> Any:
    from optax.experimental import aggregating

    return getattr(aggregating, name)


_RUNS = {"on_servers": "runs"}
_WHOLE = {"on_servers": "runs whole"}
_SPOILED = {"gradients": "spoiled"}
_WITH_VALUE = {"extra": ("value",)}
_SEARCH = {"extra": ("value", "grad", "value_fn"), "gradients": "of the value"}
_EXAMPLES = {"gradients": "of examples"}
_PAIRS = {"tree": "lookahead", "anywhere": r"[Ll]ookahead"}
_UNBIASED = {"extra": ("obj_fn",)}
_ROUNDS = {"rounds": True}

_LISTED: list[tuple[str, str, Callable[[], Any], dict[str, Any]]] = [
    ("adafactor", "", lambda: optax.adafactor(schedule()), {}),
    ("adafactor", "factored", lambda: optax.adafactor(
        0.1, min_dim_size_to_factor=2, momentum=0.9), {}),
    ("scale_by_factored_rms", "factored", lambda: optax.scale_by_factored_rms(
        min_dim_size_to_factor=2), {}),
    ("apply_every", "4", lambda: optax.chain(
        optax.apply_every(4), optax.sgd(0.1)), _RUNS),
    ("apply_if_finite", "adam", lambda: optax.apply_if_finite(
        optax.adam(0.1), 3), _SPOILED),
    ("zero_nans", "", lambda: optax.chain(
        optax.zero_nans(), optax.clip(0.5), optax.scale(-0.1)), _SPOILED | _RUNS),
    ("chain", "clip of elements, adam", lambda: optax.chain(
        optax.clip(0.2), optax.adam(schedule())), _RUNS),
    ("named_chain", "clip, adam", lambda: optax.named_chain(
        ("clip", optax.clip(0.2)), ("adam", optax.adam(0.1))), _RUNS),
    ("conditionally_mask", "adam", lambda: optax.conditionally_mask(
        optax.adam(0.1), late), {}),
    ("conditionally_transform", "adam", lambda: optax.conditionally_transform(
        optax.adam(0.1), late), {}),
    ("freeze", "by path", lambda: optax.chain(
        optax.adam(0.1), optax.freeze(tables)), _RUNS),
    ("selective_transform", "adam", lambda: optax.selective_transform(
        optax.adam(0.1), freeze_mask=tables(parameters("float64"))), _RUNS),
    ("inject_hyperparams", "adam", lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=schedule()), _RUNS),
    ("inject_stateful_hyperparams", "adam", lambda: (
        optax.schedules.inject_stateful_hyperparams(optax.adam)(
            learning_rate=optax.schedules.WrappedSchedule(schedule()))), {}),
    ("lookahead", "adam", lambda: optax.lookahead(optax.adam(0.1), 4, 0.5), _PAIRS),
    ("lookahead", "reset_state", lambda: optax.lookahead(
        optax.sgd(0.1, momentum=0.9), 4, 0.5, True), _PAIRS),
    ("masked", "adam by path", lambda: optax.masked(optax.adam(0.1), kernels), _RUNS),
    ("measure_with_ema", "norm", lambda: optax.chain(optax.monitor(
        {"norm": optax.measure_with_ema(optax.tree.norm, decay=0.9)}),
        optax.scale(-0.1)), _RUNS),
    ("monitor", "norm", lambda: optax.chain(
        optax.monitor({"norm": optax.tree.norm}), optax.adam(0.1)), _RUNS),
    ("snapshot", "norm", lambda: optax.chain(
        optax.snapshot("norm", optax.tree.norm), optax.adam(0.1)), _RUNS),
    ("partition", "a norm in one part", _schedule_of_partition, _RUNS),
    ("polyak_sgd", "", optax.polyak_sgd, _WITH_VALUE),
    ("scale_by_polyak", "", lambda: optax.chain(
        optax.scale_by_polyak(), optax.scale(-0.1)), _WITH_VALUE),
    ("lbfgs", "zoom line search", lambda: optax.lbfgs(memory_size=4), _SEARCH),
    ("lbfgs", "no line search", lambda: optax.lbfgs(
        0.05, memory_size=4, linesearch=None), {"gradients": "of the value"}),
    ("scale_by_lbfgs", "", lambda: optax.chain(
        optax.scale_by_lbfgs(memory_size=4), optax.scale(-0.05)),
        {"gradients": "of the value"}),
    ("scale_by_backtracking_linesearch", "", lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8)), _SEARCH),
    ("scale_by_backtracking_linesearch", "store_grad", lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8, store_grad=True)),
        _SEARCH),
    ("scale_by_zoom_linesearch", "", lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_zoom_linesearch(8)), _SEARCH),
    ("stateless", "layerwise rates by path", _layerwise, _RUNS),
    ("stateless_with_tree_map", "by shape", lambda: optax.chain(
        optax.stateless_with_tree_map(lambda g, p: g + 0.1 * p.ndim * p),
        optax.sgd(0.1)), _RUNS),
    ("MultiSteps", "adam, 4", lambda: optax.MultiSteps(optax.adam(0.1), 4), _RUNS),
    ("MultiSteps", "sgd, by schedule", lambda: optax.MultiSteps(
        optax.sgd(0.1), lambda step: jnp.where(step < 2, 2, 3)), {}),
    ("MultiSteps", "adam, skip_not_finite", lambda: optax.MultiSteps(
        optax.adam(0.1), 4, should_skip_update_fn=optax.skip_not_finite), _SPOILED),
    ("contrib.differentially_private_aggregate", "", lambda: optax.chain(
        contrib.differentially_private_aggregate(0.5, 0.1, key=jax.random.key(1)),
        optax.scale(-0.1)), _EXAMPLES),
    ("contrib.dpsgd", "", lambda: contrib.dpsgd(0.1, 0.5, 0.1, seed=1), _EXAMPLES),
    ("contrib.dowg", "estimate", lambda: contrib.dowg(init_estim_sq_dist=0.01), {}),
    ("contrib.galore", "rank 2", lambda: contrib.galore(
        0.1, rank=2, update_proj_gap=5), {}),
    ("contrib.galore", "dimension numbers by path", lambda: contrib.galore(
        0.1, rank=2, weight_dimension_numbers=_galore_numbers), {}),
    ("contrib.scale_by_galore", "rank 2", lambda: optax.chain(
        contrib.scale_by_galore(rank=2, update_proj_gap=5), optax.scale(-0.1)), {}),
    ("contrib.hutchinson_estimator_diag_hessian", "", lambda: optax.chain(
        contrib.hutchinson_estimator_diag_hessian(jax.random.key(3)),
        optax.scale(-0.01)), _UNBIASED),
    ("contrib.sophia", "", lambda: contrib.sophia(
        schedule(), update_interval=4), _UNBIASED),
    ("contrib.momo", "", contrib.momo, _WITH_VALUE),
    ("contrib.momo_adam", "", contrib.momo_adam, _WITH_VALUE),
    ("contrib.muon", "", lambda: contrib.muon(schedule()), {}),
    ("contrib.muon", "dimension numbers by path", lambda: contrib.muon(
        0.1, muon_weight_dimension_numbers=muon_numbers), _WHOLE),
    ("contrib.scale_by_muon", "matrices", lambda: optax.chain(
        contrib.scale_by_muon(weight_dimension_numbers=_all_of_muon),
        optax.scale(-0.1)), {"tree": "matrices"} | _WHOLE),
    ("contrib.prodigy", "", lambda: contrib.prodigy(estim_lr0=0.05), _ROUNDS),
    ("contrib.dadapt_adamw", "", lambda: contrib.dadapt_adamw(estim_lr0=0.05),
        _ROUNDS),
    ("contrib.dog", "", lambda: contrib.dog(init_step=("heuristic", 0.05)), {}),
    ("scale_by_distance_over_gradients", "no scalar", lambda: optax.chain(
        optax.scale_by_distance_over_gradients(), optax.scale(-0.1)),
        {"tree": "no scalar"}),
    ("scale_by_distance_over_gradients", "makes a scalar a vector", lambda: (
        optax.scale_by_distance_over_gradients()), {"anywhere": r"of shape \(\)"}),
    ("sm3", "no scalar", lambda: optax.sm3(0.1), {"tree": "no scalar"}),
    ("scale_by_sm3", "no scalar", optax.scale_by_sm3, {"tree": "no scalar"}),
    ("contrib.reduce_on_plateau", "after sgd", lambda: optax.chain(
        optax.sgd(0.1), contrib.reduce_on_plateau(patience=2, cooldown=1)),
        _WITH_VALUE | _RUNS),
    ("contrib.sam", "", lambda: _sam(False), {}),
    ("contrib.sam", "opaque_mode", lambda: _sam(True),
        {"extra": ("grad_fn",), "gradients": "of the value"}),
    ("contrib.schedule_free", "adam", lambda: contrib.schedule_free(
        optax.adam(0.1, b1=0.0), learning_rate=0.1), {}),
    ("experimental.aggregating.Aggregator", "means", lambda: _by_example(
        _aggregating("Aggregator")(
            optax.init_empty_state, lambda tree, state, _: (_means(tree), state))),
        _EXAMPLES),
    ("experimental.aggregating.process", "adam", lambda: _aggregating("process")(
        optax.clip(0.3), _aggregating("accumulate_avg_updates")(4),
        optax.adam(0.1)), {}),
    ("experimental.aggregating.accumulate_avg_updates", "4", lambda: _by_example(
        _aggregating("accumulate_avg_updates")(4)), {}),
    ("experimental.aggregating.average_per_element_updates", "", lambda: _by_example(
        _aggregating("average_per_element_updates")()), _EXAMPLES),
    ("experimental.aggregating.average_incrementally_updates", "", lambda: _by_example(
        _aggregating("average_incrementally_updates")(0, 4)), _EXAMPLES),
    ("experimental.aggregating.get_per_element_mean_and_sum_sq_diff_grads",
        "add_mean_variance_to_opt, 4", lambda: _aggregating(
            "add_mean_variance_to_opt")(optax.sgd(0.1), accumulation_steps=4),
        _EXAMPLES),
    ("experimental.aggregating.add_mean_variance_to_opt", "sgd", lambda: _aggregating(
        "add_mean_variance_to_opt")(optax.sgd(0.1)), _EXAMPLES),
    ("experimental.aggregating.track_per_element_mean_and_variance_with_ema",
        "add_mean_variance_to_opt, adam", lambda: _aggregating(
            "add_mean_variance_to_opt")(optax.adam(0.1), 0.5), _EXAMPLES),
]  # fmt: skip


def recipes(name: str) -> list[Case]:
    """What is written for a public name (without ``optax.``)."""
    return [
        Case(f"{name}({told})" if told else name, make, **fields)
        for listed, told, make, fields in _LISTED
        if listed == name
    ]


RECIPES = frozenset(listed for listed, *_ in _LISTED)

NO_TRANSFORMATIONS: dict[str, str] = {
    "GradientTransformation": "the type of transformations",
    "GradientTransformationExtraArgs": "the type of transformations",
    "WrappedSchedule": "a schedule with a state",
    "schedules.StatefulSchedule": "the type of schedules with a state",
    "*_schedule": "numbers by step",
    "exponential_decay": "numbers by step",
    "join_schedules": "numbers by step",
    "value_and_grad_from_state": "a gradient, of what a line search has computed",
    "matrix_inverse_pth_root": "a matrix",
    "sigmoid_binary_cross_entropy": "a loss",
    "contrib.schedule_free_eval_params": "values, of a state",
    "losses.*": "losses",
    "projections.*": "trees, projected",
    "tree.*": "arithmetic of trees",
    "assignment.*": "assignments",
    "microbatching.*": "functions of batches in parts",
    "perturbations.*": "functions, made smooth",
}
"""Public names (patterns of `fnmatch`) that introspection cannot tell from
transformations, and what they give. What says that it returns a transformation is one
whatever is written here."""
