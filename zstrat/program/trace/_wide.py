"""Evaluates a traced program with integers of 64 bits where jax has traced 32.

Ids of a hash table have 64 bits, and jax without ``jax_enable_x64`` traces a step with
32. So the operations that a step applies to such ids (a reshape, a slice, `where`,
arithmetic, a comparison) are evaluated from the same trace once more: *wide* inputs
keep 64 bits, and so does what is computed from them, as jax would have it with 64 bits.
Numbers that the step makes itself (``jnp.arange(3) << 40``) have 64 bits where they are
combined with wide values. All other values keep the dtypes of the trace. An operation
that this module does not support gets 32 bits, and the inputs that it depends on are
recorded in `Widened.narrowed`: their values must fit 32 bits.

Inputs of 32 bits are computed with 32, as jax does. If a lookup needs more for its own
operations on them (a sign for padding, with uint32), the ids are marked by `whole`.

The evaluation itself runs where 64 bits are switched on, as `jax.enable_x64` does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Literal

from zstrat.jaxprs import alone, inner_call

from ._flow import Flow
from ._tracebacks import written_at

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_TOGETHER: Final = frozenset(
    {
        "abs", "add", "and", "clamp", "clz", "concatenate", "div", "dot_general", "eq",
        "ge", "gt", "integer_pow", "le", "lt", "max", "min", "mul", "ne", "neg", "not",
        "or", "pad", "population_count", "rem", "shift_left", "shift_right_arithmetic",
        "shift_right_logical", "sign", "square", "stack", "sub", "xor",
    }
)  # fmt: skip
"""Operations whose integer operands all have one dtype."""

_FIRST: Final = frozenset(
    {
        "argmax", "argmin", "broadcast_in_dim", "convert_element_type", "copy",
        "copy_p", "cummax", "cummin", "cumprod", "cumsum", "dynamic_slice",
        "expand_dims", "gather", "name", "reduce_and", "reduce_max", "reduce_min",
        "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor", "reshape", "rev",
        "slice", "split", "squeeze", "stop_gradient", "tile", "top_k", "transpose",
        "unstack",
    }
)  # fmt: skip
"""Operations whose first operand may be wide; the other operands are positions."""

_SCATTERS: Final = {
    f"scatter{mark}{name}": write
    for name, write in (
        ("add", jax.lax.scatter_add),
        ("max", jax.lax.scatter_max),
        ("min", jax.lax.scatter_min),
        ("mul", jax.lax.scatter_mul),
    )
    for mark in "-_"  # as releases of jax call them
}
"""Operations that combine elements of an array with values that are written there."""

_WRITES: Final = {
    "dynamic_update_slice": (0, 1),
    **dict.fromkeys(["scatter", *_SCATTERS], (0, 2)),
}
"""Operations that write to an array: the indices of the operands that are the array,
and the written values."""

_POSITIONS: Final = frozenset({"gather", "dynamic_slice", *_WRITES})
"""Operations whose other operands are positions, of any integer dtype."""

_CONTAINED: Final = ("bool", "int8", "int16", "uint8", "uint16", "uint32")
"""Dtypes whose numbers int64 can represent."""

_WHOLE: Final = "zstrat ids"

_WIDE: Final = {"int32": np.dtype(np.int64), "uint32": np.dtype(np.uint64)}


def whole(ids: jax.Array) -> jax.Array:
    """Marks uint32 ids in a step, which are evaluated with 64 bits from this point
    on."""
    named: jax.Array = checkpoint_name(ids, _WHOLE)  # type: ignore[no-untyped-call]
    return named


def has_whole(flow: Flow) -> bool:
    """Returns whether a program contains ids that are marked by `whole`."""
    return flow.has_marked(_WHOLE)


Evaluate = Callable[[ClosedJaxpr, list[int]], Callable[..., Any]]


class _Value(NamedTuple):
    """A value of the program during the evaluation.

    ``mask`` has, as bits, the wide inputs on which a wide value depends, and one more
    bit for `whole` ids; 0 if the value is not wide. ``own`` is the same value with 64
    bits, if it is computed only from numbers that the step makes itself, or cast from
    uint32.
    """

    value: Any
    mask: int = 0
    own: Any = None


@final
class Widened:
    """A program whose inputs with the numbers ``wide`` have 64 bits; outputs that
    depend on them have 64 bits, too. Call it in a trace."""

    def __init__(self, closed: ClosedJaxpr, wide: Collection[int]) -> None:
        self._closed, self._wide = closed, wide
        self.narrowed: list[tuple[int, str]] = []
        """Pairs of the wide inputs (as bits) that an operation gets with 32 bits, and
        the operation with its line; complete when the program was traced."""
        self._calls: list[Any] = []
        """The equations whose inner programs are being evaluated, outermost first."""
        self.returned = 0
        """The wide inputs (as bits) on which wide outputs depend."""

    def __call__(self, *inputs: Any) -> list[Any]:
        given = [
            _Value(value, 1 << number if number in self._wide else 0)
            for number, value in enumerate(inputs)
        ]
        outputs = self._run(self._closed.jaxpr, self._closed.consts, given)
        for output in outputs:
            self.returned |= output.mask
        return [output.value for output in outputs]

    def _run(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Value]
    ) -> list[_Value]:
        known: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        known.update(
            (var, _number(c)) for var, c in zip(jaxpr.constvars, consts, strict=True)
        )

        def of(var: Any) -> _Value:
            return _number(var.val) if isinstance(var, Literal) else known[var]

        for eqn in jaxpr.eqns:
            results = self._results_of(jaxpr, eqn, [of(var) for var in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [of(var) for var in jaxpr.outvars]

    def _results_of(self, jaxpr: Any, eqn: Any, given: list[_Value]) -> list[_Value]:
        is_wide = any(operand.mask for operand in given)
        name, call = eqn.primitive.name, inner_call(eqn)
        if name == "name" and eqn.params["name"] == _WHOLE:
            value, mask, _ = self._widened(given[0])
            return [_Value(value, mask | 1 << len(self._closed.jaxpr.invars))]
        if not (is_wide or name in ("jit", "pjit")):
            call = None
        # Also for int32 of the step's own: what is computed here may meet ids later.
        if call is not None and (is_wide or any(map(_is_int32, call[0].outvars))):
            # For the line of an error: inside of a jit the user's line may be that of
            # the call.
            self._calls.append(eqn)
            outputs = self._run(*call, given)
            self._calls.pop()
            return outputs
        if is_wide:
            given = self._fitted(eqn, given)
        mask = 0
        for operand in given:
            mask |= operand.mask
        if mask:
            # By the primitive itself, which computes with the dtype of its operands.
            results = _bound(eqn, [operand.value for operand in given])
            return [
                # A result of the traced dtype (a comparison, say) is a value like
                # others.
                _Value(value, mask if value.dtype != var.aval.dtype else 0)
                for value, var in zip(results, eqn.outvars, strict=True)
            ]
        results = alone(jaxpr, eqn, [operand.value for operand in given])
        own = results if is_wide else _own(eqn, given) or results
        return [
            _Value(value, 0, with_64 if with_64.dtype != value.dtype else None)
            for value, with_64 in zip(results, own, strict=True)
        ]

    def _fitted(self, eqn: Any, given: list[_Value]) -> list[_Value]:
        """Converts the operands of an equation: those that must have the dtype of a
        wide operand are widened, and wide operands of an operation that is not
        supported are narrowed to 32 bits."""
        # Operands of a sort may have any dtypes, each its own.
        if eqn.primitive.name == "sort":
            return given
        together = _together(eqn)
        others = [n for n in range(len(given)) if n not in together]
        fitted = list(given)
        by_ids = eqn.primitive.name in _POSITIONS
        by_ids = by_ids and any(given[n].mask for n in others)
        has_own = by_ids and all(given[n].own is not None for n in together)
        if has_own or any(given[n].mask for n in together):
            for n in together:
                fitted[n] = self._widened(given[n])
        if by_ids:
            for n in others:
                fitted[n] = self._widened(given[n])
            return fitted
        for n in others:
            fitted[n] = self._narrowed(given[n], eqn)
        return fitted

    def _widened(self, given: _Value) -> _Value:
        value, mask, own = given
        if own is not None:
            return _Value(own, mask)
        dtype = _WIDE.get(np.dtype(jnp.asarray(value).dtype).name)
        return _Value(value if dtype is None else jnp.asarray(value, dtype), mask)

    def _narrowed(self, given: _Value, eqn: Any) -> _Value:
        value, mask, _ = given
        if not mask:
            return given
        # The innermost line that is known, else that of the call around it.
        where = written_at(eqn, *reversed(self._calls))
        self.narrowed.append((mask, f"through {eqn.primitive.name!r} at {where}"))
        # The dtype of the trace; `require_fitting` checks the value before the step
        # runs.
        narrow = np.int32 if value.dtype == np.int64 else np.uint32
        return _Value(value.astype(narrow))


def _number(value: Any) -> _Value:
    """Returns a constant of the program as a `_Value`."""
    dtype = getattr(value, "dtype", None)
    is_int32 = dtype is not None and dtype == np.int32
    return _Value(value, 0, jnp.asarray(value, np.int64) if is_int32 else None)


def _is_int32(var: Any) -> bool:
    return bool(getattr(var.aval, "dtype", None) == np.int32)


def _together(eqn: Any) -> Collection[int]:
    """Returns the indices of the operands of a supported operation that must have one
    dtype, which may be wide."""
    name = eqn.primitive.name
    if name in _TOGETHER:
        return range(len(eqn.invars))
    if name == "select_n":
        return range(1, len(eqn.invars))
    if name in _FIRST:
        return (0,)
    return _WRITES.get(name, ())


def _bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates a supported operation whose operands are wide."""
    params = dict(eqn.params)
    if eqn.primitive.name == "convert_element_type":
        before, after = eqn.invars[0].aval.dtype, np.dtype(params["new_dtype"])
        # To unsigned ones of 32 bits on purpose, as hashes do. To signed ones of 64, as
        # the trace has no other int64.
        if after == before or after == np.int32:
            params["new_dtype"] = _WIDE.get(after.name, after)
    elif eqn.primitive.name == "dot_general":
        wanted = params["preferred_element_type"]
        if wanted is not None:
            wanted = _WIDE.get(np.dtype(wanted).name, wanted)
        params["preferred_element_type"] = wanted
    elif eqn.primitive.name == "gather" and values[0].dtype == np.int64:
        if params["fill_value"] == np.iinfo(np.int32).min:  # of what is outside
            params["fill_value"] = np.iinfo(np.int64).min
    elif eqn.primitive.name in _SCATTERS:
        for name in ("update_jaxpr", "update_consts"):  # for 32 bits
            params.pop(name, None)
        return [_SCATTERS[eqn.primitive.name](*values, **params)]
    results = eqn.primitive.bind(*values, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _own(eqn: Any, given: Sequence[_Value]) -> list[Any] | None:
    """Evaluates with 64 bits an operation on numbers that the step makes itself;
    returns None if the operation is not supported."""
    if not any(map(_is_int32, eqn.outvars)):
        return None
    name, values = eqn.primitive.name, [operand.value for operand in given]
    if name == "iota":
        return [eqn.primitive.bind(*values, **{**eqn.params, "dtype": np.dtype("i8")})]
    together = _together(eqn)
    if name == "convert_element_type" and eqn.invars[0].aval.dtype.name in _CONTAINED:
        return _bound(eqn, values)
    if not together or any(given[place].own is None for place in together):
        return None
    for place in together:
        values[place] = given[place].own
    return _bound(eqn, values)


def evaluator(
    wide: Collection[int], made: list[tuple[Widened, list[int]]] | None = None
) -> Evaluate:
    """Returns an ``evaluate`` argument for `Flow.part`, for a program in which these
    inputs have 64 bits. The list ``made`` receives the parts, each with the numbers of
    its inputs."""

    def evaluate(closed: ClosedJaxpr, numbers: list[int]) -> Widened:
        places = [place for place, number in enumerate(numbers) if number in wide]
        part = Widened(closed, places)
        if made is not None:
            made.append((part, numbers))
        return part

    return evaluate


def with_64_bits(
    run: Callable[..., Any], wide: Collection[int]
) -> Callable[[Sequence[Any], Any], Any]:
    """Returns a function that calls ``run(given, blocks)`` with 64 bits switched on; of
    ``given``, only the arrays with the numbers ``wide`` keep 64 bits."""

    def call(given: Sequence[Any], blocks: Any) -> Any:
        known = [
            _widest(value) if number in wide else _as_traced(value)
            for number, value in enumerate(given)
        ]
        with jax.enable_x64(True):
            return run(known, blocks)

    return call


def _widest(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(_WIDE.get(array.dtype.name, array.dtype), copy=False)


def _as_traced(value: Any) -> Any:
    if not isinstance(value, np.ndarray | np.generic):
        return value
    return np.asarray(value, jax.dtypes.canonicalize_dtype(value.dtype))


class WideLeaves(NamedTuple):
    """Leaves of arguments and elements from which ids of hash tables are computed.
    ``used`` keep their 64 bits, except in operations that take 32 bits: leaves in
    ``narrowed``, each with the operation's line, must fit 32 bits; so must those in
    ``returned``, which jax returns with 32 bits."""

    used: frozenset[int] = frozenset()
    narrowed: Mapping[int, str] = MappingProxyType({})
    returned: frozenset[int] = frozenset()


def wide_leaves_of(
    closed: ClosedJaxpr,
    ids: Sequence[int],
    others: Sequence[int],
    wide: Collection[int],
) -> WideLeaves:
    """Finds the leaves of a program that keep 64 bits.

    Args:
        ids: The outputs that are ids of hash tables.
        others: All other outputs.
        wide: Inputs of 64 bits.
    """
    flow = Flow(closed)
    used = flow.inputs_of(ids)
    chosen = frozenset(number for number in wide if used >> number & 1)
    if not chosen:
        return WideLeaves()
    narrowed: dict[int, str] = {}
    returned: set[int] = set()
    # Two programs run at a step: that of the ids, and that of all else with its
    # effects.
    for outputs, effects in ((ids, False), (others, True)):
        made: list[tuple[Widened, list[int]]] = []
        evaluate = evaluator(chosen, made)
        part, needed = flow.part(outputs, with_effects=effects, evaluate=evaluate)
        kinds = [closed.jaxpr.invars[number].aval for number in needed]
        given = [
            _kind(kind, number in chosen)
            for kind, number in zip(kinds, needed, strict=True)
        ]
        # For what the parts note while they are traced; nothing is computed.
        with jax.enable_x64(True):
            jax.eval_shape(part, *given)
        for program, numbers in made:
            for mask, where in program.narrowed:
                for at, n in enumerate(numbers):
                    if mask >> at & 1:
                        narrowed.setdefault(n, where)
            if effects:
                returned.update(
                    n for at, n in enumerate(numbers) if program.returned >> at & 1
                )
    return WideLeaves(chosen, narrowed, frozenset(returned))


def _kind(aval: Any, is_wide: bool) -> Any:
    made: Any = jax.ShapeDtypeStruct  # untyped
    return made(aval.shape, _WIDE[aval.dtype.name] if is_wide else aval.dtype)
