"""Where the collectives of a traced program are, and how they come to its top level.

A program is cut between its equations, so a collective inside of one cannot be a cut. A
function that jax calls once (an inner ``jax.jit``, ``jax.checkpoint``) is written out
in place of its call, if it has collectives in it; a loop or a branch cannot be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from . import _refusals
from ._cross import Channel, crossing
from ._flow import inside

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def channels_of(closed: Any) -> list[Channel]:
    """The processes that the program has collectives with, anywhere in it."""
    return list(dict.fromkeys(_channels(closed.jaxpr)))


def crosses(eqn: Any) -> bool:
    """Whether the equation is a collective."""
    return eqn.primitive is crossing


def opened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with every call that contains a collective replaced by its body.

    Raises:
        RuntimeError: A collective is inside a loop or a branch.
    """
    if not any(_has_crossing_inside(eqn) for eqn in closed.jaxpr.eqns):
        return closed

    def program(*given: Any) -> list[Any]:
        return _evaluated(closed.jaxpr, closed.consts, given)

    made: Any = jax.ShapeDtypeStruct  # untyped
    kinds = [
        made(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in closed.in_avals
    ]
    return jax.make_jaxpr(program)(*kinds)


def _evaluated(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, given, strict=True))

    def value(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else known[var]

    for eqn in jaxpr.eqns:
        operands = [value(var) for var in eqn.invars]
        if _has_crossing_inside(eqn):
            inner = inside(eqn)
            if inner is None or eqn.primitive.name == "shard_map":
                raise _refusals.collective_inside(_where(eqn))
            results = _evaluated(inner, _consts_of(eqn), operands)
        else:
            results = _one(jaxpr, eqn, operands)
        known.update(zip(eqn.outvars, results, strict=True))
    return [value(var) for var in jaxpr.outvars]


def _one(jaxpr: Any, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation."""
    if crosses(eqn):
        found: list[Any] = crossing.bind(*operands, **eqn.params)
        return found
    read = {
        var: x
        for var, x in zip(eqn.invars, operands, strict=True)
        if not isinstance(var, Literal)
    }
    part = jaxpr.replace(
        constvars=[],
        invars=list(read),
        outvars=list(eqn.outvars),
        eqns=[eqn],
        effects=eqn.effects,
    )
    return list(jaxpr_as_fun(ClosedJaxpr(part, []))(*read.values()))


def _consts_of(eqn: Any) -> Sequence[Any]:
    found = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return found.consts if isinstance(found, ClosedJaxpr) else ()


def _where(eqn: Any) -> str:
    for inner in _jaxprs(eqn):
        for other in inner.eqns:
            if crosses(other):
                return str(other.params["where"])
            if _has_crossing_inside(other):
                return _where(other)
    raise AssertionError("there is no collective inside")


def _channels(jaxpr: Any) -> Iterator[Channel]:
    for eqn in jaxpr.eqns:
        if crosses(eqn):
            yield eqn.params["channel"]
        for inner in _jaxprs(eqn):
            yield from _channels(inner)


def _has_crossing(jaxpr: Any) -> bool:
    return any(crosses(eqn) or _has_crossing_inside(eqn) for eqn in jaxpr.eqns)


def _has_crossing_inside(eqn: Any) -> bool:
    return any(_has_crossing(inner) for inner in _jaxprs(eqn))


def _jaxprs(eqn: Any) -> list[Any]:
    """The programs among the parameters of an equation, as a branch has several."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found
