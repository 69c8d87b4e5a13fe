"""Traces a step of a Keras model: its arrays and its look-ups.

Keras' ``train_step(state, data)``, ``test_step`` and ``predict_step`` are public, pure,
and what users override. They are traced here as they are, except for what happens at
``self.optimizer.stateless_apply``: the gradients come out, and the optimizer runs where
the strategy stores the variables.

A step with look-ups is traced twice. First the layers of tables note their ids and get
one number for rows: so the ids become a program of their own. Then the step is traced
with the rows of these ids in place of each table, so what comes out as its gradient are
gradients of rows.

Law: only its layer reads a table. Whatever else does (a regularizer, tied weights) is
found in the first trace.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ._private import with_shapes
from .embeddings import Embedding, building, layer_table, warn_of_whole
from .shipped import (
    Kind,
    Operations,
    ShippedLookups,
    ShippedStep,
    StepProgram,
    pruned,
    traced,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Step = Callable[..., list[Any]]


def find_lookups(
    step: Step, kinds: Sequence[Kind], batch: int, layers: dict[int, Any]
) -> tuple[ShippedLookups, dict[int, Kind]]:
    """Finds what a step looks up; also returns what it takes in place of tables, by
    number.

    Args:
        batch: How many of the last inputs are the batch.
        layers: Where each `keras.layers.Embedding` of these cannot be looked up, all of
            them are taken out, with a warning.

    Raises:
        NotImplementedError: An `Embedding` is read otherwise, or its ids are not
            computed from the batch alone by what can be sent; names the layer.
    """
    try:
        return _found(step, kinds, batch, layers)
    except NotImplementedError:
        own = {n: each for n, each in layers.items() if isinstance(each, Embedding)}
        if len(own) == len(layers):
            raise
        found = _found(step, kinds, batch, own)
        lost = [layers.pop(n).embeddings for n in set(layers) - set(own)]
        warn_of_whole(
            lost,
            "as rows cannot be looked up if something else reads them (a regularizer, "
            "weights that two layers share) or ids do not follow from the batch alone",
            "Use embeddings without that",
        )
        return found


def _found(
    step: Step, kinds: Sequence[Kind], batch: int, layers: Mapping[int, Any]
) -> tuple[ShippedLookups, dict[int, Kind]]:
    if not layers:
        return ShippedLookups(), {}
    numbers: list[int] = []

    def ids_of(row: Any, *arrays: Any) -> list[Any]:
        found: list[Any] = []

        def look_up(number: int, ids: Any) -> Any:
            numbers.append(number)
            found.append(ids)
            kind = Kind((*ids.shape, *kinds[number].shape[1:]), kinds[number].dtype)
            return jnp.broadcast_to(row.astype(kind.dtype), kind.shape)

        numbers.clear()
        with _looking_up(layers, look_up):
            step(*arrays)
        return found

    try:
        closed = traced(ids_of, [Kind((), "float32"), *kinds])  # a number for rows
    except jax.errors.UnexpectedTracerError as error:
        raise NotImplementedError(
            f"a layer of {_names(layers)} is called in a function that jax transforms "
            "(a loop, jax.checkpoint): look its rows up outside of that"
        ) from error
    given = {
        var
        for eqn in closed.jaxpr.eqns
        for var in eqn.invars
        if not isinstance(var, Literal)
    }
    for number, layer in layers.items():
        if closed.jaxpr.invars[number + 1] in given:
            raise NotImplementedError(
                f"layer {layer.name!r} is a zs.keras.Embedding, whose rows are looked "
                "up, but something else reads all of them: a regularizer, or weights "
                "that two layers share. Leave that out, or make it a "
                "keras.layers.Embedding, which each step reads whole"
            )
    program = _program(closed, batch, [layers[n].name for n in numbers])
    sizes: dict[int, int] = {}
    for number, var in zip(numbers, closed.jaxpr.outvars, strict=True):
        sizes[number] = sizes.get(number, 0) + math.prod(var.aval.shape)
    rows = {
        number: Kind((size, *kinds[number].shape[1:]), kinds[number].dtype)
        for number, size in sizes.items()
    }
    return ShippedLookups(tuple(numbers), program), rows


def lookups_given(
    step: Step,
    variables: Sequence[Any],
    layers: Mapping[int, Any],
    rows: Mapping[int, Kind],
) -> Step:
    """Returns the step whose look-ups give rows in order, those that their variables
    have."""

    def on_rows(*arrays: Any) -> list[Any]:
        used = dict.fromkeys(rows, 0)

        def look_up(number: int, ids: Any) -> Any:
            start = used[number]
            used[number] += math.prod(ids.shape)
            found = variables[number].value[start : used[number]]
            return found.reshape(*ids.shape, *found.shape[1:])

        with _looking_up({n: layers[n] for n in rows}, look_up):
            return step(*arrays)

    return on_rows


@contextlib.contextmanager
def _looking_up(
    layers: Mapping[int, Any], look_up: Callable[[int, Any], Any]
) -> Iterator[None]:
    """Has layers call ``look_up`` with their number and ids, in the block."""

    def caller(number: int, layer: Any) -> Callable[[Any], Any]:
        def call(inputs: Any) -> Any:
            if inputs.dtype not in ("int32", "int64") and layer_table(layer) is None:
                inputs = keras.ops.cast(inputs, "int32")
            return keras.ops.cast(look_up(number, inputs), layer.compute_dtype)

        return call

    try:
        for number, layer in layers.items():
            layer.call = caller(number, layer)
        yield
    finally:
        for layer in layers.values():
            vars(layer).pop("call", None)


def _program(closed: Any, batch: int, names: Sequence[str]) -> Operations:
    """Returns the program of ids, of the batch alone."""
    wanted = {var for var in closed.jaxpr.outvars if not isinstance(var, Literal)}
    eqns = []
    for eqn in reversed(closed.jaxpr.eqns):
        if wanted.intersection(eqn.outvars):
            wanted.update(var for var in eqn.invars if not isinstance(var, Literal))
            eqns.append(eqn)
    inputs = closed.jaxpr.invars
    if wanted.intersection(inputs[: len(inputs) - batch]):
        raise NotImplementedError(
            f"ids of a layer of {sorted(set(names))} are computed from variables of "
            "the model: rows are looked up before the step, so ids have to follow from "
            "its batch alone. Use a keras.layers.Embedding"
        )
    jaxpr = closed.jaxpr.replace(invars=inputs[len(inputs) - batch :], eqns=eqns[::-1])
    try:
        return Operations.of(ClosedJaxpr(jaxpr, closed.consts))
    except NotImplementedError as error:
        raise NotImplementedError(
            f"ids of a layer of {sorted(set(names))} are computed by "
            f"{error.args[0]!r}, which cannot be sent apart from the step: compute ids "
            "in the dataset"
        ) from None


def _names(layers: Mapping[int, Any]) -> list[str]:
    return sorted({layer.name for layer in layers.values()})


_ADDS: Final = ("add", "add_any")
_KEEPS: Final = ("convert_element_type", "copy", "reshape", "broadcast_in_dim")


@dataclass(frozen=True)
class Batch:
    """The arrays of a batch, and the structure that Keras gave it."""

    treedef: Any
    arrays: tuple[Any, ...]

    @staticmethod
    def of(data: Any, *, whole: bool = False) -> Batch:
        """Flattens a batch; its arrays get dtypes that jax has, unless it is kept
        ``whole``, as ids of 64 bits are.

        Raises:
            TypeError: It has a leaf that is no array, such as a ragged tensor.
        """
        leaves, treedef = jax.tree.flatten(data)
        return Batch(treedef, tuple([_array(leaf, whole=whole) for leaf in leaves]))

    @property
    def key(self) -> Any:
        """Equal for batches that one traced step serves."""
        dtype_of = jax.dtypes.canonicalize_dtype
        return self.treedef, tuple([(x.shape, dtype_of(x.dtype)) for x in self.arrays])

    @property
    def kinds(self) -> list[Kind]:
        """What a traced step takes."""
        return [Kind(shape, dtype.name) for shape, dtype in self.key[1]]

    @property
    def rows(self) -> int:
        """Number of examples."""
        return next((x.shape[0] for x in self.arrays if x.ndim), 1)

    def part(self, start: int, end: int) -> Batch:
        """Returns some of the rows; all have what has no rows."""
        cut = [x[start:end] if x.ndim else x for x in self.arrays]
        return Batch(self.treedef, tuple(cut))


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
    """A step on arrays of given shapes.

    Its ``inputs`` are the trainable and the other variables of the model, or the rows
    of ``lookups`` in place of some, then those of the batch. Its results are gradients,
    the next values of the ``changed`` of the other variables, what the batch adds to
    the state of the metrics, and what else it returns, with the structure ``returned``.
    """

    function: Callable[..., list[Any]]
    inputs: list[Kind]
    lookups: ShippedLookups
    gradients: int
    changed: tuple[int, ...]
    metrics: int
    returned: Any

    def seen(self, results: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Splits what is left of results without gradients and state: what the batch
        adds to the metrics, and what the step returned to Keras."""
        rest = jax.tree.unflatten(self.returned, results[self.metrics :])
        return results[: self.metrics], rest

    def program(self) -> StepProgram:
        """Makes what is sent to workers."""
        return StepProgram(ShippedStep.of(self.function, self.inputs), self.lookups)


