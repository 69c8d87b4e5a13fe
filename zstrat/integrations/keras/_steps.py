"""Traces a step of a Keras model: its arrays and its look-ups.

Keras' ``train_step(state, data)``, ``test_step`` and ``predict_step`` are public, pure,
and what users override. They are traced here unchanged, except for the call of
``self.optimizer.stateless_apply``: its gradients become results of the traced step, and
the optimizer runs where the strategy stores the variables.

`_lookups` replaces tables, as inputs of the step, by the rows that it looks up.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ._lookups import find_lookups, lookups_given
from ._private import with_shapes
from .embeddings import building, layer_table
from .shipped import (
    Kind,
    ShippedLookups,
    ShippedStep,
    StepProgram,
    pruned,
    traced,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_ADDS: Final = ("add", "add_any")
_KEEPS: Final = ("convert_element_type", "copy", "reshape", "broadcast_in_dim")


@dataclass(frozen=True)
class Batch:
    """The arrays of a batch, and the structure (a pytree) in which Keras gave them."""

    treedef: Any
    arrays: tuple[Any, ...]

    @staticmethod
    def of(data: Any, *, whole: bool = False) -> Batch:
        """Flattens a batch to arrays, of dtypes that jax supports. With ``whole``,
        integers keep their dtype, such as ids of 64 bits.

        Raises:
            TypeError: A leaf of the batch is not an array, such as a ragged tensor.
        """
        leaves, treedef = jax.tree.flatten(data)
        return Batch(treedef, tuple([_array(leaf, whole=whole) for leaf in leaves]))

    @property
    def key(self) -> Any:
        """A key that is equal for batches for which one traced step can be used."""
        dtype_of = jax.dtypes.canonicalize_dtype
        return self.treedef, tuple([(x.shape, dtype_of(x.dtype)) for x in self.arrays])

    @property
    def kinds(self) -> list[Kind]:
        """Shapes and dtypes of the arrays, as a traced step receives them."""
        return [Kind(shape, dtype.name) for shape, dtype in self.key[1]]

    @property
    def rows(self) -> int:
        """Number of rows (examples) of the batch."""
        return next((x.shape[0] for x in self.arrays if x.ndim), 1)

    def part(self, start: int, end: int) -> Batch:
        """Returns rows ``start`` to ``end`` of the batch, of an array with several (or
        fewer) rows for each the same share; scalars are kept as they are."""
        rows = max(1, self.rows)

        def cut(x: Any) -> Any:
            return x[start * len(x) // rows : end * len(x) // rows] if x.ndim else x

        return Batch(self.treedef, tuple(map(cut, self.arrays)))


def _array(leaf: Any, *, whole: bool) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        given: Any = leaf  # untyped
        return given.update(dtype=jax.dtypes.canonicalize_dtype(leaf.dtype))
    try:
        array = np.asarray(leaf)
    except Exception as error:
        raise _not_dense(f"a {type(leaf).__module__}.{type(leaf).__name__}") from error
    if array.dtype.kind not in "biufcV":  # bfloat16 is of kind V
        raise _not_dense(f"an array of dtype {array.dtype}")
    if whole and array.dtype.kind in "iu":
        return array
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _not_dense(found: str) -> TypeError:
    return TypeError(
        f"a batch has {found}, which does not travel to workers: give dense arrays of "
        "numbers (texts become numbers in the dataset, by its map)"
    )


@dataclass(frozen=True)
class TracedStep:
    """A step of a model, traced for arrays of given shapes.

    The ``inputs`` are the trainable and then the other variables of the model, where
    rows of ``lookups`` replace whole tables, then the arrays of the batch. The results
    are the gradients, the next values of the non-trainable variables numbered in
    ``changed``, the increments of the state of the metrics, and what the step returned
    to Keras, flattened from the structure ``returned``.
    """

    function: Callable[..., list[Any]]
    inputs: list[Kind]
    lookups: ShippedLookups
    gradients: int
    changed: tuple[int, ...]
    metrics: int
    returned: Any

    def seen(self, results: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Splits the results that follow gradients and state into the increments of the
        metrics' state and what the step returned to Keras."""
        rest = jax.tree.unflatten(self.returned, results[self.metrics :])
        return results[: self.metrics], rest

    def program(self) -> StepProgram:
        """Makes the program of the step that is sent to workers."""
        return StepProgram(ShippedStep.of(self.function, self.inputs), self.lookups)


