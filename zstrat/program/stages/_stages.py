"""Divides a traced program at its collectives, into stages that run one after the
other.

A program is jax's jaxpr: equations in order. Equations of `crossing` are collectives
between processes, which the host executes. A collective has *level* n if n others must
be done before its operands are known; collectives of one level are sent together. Stage
n computes the operands of the collectives of level n, and values for later stages that
can be computed already: nothing is computed twice. The last stage computes the results.

A program is divided between equations, so a collective inside of an equation must first
move to the top level. A function that jax calls once (an inner ``jax.jit``,
``jax.checkpoint``) is inlined if it has collectives; a loop or a branch cannot be.

The stage of an equation: not before the collectives that it depends on, and not after
the first stage that needs its outputs. Between the two it runs as late as possible if
it depends only on inputs of the program, which every stage has (an optimizer's decay of
its moments), and otherwise as early as possible: its outputs are usually smaller than
its operands (a loss, compared to activations).

Law of the file: values are represented by numbers of inputs and of outputs of
equations; no array is touched here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun, no_effects

from zstrat.jaxprs import alone, evaluated, inner_call
from zstrat.program.trace import _refusals

from ._cross import Channel, crossing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ._cross import CrossKind


def channels_of(closed: Any) -> list[Channel]:
    """Returns the channels of all collectives in a program."""
    return list(dict.fromkeys(_channels(closed.jaxpr)))


def crosses(eqn: Any) -> bool:
    """Returns whether the equation is a collective."""
    return eqn.primitive is crossing


def opened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inlines every call in a program that contains a collective.

    Raises:
        RuntimeError: A collective is inside a loop or a branch.
    """
    # Inlining traces the whole program once more, so only if it has to be.
    if not any(_has_crossing_inside(eqn) for eqn in closed.jaxpr.eqns):
        return closed

    def program(*given: Any) -> list[Any]:
        return _inlined(closed.jaxpr, closed.consts, given)

    made: Any = jax.ShapeDtypeStruct  # untyped
    # A weak type that became strong would be promoted otherwise.
    kinds = [
        made(aval.shape, aval.dtype, weak_type=aval.weak_type)
        for aval in closed.in_avals
    ]
    return jax.make_jaxpr(program)(*kinds)


