"""The program of an optimizer, and the part of a program that computes some values.

Programs here are *flat*: calls of inner functions (``jax.jit``, custom derivatives,
``jax.checkpoint``) are inlined, because an optimizer is not differentiated. Branches
and loops stay.
"""

from __future__ import annotations

import functools
import heapq
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun, no_effects

from zstrat.jaxprs import (
    CALLS,
    alone,
    evaluated,
    inner_call,
    masks,
    masks_through,
    operands_of,
    union_of,
    value_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_MACHINERY: Final = (
    os.path.dirname(jax.__file__),
    os.path.dirname(os.path.dirname(__file__)),
)
"""Folders of packages that contain no transformations: jax, and this project."""
_INSIDE: Final = frozenset({"cond", "scan", "while"})
"""Primitives of equations whose outputs may each depend on some of the operands
only."""


def flat(
    function: Callable[..., Sequence[Any]], arguments: Sequence[Any], *, selects: bool
) -> ClosedJaxpr:
    """Makes the flat program of a function of arrays that returns arrays.

    Args:
        arguments: Arrays, or their shapes and dtypes.
        selects: All branches are computed and one result is selected, so that values
            inside of a branch can be computed somewhere else.
    """
    closed = jax.make_jaxpr(function)(*arguments)

    # A second trace evaluates the first one, with inner calls inlined.
    def inlined(*given: Any) -> list[Any]:
        return _inlined(closed.jaxpr, closed.consts, given, selects)

    return jax.make_jaxpr(inlined)(*closed.in_avals)


def who_wrote(
    function: Callable[..., Sequence[Any]],
    arguments: Sequence[Any],
    brings: Callable[[Any, Mapping[Any, int]], bool],
) -> str:
    """Returns the name of the library function (``clip_by_global_norm``) that made the
    first equation for which ``brings`` is true; "" if it cannot be found.

    Args:
        brings: Called with each equation, and with the inputs that each variable
            depends on.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    inputs = [1 << n for n in range(len(closed.jaxpr.invars))]
    by_variable = masks(closed.jaxpr, inputs)
    for eqn in closed.jaxpr.eqns:
        if brings(eqn, by_variable):
            return _written_in(eqn)
    return ""


def _written_in(eqn: Any) -> str:
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    names = [f.function_name for f in frames if not f.file_name.startswith(_MACHINERY)]
    # A transformation is a pair of functions within one that makes them, or methods.
    within = [name for name in names if ".<locals>." in name]
    candidates = within or [name for name in names if "." in name]
    return str(candidates[0]).partition(".")[0] if candidates else ""


Makers = dict[Any, tuple[int, Any]]
"""For each variable, the number and the equation of the program that computes it."""


def _makers_in(jaxpr: Any) -> Makers:
    equations = enumerate(jaxpr.eqns)
    return {var: (at, eqn) for at, eqn in equations for var in eqn.outvars}


@dataclass(frozen=True)
class TreeProgram:
    """A flat program, and the inputs that each of its variables depends on.

    The inputs of the program are, in this order: gradients, values, leaves of the
    state, further arguments; ``counts`` has the number of each kind. ``mask`` has the
    set of inputs, as bits, that each variable depends on.
    """

    closed: Any
    counts: tuple[int, int, int, int]
    mask: Mapping[Any, int]

    @staticmethod
    def of(closed: Any, counts: tuple[int, int, int, int]) -> TreeProgram:
        """Analyses a program, whose inputs of each kind are ``counts`` many."""
        inputs = len(closed.jaxpr.invars)
        by_input = masks(closed.jaxpr, [1 << n for n in range(inputs)])
        return TreeProgram(closed, counts, by_input)

    @functools.cached_property
    def inputs(self) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """The inputs of the program: gradients, values, state, further arguments."""
        left = iter(self.closed.jaxpr.invars)
        g, v, s, x = ([next(left) for _ in range(n)] for n in self.counts)
        return g, v, s, x

    @functools.cached_property
    def outputs(self) -> list[Any]:
        """The outputs of the program: for ``update``, the new values and then the new
        state."""
        return list(self.closed.jaxpr.outvars)

    @functools.cached_property
    def makers(self) -> Makers:
        """The equation that computes each variable, and its number."""
        return _makers_in(self.closed.jaxpr)

    @property
    def acts(self) -> str:
        """The primitive by which the program has a side effect (a callback); "" if it
        has none."""
        callbacks = [n for n in primitives(self.closed.jaxpr) if "callback" in n]
        return (
            callbacks[0] if callbacks else ("an effect" if self.closed.effects else "")
        )


class ProgramPart:
    """The equations of a flat program that are needed to compute some variables from
    others.

    Args:
        available: Variables whose values are given; the equations that compute these
            are left out.
        makers: The equation of each variable of the program (`TreeProgram.makers`), if
            already known.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        wanted: Sequence[Any],
        available: Iterable[Any],
        makers: Makers | None = None,
    ) -> None:
        jaxpr: Any = closed.jaxpr
        self._wanted = list(wanted)
        self._consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._jaxpr = jaxpr
        given = {*available, *self._consts}
        needed = {v for v in wanted if not isinstance(v, Literal)} - given
        makers = _makers_in(jaxpr) if makers is None else makers
        self._eqns: list[Any] = []
        # From the last one back: those alone that are needed, as trees are large.
        seen = {-makers[var][0] for var in needed if var in makers}
        left = list(seen)
        heapq.heapify(left)
        while left:
            eqn = jaxpr.eqns[-heapq.heappop(left)]
            self._eqns.append((eqn, [var in needed for var in eqn.outvars]))
            for number, var in enumerate(eqn.outvars):
                if var not in needed:
                    continue
                for before in {*operands_of(eqn, number)} - given:
                    needed.add(before)
                    # Positive: an input, which no equation makes.
                    place = -makers[before][0] if before in makers else 1
                    if place <= 0 and place not in seen:
                        seen.add(place)
                        heapq.heappush(left, place)
        self._eqns.reverse()
        computed = {var for eqn, _ in self._eqns for var in eqn.outvars}
        self.missing = needed - computed
        """Inputs of the program that the part needs and that are not available."""

    def closed(self, inputs: Sequence[Any]) -> ClosedJaxpr | None:
        """Returns the part as a program that takes the variables ``inputs``, without
        tracing it; None if it needs some outputs of a branch or loop, but not all."""
        for eqn, needs in self._eqns:
            if eqn.primitive.name in _INSIDE and not all(needs):
                return None
        read = [v for eqn, _ in self._eqns for v in eqn.invars] + self._wanted
        used = {v for v in read if not isinstance(v, Literal) and v in self._consts}
        # Only those that are read: a program keeps its constants alive.
        constvars = [var for var in self._consts if var in used]
        effects = set(no_effects).union(*[eqn.effects for eqn, _ in self._eqns])
        pruned = self._jaxpr.replace(
            constvars=constvars,
            invars=list(inputs),
            outvars=self._wanted,
            eqns=[eqn for eqn, _ in self._eqns],
            effects=effects,
        )
        return ClosedJaxpr(pruned, [self._consts[var] for var in constvars])

    def run(self, known: Mapping[Any, Any]) -> list[Any]:
        """Computes the values of the wanted variables; ``known`` has the values of the
        available ones."""
        env = {**self._consts, **known}
        for eqn, needs in self._eqns:
            outputs = _run_part(self._jaxpr, eqn, needs, env)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [value_in(env, var) for var in self._wanted]


