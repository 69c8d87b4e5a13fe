"""Steps and optimizers of Keras in a form that runs without Keras.

Workers and parameter servers need neither Keras nor the classes of the model: the
program traces a step of the model and an update of its optimizer, and sends these
traces. So nothing here imports Keras.

A step is one StableHLO program, `ShippedStep`. An optimizer is a list of operations,
`ShippedUpdate`: a parameter server has to see which results depend on which inputs,
because it updates each variable separately.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, primitives

from zstrat.program import embedding_lookup, function, value_and_grad

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.variables import Optimizer

_PLATFORMS: Final = ("cpu", "cuda", "tpu")
"""Platforms a step is lowered for: workers may have other devices than the program."""

_NAMES: Final = {
    id(value): name for name, value in vars(primitives).items() if name.endswith("_p")
}
ROWS: Final = 1_000_003
"""The first of the numbers that represent a variable number of rows in the shapes of a
program."""

_CALLS: Final = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters of call operations, which are replaced by the bodies of the called
functions."""


class Kind(NamedTuple):
    """The shape and the dtype of an array."""

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(array: Any) -> Kind:
        return Kind(tuple(array.shape), jnp.dtype(array.dtype).name)

    def spec(self) -> Any:
        kind: Any = jax.ShapeDtypeStruct  # untyped
        return kind(self.shape, self.dtype)


@dataclass(frozen=True)
class ShippedStep:
    """A function from arrays to a list of arrays, lowered here and compiled by the
    process that runs it."""

    module: bytes
    kept: tuple[int, ...]
    platforms: tuple[str, ...]
    inputs: tuple[Kind, ...]
    outputs: tuple[Kind, ...]

    @staticmethod
    def of(function: Callable[..., Any], inputs: Sequence[Any]) -> ShippedStep:
        """Lowers a function for all platforms; if it has an operation that not all
        support, only for that of this process.

        Raises:
            ValueError, NotImplementedError: The function calls Python while it runs
                (`jax.pure_callback`), or a kernel of unknown effects.
        """
        kinds = tuple(map(Kind.of, inputs))
        specs = [kind.spec() for kind in kinds]
        try:
            made = export.export(jax.jit(function), platforms=_PLATFORMS)(*specs)
        except (NotImplementedError, ValueError):
            made = export.export(jax.jit(function))(*specs)
        return ShippedStep(
            made.mlir_module_serialized,
            tuple(made.module_kept_var_idx),
            tuple(made.platforms),
            kinds,
            tuple(map(Kind.of, made.out_avals)),
        )

    def __call__(self, *arrays: Any) -> list[Any]:
        """Runs the function; also allowed while jax traces a step."""

        # An exported function of the same signature, and then another module: the
        # serialization of jax needs a package that jax itself does not bring.
        def alike(*arrays: Any) -> list[Any]:
            return [jnp.zeros(kind.shape, kind.dtype) for kind in self.outputs]

        template = export.export(jax.jit(alike), platforms=self.platforms)
        made: Any = dataclasses.replace(
            template(*[kind.spec() for kind in self.inputs]),
            mlir_module_serialized=self.module,
            module_kept_var_idx=self.kept,
        )
        # Ids of 64 bits among the others must not look as if they were used here.
        given = [
            array if number in self.kept else jnp.zeros(kind.shape, kind.dtype)
            for number, (array, kind) in enumerate(
                zip(arrays, self.inputs, strict=True)
            )
        ]
        results: list[Any] = made.call(*given)
        return results


@dataclass(frozen=True)
class ShippedLookups:
    """Look-ups of the rows that a step takes instead of whole tables.

    Args:
        tables: For each look-up the number of its table among the variables.
        ids: A program that computes the ids of each look-up from the batch.
    """

    tables: tuple[int, ...] = ()
    ids: Operations | None = None

    def rows(self, tables: Mapping[int, Any], batch: Sequence[Any]) -> dict[int, Any]:
        """Looks up the rows of all look-ups. Returns ``[n, row]`` for each table, by
        its number."""
        if self.ids is None:
            return {}
        found: dict[int, list[Any]] = {number: [] for number in tables}
        ids = self.ids(*batch)
        for number, each in zip(self.tables, ids, strict=True):
            rows = embedding_lookup(tables[number], each.reshape(-1))
            found[number].append(rows)
        return {n: jnp.concatenate(each) for n, each in found.items()}


class StepProgram(NamedTuple):
    """The program of a step for batches of given shapes and dtypes. The inputs are the
    values of the variables, or the rows of ``lookups``, and the batch; the results are
    gradients, next values of the ``changed`` non-trainable variables, and the results
    of the step."""

    step: ShippedStep
    lookups: ShippedLookups