def _inlined(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    def compute(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if crosses(eqn):  # it stays one equation, at which the program is cut
            return list(crossing.bind(*operands, **eqn.params))
        if not _has_crossing_inside(eqn):
            return alone(jaxpr, eqn, operands)
        if (call := inner_call(eqn)) is None:
            raise _refusals.collective_inside(_where(eqn))
        return _inlined(*call, operands)

    return evaluated(jaxpr, consts, given, compute)


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


def _has_crossing_inside(eqn: Any) -> bool:
    return any(
        crosses(other) or _has_crossing_inside(other)
        for inner in _jaxprs(eqn)
        for other in inner.eqns
    )


def _jaxprs(eqn: Any) -> list[Any]:
    """Returns the jaxprs in the parameters of an equation; a branch has several."""
    programs = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                programs.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                programs.append(item)
    return programs


@dataclass(frozen=True, slots=True)
class Crossing:
    """One collective, from the values with the numbers ``operands`` to those with the
    numbers ``results``; ``where`` is the user's line."""

    channel: Channel
    kind: CrossKind
    operands: tuple[int, ...]
    results: tuple[int, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a program: ``run`` computes the values with the numbers ``gives`` from
    those with the numbers ``takes``; then the collectives ``crossings`` are executed.
    In the last stage ``gives`` are the results of the program, numbered from 0."""

    run: Callable[..., Sequence[Any]]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    crossings: tuple[Crossing, ...]


def stages(
    closed: ClosedJaxpr, *, in_order: bool = False
) -> tuple[list[Stage], dict[int, Any]]:
    """Divides a program into stages; into one stage if it has no collectives.

    Also returns the constants among the operands of collectives, by number.
    ``in_order``: keep the order of all collectives, as if the program were not
    compiled.

    Raises:
        RuntimeError: A collective is inside a loop or a branch.
    """
    cut = _Cut(opened(closed), in_order)
    return cut.stages(), cut.constants


class _Cut:
    def __init__(self, closed: ClosedJaxpr, in_order: bool) -> None:
        self._closed = closed
        self._in_order = in_order
        self._jaxpr: Any = closed.jaxpr
        self._eqns: list[Any] = list(self._jaxpr.eqns)
        self._fixed = {*self._jaxpr.invars, *self._jaxpr.constvars}
        self._levels = self._ready()
        crossing_levels = [
            self._levels[n] for n, eqn in enumerate(self._eqns) if crosses(eqn)
        ]
        self._last = 1 + max(crossing_levels, default=-1)
        self._places = self._placed()
        numbered = [*self._jaxpr.invars]
        numbered += [var for eqn in self._eqns for var in eqn.outvars]
        self._numbers = {var: number for number, var in enumerate(numbered)}
        self.constants: dict[int, Any] = {}

    def stages(self) -> list[Stage]:
        return [self._stage(number) for number in range(self._last + 1)]

    def _stage(self, number: int) -> Stage:
        now: list[Any] = []
        later: list[Any] = []
        crossings: list[Any] = []
        for eqn, place in zip(self._eqns, self._places, strict=True):
            if place == number:
                (crossings if crosses(eqn) else now).append(eqn)
            elif place is not None and place > number:
                later.append(eqn)
        own = {var for eqn in now for var in eqn.outvars}
        if number == self._last:
            wanted = list(self._jaxpr.outvars)
            gives = tuple(range(len(wanted)))
        else:
            needed = [var for eqn in (*crossings, *later) for var in _read(eqn)]
            needed += [x for x in self._jaxpr.outvars if not isinstance(x, Literal)]
            wanted = [var for var in dict.fromkeys(needed) if var in own]
            gives = tuple([self._numbers[var] for var in wanted])
        takes = self._taken(now, own, wanted)
        effects = set(no_effects).union(*[eqn.effects for eqn in now])
        part = self._jaxpr.replace(
            invars=takes, outvars=wanted, eqns=now, effects=effects
        )
        run = jaxpr_as_fun(ClosedJaxpr(part, self._closed.consts))
        return Stage(
            run,
            tuple([self._numbers[var] for var in takes]),
            gives,
            tuple([self._crossing(eqn) for eqn in crossings]),
        )

    def _taken(
        self, eqns: Sequence[Any], own: set[Any], wanted: Sequence[Any]
    ) -> list[Any]:
        read = [var for eqn in eqns for var in _read(eqn)]
        read += [var for var in wanted if not isinstance(var, Literal)]
        fixed = set(self._jaxpr.constvars)
        return [v for v in dict.fromkeys(read) if v not in own and v not in fixed]

    def _crossing(self, eqn: Any) -> Crossing:
        return Crossing(
            eqn.params["channel"],
            eqn.params["kind"],
            tuple([self._number(var) for var in eqn.invars]),
            tuple([self._numbers[var] for var in eqn.outvars]),
            eqn.params["where"],
        )

    def _number(self, var: Any) -> int:
        if _is_var(var) and var in self._numbers:
            return self._numbers[var]
        # Constants among operands get numbers after those of all values.
        number = len(self._numbers) + len(self.constants)
        if _is_var(var):
            consts = zip(self._jaxpr.constvars, self._closed.consts, strict=True)
            self.constants[number] = next(x for v, x in consts if v is var)
        else:
            self.constants[number] = np.asarray(var.val, var.aval.dtype)
        return number

    def _ready(self) -> list[int]:
        """Returns the first stage in which each equation can run."""
        # Inputs and constants are there from the first stage on.
        known = dict.fromkeys(self._fixed, 0)
        levels: list[int] = []
        before = 0
        for eqn in self._eqns:
            level = max([known[var] for var in _read(eqn)], default=0)
            if self._in_order and crosses(eqn):
                before = level = max(level, before)
            levels.append(level)
            known.update(dict.fromkeys(eqn.outvars, level + crosses(eqn)))
        return levels

    def _due(self) -> list[int | None]:
        """Returns the first stage that needs the outputs of each equation; None if no
        stage does."""
        due: dict[Any, int] = {
            var: self._last for var in self._jaxpr.outvars if _is_var(var)
        }
        stages: list[int | None] = [None] * len(self._eqns)
        for n in reversed(range(len(self._eqns))):
            eqn = self._eqns[n]
            wanted = [due[var] for var in eqn.outvars if var in due]
            acts = bool(eqn.effects)
            if not wanted and not acts and not crosses(eqn):
                continue
            # The first reader decides; without one it is a collective, or has an
            # effect.
            stage = min(wanted, default=self._last)
            if crosses(eqn) or acts:
                # Also a collective whose result is not used: the other processes take
                # part in it.
                stage = self._levels[n]
            stages[n] = stage
            for var in _read(eqn):
                due[var] = min(due.get(var, stage), stage)
        return stages

    def _placed(self) -> list[int | None]:
        """Chooses the stage of each equation; None for an equation that no stage
        needs."""
        due = self._due()
        places: list[int | None] = []
        stage_of: dict[Any, int] = {}
        for n, eqn in enumerate(self._eqns):
            place = due[n]
            if place is not None:
                # Its operands are inputs, or are computed as late: nothing more has to
                # be handed over.
                is_free = all(
                    var in self._fixed or stage_of[var] >= place for var in _read(eqn)
                )
                if not is_free or self._levels[n] > 0:
                    place = self._levels[n]
                stage_of.update(dict.fromkeys(eqn.outvars, place))
            places.append(place)
        # One that runs late may be read by one that runs early.
        return self._before_readers(places)

    def _before_readers(self, places: list[int | None]) -> list[int | None]:
        """Moves equations to earlier stages, before those that read their outputs."""
        needed: dict[Any, int] = {}
        for n in reversed(range(len(self._eqns))):
            eqn, place = self._eqns[n], places[n]
            if place is None:
                continue
            place = min([place, *[needed.get(var, place) for var in eqn.outvars]])
            places[n] = place
            for var in _read(eqn):
                needed[var] = min(needed.get(var, place), place)
        return places


def _is_var(var: Any) -> bool:
    return not isinstance(var, Literal)


def _read(eqn: Any) -> list[Any]:
    return [var for var in eqn.invars if _is_var(var)]