def form_of(closed: ClosedJaxpr) -> tuple[Any, ...]:
    """Returns a hashable value that is equal for two programs if they differ only in
    the names of their variables. Programs with parameters that cannot be compared are
    never equal."""
    jaxpr: Any = closed.jaxpr
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    numbers = {var: number for number, var in enumerate(inputs)}

    def place(var: Any) -> Any:
        if isinstance(var, Literal):
            return var.aval, np.asarray(var.val).tobytes()
        return numbers[var]

    equations: list[Any] = []
    for eqn in jaxpr.eqns:
        params = [(name, comparable(eqn.params[name])) for name in sorted(eqn.params)]
        equations.append((eqn.primitive, *map(place, eqn.invars), *params))
        for var in eqn.outvars:
            numbers[var] = len(numbers)
    # The values of one tree's constants are the same objects for all of its leaves.
    consts = [id(const) for const in closed.consts]
    avals = [var.aval for var in inputs]
    return (*consts, *avals, *equations, *map(place, jaxpr.outvars))


def comparable(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return form_of(value)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return tuple(map(comparable, value))
    try:
        hash(value)
    except TypeError:
        return object()
    return value


def constant(value: Any) -> np.ndarray:
    """Returns a constant of a program as a numpy array; for a key of ``jax.random``,
    its integers."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def primitives(jaxpr: Any) -> Iterable[str]:
    """Yields the names of all primitives of a program and of its inner programs."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for parameter in jax.tree.leaves(list(eqn.params.values())):
            inner = parameter.jaxpr if isinstance(parameter, ClosedJaxpr) else parameter
            if isinstance(inner, Jaxpr):
                yield from primitives(inner)


def _bound(jaxpr: Any, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    if eqn.primitive.name in CALLS:
        return alone(jaxpr, eqn, operands)
    outputs = eqn.primitive.bind(*operands, **eqn.params)
    return outputs if eqn.primitive.multiple_results else [outputs]


def _inlined(
    jaxpr: Any, consts: Sequence[Any], given: Sequence[Any], selects: bool
) -> list[Any]:
    def compute(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        call = inner_call(eqn)
        if call is not None:
            return _inlined(*call, operands, selects)
        if selects and eqn.primitive.name == "cond":
            return _selected(eqn, operands)
        return _bound(jaxpr, eqn, operands)

    return evaluated(jaxpr, consts, given, compute)


def _selected(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    index, *rest = operands
    branches = eqn.params["branches"]
    by_branch = [_inlined(b.jaxpr, b.consts, rest, selects=True) for b in branches]
    # As `jax.lax.switch` does with an index that is out of bounds.
    which = jnp.clip(index, 0, len(branches) - 1)
    if len(branches) == 2:
        which = which.astype(bool)
    return [
        jax.lax.select_n(which, *several) for several in zip(*by_branch, strict=True)
    ]


def _run_part(
    jaxpr: Any, eqn: Any, needs: Sequence[bool], env: Mapping[Any, Any]
) -> list[Any]:
    # Loops run as a whole, with zeros for what only unwanted outputs depend on.
    if all(needs) or eqn.primitive.name != "cond":
        operands = [
            value_in(env, var)
            if isinstance(var, Literal) or var in env
            else _zeros(var)
            for var in eqn.invars
        ]
        return list(_bound(jaxpr, eqn, operands))
    wanted = [n for n, is_needed in enumerate(needs) if is_needed]
    bits = masks_through(eqn, [1 << n for n in range(len(eqn.invars))])
    used = union_of(bits[number] for number in wanted)
    # 0 is the index of the branch.
    places = [n for n in range(1, len(eqn.invars)) if used >> n & 1]
    branches = [_branch(each, wanted, places) for each in eqn.params["branches"]]
    given = [value_in(env, eqn.invars[n]) for n in places]
    results = iter(jax.lax.switch(value_in(env, eqn.invars[0]), branches, *given))
    return [next(results) if is_needed else None for is_needed in needs]


def _branch(
    branch: ClosedJaxpr, wanted: Sequence[int], places: Sequence[int]
) -> Callable[..., list[Any]]:
    # Of a call inside, too, it may be some outputs alone that are wanted.
    inlined = flat(jaxpr_as_fun(branch), branch.in_avals, selects=False)
    jaxpr: Any = inlined.jaxpr
    available = [jaxpr.invars[n - 1] for n in places]
    part = ProgramPart(inlined, [jaxpr.outvars[n] for n in wanted], available)

    def run(*given: Any) -> list[Any]:
        return part.run(dict(zip(available, given, strict=True)))

    return run


def _zeros(var: Any) -> Any:
    """Returns zeros for a variable that no wanted output depends on."""
    return jnp.zeros(var.aval.shape, var.aval.dtype)