def step_function(
    programs: Mapping[Any, StepProgram],
    params: Sequence[Any],
    state: Sequence[Any],
    optimizer: Optimizer | None,
    changed: Sequence[int],
    *,
    draws: bool,
) -> Any:
    """Makes the step function that workers run.

    Args:
        programs: The program for each tuple of shapes and dtypes of a batch.
        params: The trainable variables.
        state: The non-trainable variables; ``changed`` are the numbers of those that
            the step assigns.
        optimizer: Applies the gradients; None: the step computes none.
        draws: Whether the step takes an iterator and draws its batch from that.
    """
    variables, trained = [*params, *state], len(params)
    counters = {at for at in changed if state[at].dtype.kind in "iu"}

    def keras_step(rate: Any, *arrays: Any) -> list[Any]:
        if draws:
            arrays = tuple(map(jnp.asarray, jax.tree.leaves(next(arrays[0]))))
        step, lookups = programs[tuple([(x.shape, x.dtype) for x in arrays])]
        tables = {number: variables[number] for number in lookups.tables}
        known = {
            n: v.value()
            for n, v in enumerate(variables)
            if n not in tables and (n in step.kept or n - trained in counters)
        }

        def seen(tables: Mapping[int, Any]) -> tuple[Any, list[Any]]:
            """Runs the step. Returns its results, and a scalar whose gradient by the
            rows is the gradient that the step computed."""
            rows = lookups.rows(tables, arrays)
            given = known | jax.tree.map(jax.lax.stop_gradient, rows)
            results = step(*[given.get(n) for n in range(len(variables))], *arrays)
            # The derivative of rows * g by rows is g, the gradient that the step gave.
            own = [jnp.vdot(rows[n], results[n]) for n in rows if n in moved]
            return sum(own, jnp.float32(0)), results

        moved = {n: tables[n] for n in tables if n < trained and optimizer is not None}
        results: list[Any]
        slices: Mapping[int, Any] = {}
        if moved:
            looked_up = value_and_grad(lambda own: seen(tables | own), has_aux=True)
            (_, results), slices = looked_up(moved)
        else:
            _, results = seen(tables)
        if optimizer is not None:
            grads = [slices.get(n, results[n]) for n in range(trained)]
            optimizer.apply_gradients(grads, params, learning_rate=rate)
            results = results[trained:]
        for at, after in zip(changed, results, strict=False):
            if at in counters:
                # Of steps that run at a time none is lost, though they may have drawn
                # by the same seed.
                state[at].assign_add(after - known[trained + at])
            else:
                state[at].assign(after)
        return results[len(changed) :]

    return function(keras_step)