def trace_step(
    model: Any, mode: str, batch: Batch, tables: dict[int, Any] | None = None
) -> TracedStep:
    """Traces ``train_step``, ``test_step`` or ``predict_step`` of a model.

    Args:
        tables: Layers whose rows are looked up, by the number of their variable among
            the trainable and then the other ones.

    Raises:
        NotImplementedError: The step does what a strategy cannot follow: it moves
            trainable variables without ``self.optimizer.stateless_apply``, has a
            metric that does not add up, or reads a table otherwise; says what to write.
    """
    trained, others = model.trainable_variables, model.non_trainable_variables
    metrics = [] if mode == "predict" else model.metrics_variables
    groups = [len(trained), len(others), len(metrics)]
    form: dict[str, Any] = {}

    def step(*arrays: Any) -> list[Any]:
        values, state, sums, leaves = _cut(arrays, groups)
        data = jax.tree.unflatten(batch.treedef, leaves)
        grads: list[Any] = []
        match mode:
            case "train":
                grads, values_after, state, sums, logs = _train(
                    model, values, state, sums, data
                )
                _require_unmoved(model, values, values_after)
            case "test":
                logs, (_, state, sums) = model.test_step((values, state, sums), data)
            case _:
                logs, state = model.predict_step((values, state), data)
        rest, form["returned"] = jax.tree.flatten(logs)
        form["gradients"] = len(grads)
        return [*grads, *state, *sums, *map(jnp.asarray, rest)]

    variables = [*trained, *others]
    kinds = [*map(Kind.of, [*variables, *metrics]), *batch.kinds]
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
        shapes = [(variables[number], kind.shape) for number, kind in rows.items()]
        with with_shapes(shapes):
            closed = traced(lookups_given(step, variables, layers, rows), kinds)
    _require_sums(model, closed, form["gradients"] + groups[1], groups)
    number, inputs = form["gradients"], closed.jaxpr.invars
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
    zeros = [(variable.shape, variable.dtype) for variable in metrics]
    cut = groups[0] + groups[1]

    def function(*arrays: Any) -> list[Any]:
        return run(*arrays[:cut], *[jnp.zeros(*kind) for kind in zeros], *arrays[cut:])

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


