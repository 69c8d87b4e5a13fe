"""Finds the embedding look-ups of a step of a Keras model: which rows of which tables
the step needs.

A step with look-ups is traced twice. In the first trace, the embedding layers record
their ids and return a constant in place of rows; so the computation of the ids becomes
a separate program. In the second trace, the rows of these ids replace each table as
inputs, so the gradients that come out are gradients of rows.

Law: only the embedding layer reads its table. Anything else that reads the table (a
regularizer, tied weights) is found in the first trace.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
from jax.extend.core import ClosedJaxpr, Literal

from .embeddings import Embedding, layer_table, warn_of_whole
from .shipped import Kind, Operations, ShippedLookups, traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Step = Callable[..., list[Any]]


def find_lookups(
    step: Step, kinds: Sequence[Kind], batch: int, layers: dict[int, Any]
) -> tuple[ShippedLookups, dict[int, Kind]]:
    """Finds the look-ups of a step. Returns the program of their ids, and for each
    table shape and dtype of its rows, by the number of the table's variable.

    Args:
        step: The function to trace; ``kinds`` are the shapes and dtypes of its
            arguments.
        batch: How many of the last arguments are the arrays of the batch.
        layers: Embedding layers by the numbers of their variables. If rows of one of
            the `keras.layers.Embedding` among them cannot be looked up, all of these
            are removed from ``layers``, with a warning.

    Raises:
        NotImplementedError: The table of a `zs.keras.Embedding` is read by something
            other than its layer, or the ids are not computed from the batch alone by
            operations that can be sent. The error names the layer.
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
            # Of an input, so that ids which are computed of rows are found to be.
            return jnp.broadcast_to(row.astype(kind.dtype), kind.shape)

        numbers.clear()  # jax may trace a function more than once
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
    # The layers gave a number for rows, so who reads a table does so by itself.
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
    # All look-ups of one table are one array, whose parts follow in the order of calls.
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
    """Returns the step with each embedding layer replaced: a look-up returns the next
    rows of the array that its variable holds during the trace."""

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
    """Makes the embedding layers call ``look_up(number, ids)`` in the block, with the
    number of their variable."""

    def caller(number: int, layer: Any) -> Callable[[Any], Any]:
        def call(inputs: Any) -> Any:
            # As keras.layers.Embedding does; ids of a table of any id have 64 bits.
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
    """Returns the program that computes the ids from the arrays of the batch.

    Raises:
        NotImplementedError: The ids depend on variables of the model, or on an
            operation that cannot be sent.
    """
    # Backwards from the ids, which leaves the rest of the step out.
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
