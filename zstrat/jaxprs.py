"""Reads and evaluates jaxprs, the programs that jax traces: equations in order, each
with the variables that it reads and computes.

A function that jax compiles by itself (an inner ``jax.jit``, a custom derivative,
``jax.checkpoint``) is one equation with a jaxpr inside. Branches and loops have jaxprs,
too; their outputs are analysed one by one, because through one ``cond`` different
outputs may depend on different inputs. Any other equation is opaque: each of its
outputs depends on all of its operands.

Law of the file: a set of inputs is represented by the bits of one integer.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, Final

from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

CALLS: Final = frozenset(
    {
        "jit", "pjit", "closed_call", "core_call", "custom_jvp_call",
        "custom_vjp_call", "custom_vjp_call_jaxpr", "checkpoint", "remat", "remat2",
    }
)  # fmt: skip
"""Primitives whose equations run their inner jaxpr once, on the operands of the
equation."""

_ENTERED: Final = CALLS | {"shard_map"}
"""Primitives whose inner jaxpr says which inputs each output depends on; that of a
``shard_map`` has other shapes than its equation."""


def inner_call(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """Returns the inner jaxpr and its constants, if the equation is a call that runs it
    once; otherwise None."""
    return _inner(eqn) if eqn.primitive.name in CALLS else None


def entered(eqn: Any) -> Any:
    """Returns the inner jaxpr that an equation runs once, on parts of its operands or
    on the operands themselves; None if there is none."""
    inner = _inner(eqn) if eqn.primitive.name in _ENTERED else None
    return None if inner is None else inner[0]


def _inner(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    # Both names occur, by the kind of the call.
    parameter = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if isinstance(parameter, ClosedJaxpr):
        inner, consts = parameter.jaxpr, parameter.consts
    else:
        inner, consts = parameter, ()
    # If they do not match one by one, the equation stays as it is.
    if inner is None or len(inner.invars) != len(eqn.invars):
        return None
    return (inner, consts) if len(inner.outvars) == len(eqn.outvars) else None


def evaluated(
    jaxpr: Any,
    consts: Sequence[Any],
    given: Sequence[Any],
    compute: Callable[[Any, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Evaluates a jaxpr equation by equation; ``compute`` returns the results of an
    equation from its operands."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        results = compute(eqn, [value_in(env, var) for var in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [value_in(env, var) for var in jaxpr.outvars]


def value_in(env: Mapping[Any, Any], var: Any) -> Any:
    return var.val if isinstance(var, Literal) else env[var]


def alone(jaxpr: Any, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Computes the results of one equation of a jaxpr from its operands, as jax
    evaluates it: how the functions of a call are bound is jax's own."""
    given = {
        var: operand
        for var, operand in zip(eqn.invars, operands, strict=True)
        if not isinstance(var, Literal)
    }
    part = jaxpr.replace(
        constvars=[],
        invars=list(given),
        outvars=list(eqn.outvars),
        eqns=[eqn],
        effects=eqn.effects,
    )
    return list(jaxpr_as_fun(ClosedJaxpr(part, ()))(*given.values()))


def masks(jaxpr: Any, given: Sequence[int]) -> dict[Any, int]:
    """Returns, for each variable of a program, the set of inputs that it depends on, as
    bits; ``given`` has the sets of the program's own inputs."""
    result: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        through = masks_through(eqn, [mask_of(result, var) for var in eqn.invars])
        result.update(zip(eqn.outvars, through, strict=True))
    return result


def mask_of(found: Mapping[Any, int], var: Any) -> int:
    """Returns the set of inputs, as bits, that a variable depends on; a literal depends
    on none."""
    return 0 if isinstance(var, Literal) else found.get(var, 0)


def mask_of_all(found: Mapping[Any, int], variables: Iterable[Any]) -> int:
    """Returns the set of inputs, as bits, that any of the variables depends on."""
    return union_of(mask_of(found, var) for var in variables)


def union_of(sets: Iterable[int]) -> int:
    """Returns the union of several sets of inputs, as bits."""
    return functools.reduce(operator.or_, sets, 0)


def bits_of(inputs: int) -> Iterator[int]:
    """Yields the numbers of the inputs in a set, in time proportional to how many they
    are: a large tree has thousands of inputs, and most sets have few."""
    while inputs:
        lowest = inputs & -inputs
        yield lowest.bit_length() - 1
        inputs ^= lowest


def operands_of(eqn: Any, output: int) -> list[Any]:
    """Returns the operands of an equation on which its output number ``output``
    depends."""
    bits = masks_through(eqn, [1 << n for n in range(len(eqn.invars))])[output]
    used = [var for n, var in enumerate(eqn.invars) if bits >> n & 1]
    return [var for var in used if not isinstance(var, Literal)]


def masks_through(eqn: Any, given: Sequence[int]) -> list[int]:
    """Returns, for each output of an equation, the set of inputs it depends on, as
    bits; ``given`` has the sets of its operands."""
    if (inner := entered(eqn)) is not None:
        return _outputs(inner, given)
    match eqn.primitive.name:
        case "cond":
            return _through_cond(eqn, given)
        case "scan":
            return _through_scan(eqn, given)
        case "while":
            return _through_while(eqn, given)
    return [union_of(given)] * len(eqn.outvars)


def _outputs(jaxpr: Any, given: Sequence[int]) -> list[int]:
    by_variable = masks(jaxpr, given)
    return [mask_of(by_variable, var) for var in jaxpr.outvars]


def _through_cond(eqn: Any, given: Sequence[int]) -> list[int]:
    index, *rest = given
    result = [index] * len(eqn.outvars)
    for branch in eqn.params["branches"]:
        inside = _outputs(branch.jaxpr, rest)
        result = [one | other for one, other in zip(result, inside, strict=True)]
    return result


def _through_scan(eqn: Any, given: Sequence[int]) -> list[int]:
    body = eqn.params["jaxpr"].jaxpr
    # How many of each kind there are is said by parameters that not every jax has.
    rows = sum(map(_is_scanned, eqn.invars, body.invars))
    carries = len(eqn.outvars) - sum(map(_is_scanned, eqn.outvars, body.outvars))
    consts = len(given) - rows - carries
    fixed, carry = list(given[:consts]), list(given[consts : consts + carries])
    slices = list(given[consts + carries :])
    # Until nothing changes: each round passes on what one carry has from another.
    while True:
        outputs = _outputs(body, [*fixed, *carry, *slices])
        after = [old | new for old, new in zip(carry, outputs, strict=False)]
        if after == carry:
            return [*carry, *outputs[carries:]]
        carry = after


def _is_scanned(outside: Any, inside: Any) -> bool:
    """Returns whether a scan passes slices of a variable to its body: then the variable
    has one more axis outside than inside."""
    return bool(outside.aval.ndim > inside.aval.ndim)


def _through_while(eqn: Any, given: Sequence[int]) -> list[int]:
    tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test = list(given[:tests])
    body, carry = list(given[tests : tests + bodies]), list(given[tests + bodies :])
    while True:
        (goes_on,) = _outputs(eqn.params["cond_jaxpr"].jaxpr, [*test, *carry])
        outputs = _outputs(eqn.params["body_jaxpr"].jaxpr, [*body, *carry])
        # How often the body runs depends on the test, and so does every carry.
        after = [o | n | goes_on for o, n in zip(carry, outputs, strict=True)]
        if after == carry:
            return carry
        carry = after