def trace_step(
    model: Any, mode: str, batch: Batch, tables: dict[int, Any] | None = None
) -> TracedStep:
    """Traces ``train_step``, ``test_step`` or ``predict_step`` of a model.

    Args:
        mode: "train", "test" or "predict".
        tables: Embedding layers whose rows are looked up, by the numbers of their
            variables: trainable variables are counted first, then the others.

    Raises:
        NotImplementedError: A strategy cannot run the step: it changes trainable
            variables without ``self.optimizer.stateless_apply``, has a metric whose
            state is not a sum, or reads a table without its layer. The error says what
            to write.
    """
    trained, others = model.trainable_variables, model.non_trainable_variables
    metrics = [] if mode == "predict" else model.metrics_variables
    # What the optimizer makes of values and state is not known where a step runs: both
    # are inputs here, of which nothing may depend.
    later = [*trained, *model.optimizer.variables] if mode == "train" else []
    groups = [len(trained), len(others), len(metrics), len(later)]
    form: dict[str, Any] = {}

    def step(*arrays: Any) -> list[Any]:
        values, state, sums, after, leaves = _cut(arrays, groups)
        data = jax.tree.unflatten(batch.treedef, leaves)
        grads: list[Any] = []
        match mode:
            case "train":
                grads, state, sums, logs = _train(
                    model, (values, state, after[len(trained) :], sums), data, after
                )
            case "test":
                logs, (_, state, sums) = model.test_step((values, state, sums), data)
            case _:
                logs, state = model.predict_step((values, state), data)
        rest, form["returned"] = jax.tree.flatten(logs)
        form["gradients"] = len(grads)
        return [*grads, *state, *sums, *map(jnp.asarray, rest)]

    variables = [*trained, *others]
    kinds = [*map(Kind.of, [*variables, *metrics, *later]), *batch.kinds]
    first_later, first_leaf = sum(groups[:3]), sum(groups)
    with building(is_on=False):
        layers = {} if tables is None else tables
        lookups, rows = find_lookups(step, kinds, len(batch.arrays), layers)
        for number in sorted(set(layers) - set(rows)):
            is_moved = mode == "train" and number < groups[0]
            if is_moved and layer_table(layers[number]) is not None:
                raise NotImplementedError(
                    f"layer {layers[number].name!r} has a zs.HashTable, which a step "
                    f"that trains {model.name!r} does not look up: call the layer in "
                    "it, or set its trainable=False before compile"
                )
        for number, kind in rows.items():
            kinds[number] = kind
            if mode == "train" and number < groups[0]:
                kinds[first_later + number] = kind
        shapes = [(variables[number], kind.shape) for number, kind in rows.items()]
        with with_shapes(shapes):
            closed = traced(lookups_given(step, variables, layers, rows), kinds)
    _require_unused(model, closed.jaxpr, closed.jaxpr.invars[first_later:first_leaf])
    _require_sums(model, closed, form["gradients"] + groups[1], groups)
    number, inputs = form["gradients"], closed.jaxpr.invars
    # State that a step returns as it was is not written: two steps that run at a time
    # would otherwise take each other's back.
    states = closed.jaxpr.outvars[number : number + groups[1]]
    befores = inputs[groups[0] : groups[0] + groups[1]]
    changed = [n for n, v in enumerate(states) if v is not befores[n]]
    total = len(closed.jaxpr.outvars)
    kept = [
        *range(number),
        *[number + n for n in changed],
        *range(number + groups[1], total),
    ]
    run = pruned(closed, kept)
    cut = groups[0] + groups[1]

    def function(*arrays: Any) -> list[Any]:
        # Metrics begin with nothing in each step, which is added where `fit` runs.
        zeros = [jnp.zeros(*kind) for kind in kinds[cut:first_leaf]]
        return run(*arrays[:cut], *zeros, *arrays[cut:])

    return TracedStep(
        function,
        [*kinds[:cut], *batch.kinds],
        lookups,
        number,
        tuple(changed),
        groups[2],
        form["returned"],
    )


def _cut(arrays: Sequence[Any], groups: Sequence[int]) -> list[list[Any]]:
    ends = np.cumsum([0, *groups]).tolist()
    parts = [list(arrays[a:b]) for a, b in itertools.pairwise(ends)]
    return [*parts, list(arrays[ends[-1] :])]