def _train(model: Any, values: Any, state: Any, sums: Any, data: Any) -> Any:
    """Runs ``train_step`` with an optimizer that changes nothing."""
    optimizer = model.optimizer
    calls: list[list[Any]] = []

    def stateless_apply(variables: Any, grads: Any, trained: Any) -> Any:
        calls.append(list(grads))
        return trained, variables

    slots = [jnp.zeros(v.shape, v.dtype) for v in optimizer.variables]
    optimizer.stateless_apply = stateless_apply
    try:
        logs, after = model.train_step((values, state, slots, sums), data)
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
    return calls[0], after[0], after[1], after[3], logs


def _require_unmoved(model: Any, before: Sequence[Any], after: Sequence[Any]) -> None:
    if any(a is not b for a, b in zip(before, after, strict=True)):
        raise NotImplementedError(
            f"train_step of {model.name!r} returns trainable variables that "
            "self.optimizer.stateless_apply has not returned: the strategy moves them "
            "by their gradients alone. Use a constraint of the variable, or a callback"
        )


def _require_sums(model: Any, closed: ClosedJaxpr, first: int, groups: Any) -> None:
    """Checks that a batch adds to the state of metrics, whatever it was."""
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
    """Returns whether a variable of a program is ``before``, of the ``state``, plus
    what does not depend on the state."""
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
