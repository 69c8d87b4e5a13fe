"""The program in a trace under made up values: those values become its inputs.

`Discovery` marks each value that it makes up. Where all of them were made at the level
of the trace itself, the equations that make them are left out, and what they made is
given from outside: so the body of a step runs once, and what it prints is printed once.
A value that was made up inside of a loop or a function that jax traces by itself stays
inside of an equation: then there is no such program, and the body is traced again.

Law of the file: an equation that is left out has made nothing but values that were made
up, of the seed alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, no_effects

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import jax


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A value that a trace has made up. ``name`` says of what: the same name twice is
    the same value."""

    name: Hashable
    value: jax.Array


@dataclass(frozen=True, slots=True)
class BodyProgram:
    """A body as a program of its inputs and of values by name.

    Args:
        closed: From the inputs and the values of ``names`` to the flat outputs.
        tree: That of the outputs.
    """

    closed: ClosedJaxpr
    names: tuple[Hashable, ...]
    tree: Any

    def kind_of(self, name: Hashable) -> Any:
        """Shape and dtype of the value of that name; None if it is not used."""
        if name not in self.names:
            return None
        place = self.names.index(name) - len(self.names)
        return self.closed.in_avals[place]

    def __call__(self, inputs: Sequence[Any], values: Mapping[Hashable, Any]) -> Any:
        """The outputs. Called in a trace of jax."""
        given = [values[name] for name in self.names]
        return self.tree.unflatten(jaxpr_as_fun(self.closed)(*inputs, *given))


def body_program(
    closed: ClosedJaxpr, made_up: Sequence[MadeUp], tree: Any
) -> BodyProgram | None:
    """The program; None if some value was made up inside of an equation.

    Args:
        closed: From a seed and the inputs to the outputs and, behind them, the values
            that were made up.
        tree: That of the outputs.
    """
    jaxpr: Any = closed.jaxpr
    count = len(jaxpr.outvars) - len(made_up)
    wanted, made = jaxpr.outvars[:count], jaxpr.outvars[count:]
    makers = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    if not all(not isinstance(var, Literal) and var in makers for var in made):
        return None
    given = set(made)
    left = [eqn for eqn in jaxpr.eqns if given.isdisjoint(eqn.outvars)]
    eqns = _without(jaxpr.invars[0], left, wanted)
    if eqns is None or len(given) < len(made):
        return None
    effects = set(no_effects).union(*[eqn.effects for eqn in eqns])
    cut = jaxpr.replace(
        invars=[*jaxpr.invars[1:], *made], outvars=wanted, eqns=eqns, effects=effects
    )
    names = tuple([each.name for each in made_up])
    return BodyProgram(ClosedJaxpr(cut, closed.consts), names, tree)


def _without(seed: Any, eqns: list[Any], wanted: Sequence[Any]) -> list[Any] | None:
    """The equations but for those that depend on the seed; None if one of these is
    needed, or has an effect."""
    tainted = {seed}
    for eqn in eqns:
        if any(not isinstance(x, Literal) and x in tainted for x in eqn.invars):
            tainted.update(eqn.outvars)
    needed = {x for x in wanted if not isinstance(x, Literal)}
    kept: list[Any] = []
    for eqn in reversed(eqns):
        is_tainted = not tainted.isdisjoint(eqn.outvars)
        if is_tainted and (eqn.effects or not needed.isdisjoint(eqn.outvars)):
            return None
        if not is_tainted:
            kept.append(eqn)
            needed.update(x for x in eqn.invars if not isinstance(x, Literal))
    return None if seed in needed else kept[::-1]