def _train(model: Any, state: Any, data: Any, after: Sequence[Any]) -> Any:
    """Runs ``train_step`` with an optimizer whose ``stateless_apply`` returns the
    arrays ``after`` as new values and state. Returns the gradients, the non-trainable
    state, the state of the metrics and the logs.

    Raises:
        NotImplementedError: The step does not apply gradients exactly once, or changes
            trainable variables otherwise.
    """
    optimizer, count = model.optimizer, len(state[0])
    calls: list[list[Any]] = []

    # With the names of Keras: they may be given by name.
    def stateless_apply(
        optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        del optimizer_variables, trainable_variables
        calls.append(list(grads))
        return list(after[:count]), list(after[count:])

    # On the instance, which is in the hands of train_step.
    optimizer.stateless_apply = stateless_apply
    try:
        logs, (values, others, _, sums) = model.train_step(state, data)
    finally:
        del optimizer.stateless_apply
    if len(calls) != 1:
        raise NotImplementedError(
            f"train_step of {model.name!r} calls self.optimizer.stateless_apply "
            f"{len(calls)} times: a strategy applies the gradients of one call. Sum "
            "what is to be minimized, and apply its gradients once; in place of "
            "several optimizers give compile a keras.optimizers.MultiOptimizer, or one "
            "of your own whose stateless_apply divides the variables among them"
        )
    if any(a is not b for a, b in zip(values, after, strict=False)):
        raise NotImplementedError(
            f"train_step of {model.name!r} returns trainable variables that "
            "self.optimizer.stateless_apply has not returned: the strategy moves them "
            "by their gradients alone. Use a constraint of the variable, or a callback"
        )
    return calls[0], others, sums, logs


def _require_unused(model: Any, jaxpr: Any, inputs: Sequence[Any]) -> None:
    """Checks that a step does not use ``inputs``, which stand for what the optimizer
    will return, after the step.

    Raises:
        NotImplementedError: The step uses one of them.
    """
    used = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal)}
    used.update(v for v in jaxpr.outvars if not isinstance(v, Literal))
    if used.intersection(inputs):
        raise NotImplementedError(
            f"train_step of {model.name!r} computes with the state of its optimizer, "
            "or with values that stateless_apply has returned: a strategy applies "
            "gradients after the step, where the variables are. Compute with the "
            "values before; count steps in a weight of the model that is not trained; "
            "average weights by the optimizer (use_ema=True), or in a callback"
        )


def _require_sums(model: Any, closed: ClosedJaxpr, first: int, groups: Any) -> None:
    """Checks that a step changes the state of metrics only by adding something that
    does not depend on the state.

    Raises:
        NotImplementedError: A metric changes its state otherwise.
    """
    start = groups[0] + groups[1]
    befores = closed.jaxpr.invars[start : start + groups[2]]
    for number, variable in enumerate(model.metrics_variables[: groups[2]]):
        after = closed.jaxpr.outvars[first + number]
        if not _adds(closed.jaxpr, after, befores[number], befores):
            raise NotImplementedError(
                f"the metric with the variable {variable.path!r} does not add up: what "
                "several workers have seen can be put together only if a batch adds to "
                "the state. Keep sums there, and compute with them in result()"
            )


def _adds(jaxpr: Any, var: Any, before: Any, state: Sequence[Any]) -> bool:
    """Returns whether the variable ``var`` of a jaxpr is ``before`` plus something that
    does not depend on ``state``, the inputs to which ``before`` belongs."""
    made, depending = {}, set(state)
    for eqn in jaxpr.eqns:
        made.update(dict.fromkeys(eqn.outvars, eqn))
        if any(not isinstance(v, Literal) and v in depending for v in eqn.invars):
            depending.update(eqn.outvars)
    while var is not before:
        if isinstance(var, Literal) or (eqn := made.get(var)) is None:
            return False
        own = [
            n
            for n, v in enumerate(eqn.invars)
            if not isinstance(v, Literal) and v in depending
        ]
        if len(own) != 1:
            return False
        # Functions that jax compiles by themselves (jnp.where, ...) have a body.
        name, inner = eqn.primitive.name, eqn.params.get("jaxpr")
        if isinstance(inner, ClosedJaxpr):
            given = inner.jaxpr.invars[own[0]]
            result = inner.jaxpr.outvars[eqn.outvars.index(var)]
            if not _adds(inner.jaxpr, result, given, [given]):
                return False
        elif name not in _ADDS and not (name in _KEEPS and _same(eqn)):
            return False
        var = eqn.invars[own[0]]
    return True


def _same(eqn: Any) -> bool:
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    return bool(before.shape == after.shape and before.dtype == after.dtype)