class Operation(NamedTuple):
    """One operation of a program: ``results = primitive(*operands)``. An operand is the
    number of a value, or a constant."""

    primitive: str
    parameters: dict[str, Any]
    operands: tuple[int | np.ndarray, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Operations:
    """A program without nested calls. Its values are numbered, the inputs first.

    A length of `ROWS` or more in a shape represents an unknown number of rows, which
    `at` replaces by the actual number.
    """

    inputs: int
    steps: tuple[Operation, ...]
    outputs: tuple[int | np.ndarray, ...]

    @staticmethod
    def of(closed: ClosedJaxpr) -> Operations:
        """Flattens a jaxpr: calls are replaced by the bodies of the called functions.

        Raises:
            NotImplementedError: The jaxpr has a loop, or an operation without a public
                name.
        """
        flat = _Flattening(len(closed.jaxpr.invars))
        outputs = flat.inline(closed, tuple(range(flat.count)))
        return Operations(len(closed.jaxpr.invars), tuple(flat.steps), tuple(outputs))

    def at(self, rows: Mapping[int, int]) -> Operations:
        """Returns the program with actual numbers of rows in place of the numbers that
        represent them, the keys of ``rows``."""
        steps = [
            step._replace(parameters=at(step.parameters, rows)) for step in self.steps
        ]
        return Operations(self.inputs, tuple(steps), self.outputs)

    def equals(self, other: Operations) -> bool:
        """Whether two programs compute the same: they are equal in operations and
        constants."""
        return bool(_form(self) == _form(other))

    def __call__(self, *arrays: Any) -> list[Any]:
        values: dict[int, Any] = dict(enumerate(arrays))

        def value(operand: int | np.ndarray) -> Any:
            return values[operand] if isinstance(operand, int) else operand

        for step in self.steps:
            operands = [value(operand) for operand in step.operands]
            results = _performed(step, operands)
            values.update(zip(step.results, results, strict=True))
        return [jnp.asarray(value(output)) for output in self.outputs]


def at(given: Any, rows: Mapping[int, int]) -> Any:
    """Replaces the numbers that are keys of ``rows`` in a shape, or in any structure of
    shapes, by the actual numbers of rows."""
    match given:
        case bool():
            return given
        case int():
            return rows.get(given, given)
        case tuple():
            made = [at(each, rows) for each in given]
            # A tuple with names takes its elements one by one.
            return tuple(made) if type(given) is tuple else type(given)(*made)
        case list():
            return [at(each, rows) for each in given]
        case dict():
            return {name: at(each, rows) for name, each in given.items()}
        case Operations():
            return given.at(rows)
    return given


def _form(given: Any) -> Any:
    """Converts a program to a hashable value that is equal for equal programs."""
    match given:
        case Operations():
            return given.inputs, _form(given.steps), _form(given.outputs)
        case np.ndarray():
            return given.dtype.name, given.shape, given.tobytes()
        case tuple() | list():
            return tuple(map(_form, given))
        case dict():
            return tuple([(name, _form(each)) for name, each in sorted(given.items())])
    return repr(given)


def _performed(step: Operation, operands: list[Any]) -> list[Any]:
    match step.primitive:
        case "cond_p":
            branches = step.parameters["branches"]
            chosen: list[Any] = jax.lax.switch(operands[0], branches, *operands[1:])
            return chosen
        case "stack":
            return [jnp.stack(operands, **step.parameters)]
    primitive = getattr(primitives, step.primitive)
    results = primitive.bind(*operands, **step.parameters)
    return list(results) if primitive.multiple_results else [results]


class _Flattening:
    def __init__(self, count: int) -> None:
        self.count = count
        self.steps: list[Operation] = []

    def inline(self, closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        values.update(zip(jaxpr.constvars, map(np.asarray, closed.consts), strict=True))
        for eqn in jaxpr.eqns:
            operands = tuple([_operand(values, var) for var in eqn.invars])
            values.update(zip(eqn.outvars, self._eqn(eqn, operands), strict=True))
        return [_operand(values, var) for var in jaxpr.outvars]

    def _eqn(self, eqn: Any, operands: tuple[Any, ...]) -> list[Any]:
        parameters = dict(eqn.params)
        # A server cuts a program by what depends on what, which a call would hide.
        for name in _CALLS:
            if isinstance(parameters.get(name), ClosedJaxpr):
                return self.inline(parameters[name], operands)
        name = _NAMES.get(id(eqn.primitive), "")
        if eqn.primitive.name == "stack":  # has no public name
            name = "stack"
        if name == "cond_p":
            branches = [Operations.of(branch) for branch in parameters["branches"]]
            parameters = {"branches": branches}
        elif not name or any(isinstance(x, ClosedJaxpr) for x in parameters.values()):
            raise NotImplementedError(eqn.primitive.name)
        results = range(self.count, self.count + len(eqn.outvars))
        self.count = results.stop
        self.steps.append(Operation(name, parameters, operands, tuple(results)))
        return list(results)


def _operand(values: dict[Any, Any], var: Any) -> int | np.ndarray:
    if isinstance(var, Literal):
        aval: Any = var.aval
        return np.asarray(var.val, aval.dtype)
    found: int | np.ndarray = values[var]
    return found


@dataclass(frozen=True)
class ShippedUpdate:
    """A Keras optimizer as an optax transformation, for `zs.Optimizer`.

    Its state is a list of the optimizer's variables without the learning rate, which
    each update is given.

    Args:
        program: Computes, from gradients, state, values and learning rate, the changes
            of the values and the next state.
        first: For each array of the state its shape, dtype and initial value.
        rows: For each trained variable its number of rows in ``program`` and ``first``:
            `ROWS` or more if any number is possible; None for a scalar.
    """

    program: Operations
    first: tuple[tuple[Kind, Any], ...]
    rows: tuple[int | None, ...]

    def init(self, values: Any) -> list[jax.Array]:
        sizes = self._sizes(values)
        pairs = [(at(kind, sizes), value) for kind, value in self.first]
        return [jnp.full(kind.shape, value, kind.dtype) for kind, value in pairs]

    def update(
        self, grads: Any, state: Any, values: Any, *, learning_rate: Any = 0.0, **_: Any
    ) -> tuple[list[Any], list[Any]]:
        rate = jnp.asarray(learning_rate, jnp.float32)
        program = self.program.at(self._sizes(values))
        results = program(*grads, *state, *values, rate)
        return results[: len(grads)], results[len(grads) :]

    def _sizes(self, values: Any) -> dict[int, int]:
        pairs = zip(self.rows, values, strict=True)
        return {rows: value.shape[0] for rows, value in pairs if rows is not None}


def traced(function: Callable[..., Any], kinds: Sequence[Any]) -> Any:
    """Traces a function of arrays of these shapes and dtypes. Returns a ClosedJaxpr."""
    specs = [Kind.of(kind).spec() for kind in kinds]
    return jax.make_jaxpr(function)(*specs)


def pruned(closed: ClosedJaxpr, outputs: Sequence[int]) -> Callable[..., list[Any]]:
    """Returns a traced program as a function that only returns the results numbered in
    ``outputs``."""
    function = jaxpr_as_fun(closed)

    def run(*arrays: Any) -> list[Any]:
        results = function(*arrays)
        return [results[number] for number in outputs]

    return run
