"""Evaluates a traced program with integers of 64 bits where jax has traced 32.

Ids of a table of any id have 64 bits, and jax without ``jax_enable_x64`` traces a step
with 32. So what a step computes with such ids (a reshape, a slice, `where`, arithmetic,
a comparison) is evaluated from the same trace once more: wide inputs stay wide, and so
is what is computed from them, as jax would have it with 64 bits. All other values keep
the dtypes of the trace. An operation that is not known here gets 32 bits, and the
inputs that it depends on are `Widened.narrowed`: they have to fit.

The evaluation itself runs where 64 bits are switched on, as `jax.enable_x64` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, no_effects

from ._flow import Flow, inside

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_TOGETHER: Final = frozenset(
    {
        "abs", "add", "and", "clamp", "concatenate", "div", "eq", "ge", "gt",
        "integer_pow", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or",
        "pad", "rem", "shift_left", "shift_right_arithmetic", "shift_right_logical",
        "sign", "square", "stack", "sub", "xor",
    }
)  # fmt: skip
"""Operations whose integers have one dtype."""

_FIRST: Final = frozenset(
    {
        "argmax", "argmin", "broadcast_in_dim", "convert_element_type", "copy",
        "copy_p", "cummax", "cummin", "cumsum", "dynamic_slice", "expand_dims",
        "gather", "name", "reduce_max", "reduce_min", "reduce_sum", "reshape", "rev",
        "slice", "split", "squeeze", "stop_gradient", "tile", "transpose", "unstack",
    }
)  # fmt: skip
"""Operations whose first operand may be wide; the others are positions."""

_WIDE: Final = {"int32": np.dtype(np.int64), "uint32": np.dtype(np.uint64)}

Evaluate = Callable[[ClosedJaxpr, list[int]], Callable[..., Any]]

_Masked = tuple[Any, int]
"""A value, and the wide inputs that a wide one depends on, as bits; 0 if it is not."""


@final
class Widened:
    """A program whose inputs ``wide`` (numbers) have 64 bits; a wide output has them,
    too. To be traced."""

    def __init__(self, closed: ClosedJaxpr, wide: Collection[int]) -> None:
        self._closed, self._wide = closed, wide
        self.narrowed = 0
        """The wide inputs that operations get with 32 bits, as bits, as far as the
        program has been traced."""
        self.returned = 0
        """The wide inputs that outputs consist of, as bits."""

    def __call__(self, *inputs: Any) -> list[Any]:
        given = [
            (value, 1 << number if number in self._wide else 0)
            for number, value in enumerate(inputs)
        ]
        outputs = self._run(self._closed.jaxpr, self._closed.consts, given)
        for _, mask in outputs:
            self.returned |= mask
        return [value for value, _ in outputs]

    def _run(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Masked]
    ) -> list[_Masked]:
        known: dict[Any, _Masked] = dict(zip(jaxpr.invars, inputs, strict=True))
        known.update(
            (var, (c, 0)) for var, c in zip(jaxpr.constvars, consts, strict=True)
        )

        def of(var: Any) -> _Masked:
            return (var.val, 0) if isinstance(var, Literal) else known[var]

        for eqn in jaxpr.eqns:
            made = self._made(jaxpr, eqn, [of(var) for var in eqn.invars])
            known.update(zip(eqn.outvars, made, strict=True))
        return [of(var) for var in jaxpr.outvars]

    def _made(self, jaxpr: Any, eqn: Any, given: list[_Masked]) -> list[_Masked]:
        if not any(mask for _, mask in given):
            return [(value, 0) for value in _alone(jaxpr, eqn, given)]
        inner = inside(eqn)
        if inner is not None:
            program = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            consts = program.consts if isinstance(program, ClosedJaxpr) else ()
            return self._run(inner, consts, given)
        given = self._fitted(eqn, given)
        mask = 0
        for _, own in given:
            mask |= own
        if not mask:
            return [(value, 0) for value in _alone(jaxpr, eqn, given)]
        values = [value for value, _ in given]
        params = dict(eqn.params)
        if eqn.primitive.name == "convert_element_type":
            dtype = np.dtype(params["new_dtype"])
            params["new_dtype"] = _WIDE.get(dtype.name, dtype)
            if dtype != eqn.invars[0].aval.dtype:  # on purpose
                params["new_dtype"] = dtype
        made = eqn.primitive.bind(*values, **params)
        made = made if eqn.primitive.multiple_results else [made]
        return [
            (value, mask if value.dtype != var.aval.dtype else 0)
            for value, var in zip(made, eqn.outvars, strict=True)
        ]

    def _fitted(self, eqn: Any, given: list[_Masked]) -> list[_Masked]:
        """Gives the operands that belong to a wide one its dtype, and 32 bits to wide
        ones of an operation that is not known."""
        name = eqn.primitive.name
        if name in _TOGETHER:
            return [self._widened(*each) for each in given]
        if name == "select_n":
            which, *cases = given
            return [self._narrowed(*which), *[self._widened(*each) for each in cases]]
        if name == "sort":
            return given
        if name in ("dynamic_update_slice", "scatter"):
            # The array, and what is written to it: neighbours, or at both ends.
            at = (0, 1) if name == "dynamic_update_slice" else (0, 2)
            return [
                self._widened(*each) if place in at else self._narrowed(*each)
                for place, each in enumerate(given)
            ]
        if name in _FIRST:
            first, *others = given
            return [first, *[self._narrowed(*each) for each in others]]
        return [self._narrowed(*each) for each in given]

    def _widened(self, value: Any, mask: int) -> _Masked:
        dtype = _WIDE.get(np.dtype(jnp.asarray(value).dtype).name)
        return (value if dtype is None else jnp.asarray(value, dtype)), mask

    def _narrowed(self, value: Any, mask: int) -> _Masked:
        if not mask:
            return value, 0
        self.narrowed |= mask
        narrow = np.int32 if value.dtype == np.int64 else np.uint32
        return value.astype(narrow), 0


def _alone(jaxpr: Any, eqn: Any, given: Sequence[_Masked]) -> list[Any]:
    """Evaluates one equation with the dtypes of the trace."""
    invars, values = [], []
    for var, (value, _) in zip(eqn.invars, given, strict=True):
        if not isinstance(var, Literal) and var not in invars:
            invars.append(var)
            values.append(value)
    effects = set(no_effects).union(eqn.effects)
    program = jaxpr.replace(
        constvars=[], invars=invars, outvars=eqn.outvars, eqns=[eqn], effects=effects
    )
    return list(jaxpr_as_fun(ClosedJaxpr(program, []))(*values))


def evaluator(
    wide: Collection[int], made: list[tuple[Widened, list[int]]] | None = None
) -> Evaluate:
    """Returns what `Flow.part` evaluates with, if these inputs of the whole program
    have 64 bits. ``made`` gets the parts, with the numbers of their inputs."""

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
    """Returns a function that calls ``run(given, blocks)`` with 64 bits: of ``given``
    those that are ``wide`` keep them."""

    def call(given: Sequence[Any], blocks: Any) -> Any:
        known = [
            value if number in wide else _as_traced(value)
            for number, value in enumerate(given)
        ]
        with jax.enable_x64(True):
            return run(known, blocks)

    return call


def _as_traced(value: Any) -> Any:
    if not isinstance(value, np.ndarray | np.generic):
        return value
    return np.asarray(value, jax.dtypes.canonicalize_dtype(value.dtype))


class WideLeaves(NamedTuple):
    """Leaves of arguments and elements that ids of hashed tables are computed from:
    ``used`` keep their 64 bits, but for those that are ``narrowed`` somewhere, which
    have to fit 32, and those that are ``returned``, which jax returns with 32."""

    used: frozenset[int] = frozenset()
    narrowed: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()


def wide_leaves_of(
    closed: ClosedJaxpr,
    ids: Sequence[int],
    others: Sequence[int],
    wide: Collection[int],
) -> WideLeaves:
    """Finds the wide leaves of a program.

    Args:
        ids: The outputs that are ids of hashed tables.
        others: All outputs that leave the process otherwise.
        wide: Inputs of 64 bits.
    """
    flow = Flow(closed)
    used = flow.inputs_of(ids)
    chosen = frozenset(number for number in wide if used >> number & 1)
    if not chosen:
        return WideLeaves()
    narrowed: set[int] = set()
    returned: set[int] = set()
    for outputs, effects in ((ids, False), (others, True)):
        made: list[tuple[Widened, list[int]]] = []
        evaluate = evaluator(chosen, made)
        part, needed = flow.part(outputs, with_effects=effects, evaluate=evaluate)
        kinds = [closed.jaxpr.invars[number].aval for number in needed]
        given = [
            _kind(kind, number in chosen)
            for kind, number in zip(kinds, needed, strict=True)
        ]
        with jax.enable_x64(True):
            jax.eval_shape(part, *given)
        for program, numbers in made:
            narrowed.update(
                n for at, n in enumerate(numbers) if program.narrowed >> at & 1
            )
            if effects:
                returned.update(
                    n for at, n in enumerate(numbers) if program.returned >> at & 1
                )
    return WideLeaves(chosen, frozenset(narrowed), frozenset(returned))


def _kind(aval: Any, is_wide: bool) -> Any:
    made: Any = jax.ShapeDtypeStruct  # untyped
    return made(aval.shape, _WIDE[aval.dtype.name] if is_wide else aval.dtype)
