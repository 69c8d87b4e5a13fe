"""A replica function of several devices, cut at what other processes take part in.

The devices of this process are mapped over inside of XLA, the other processes are met
outside of it. So the function is mapped in stages: each gives the operands of the next
collectives, which are equal on all devices, and what later stages need of it, one part
for each device.

Law of the file: each stage is cut from a trace of its own, in the map that it runs in.
All these traces are equal, so a number means the same value in each.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import jax

from zstrat.program.stages import crossing, stages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.program.stages import Stage


def in_stages(
    one: Callable[..., Any],
    mapped: Callable[..., Any],
    rows: Sequence[Any],
    shared: int,
    *,
    in_order: bool = False,
) -> Any:
    """``mapped(one, rows)``, with the collectives between processes outside of it; of
    ``in_order`` see `stages`.

    ``mapped(fn, own, whole)`` maps ``fn(values, shared, own)``: ``own`` are more arrays
    of which each device is given its part, ``whole`` more shared ones; ``shared`` is
    the number of those without them. What ``fn`` returns first has a part of each
    device, and may be given as ``own`` again; what it returns second is the same on
    all.
    """
    # Values by number: those of which each device has its own, and the others.
    own: dict[int, Any] = {}
    whole: dict[int, Any] = {}
    stage: _StagePart
    number = 0

    def part(values: Any, everywhere: Any, mine: Any) -> Any:
        nonlocal stage
        fixed = len(mine) - len(own)
        args = values, everywhere[:shared], mine[:fixed]
        stage = _StagePart.of(one, args, number, in_order)
        known = dict(zip(own, mine[fixed:], strict=True))
        known.update(zip(whole, everywhere[shared:], strict=True))
        return stage.run(known)

    while True:
        given = [*rows, *own.values()], list(whole.values())
        parts, alike = mapped(part, *given)
        if stage.is_last:
            return parts, stage.operands(alike)
        own.update(zip(stage.left, parts, strict=True))
        left = iter(alike)
        for each in stage.stage.crossings:
            results = crossing.bind(
                *itertools.islice(left, len(each.operands)),
                channel=each.channel,
                kind=each.kind,
                where=each.where,
            )
            whole.update(zip(each.results, results, strict=True))
        number += 1


class _StagePart:
    """One stage, in the map that it runs in."""

    def __init__(
        self, stages: Sequence[Stage], number: int, store: dict[int, Any], shape: Any
    ) -> None:
        self.stage = stages[number]
        self.is_last = number == len(stages) - 1
        later = [n for other in stages[number + 1 :] for n in other.takes]
        later += [
            n
            for other in stages[number + 1 :]
            for crossed in other.crossings
            for n in crossed.operands
        ]
        self.left = [] if self.is_last else sorted({*self.stage.gives} & {*later})
        self._store = store
        self._shape = shape

    @staticmethod
    def of(
        one: Callable[..., Any], args: Any, number: int, in_order: bool
    ) -> _StagePart:
        """Traces the function and cuts this stage out."""
        closed, shape = jax.make_jaxpr(one, return_shape=True)(*args)
        cut, constants = stages(closed, in_order=in_order)
        store = dict(enumerate(jax.tree.leaves(args)))
        store.update(constants)
        return _StagePart(cut, number, store, shape)

    def run(self, known: dict[int, Any]) -> tuple[list[Any], list[Any]]:
        """What each device has of its own, and what is the same on all: at the end
        results and operands of updates, before it what is left and the operands of
        collectives."""
        store = self._store | known
        made = self.stage.run(*[store[n] for n in self.stage.takes])
        if self.is_last:
            results = len(self._shape[0])
            return list(made[:results]), list(made[results:])
        store.update(zip(self.stage.gives, made, strict=True))
        operands = [n for x in self.stage.crossings for n in x.operands]
        return [store[n] for n in self.left], [store[n] for n in operands]

    def operands(self, arrays: Sequence[Any]) -> Any:
        """The operands of each update, made of the arrays that the last stage gave."""
        treedef: Any = jax.tree.structure(self._shape[1])
        return treedef.unflatten(list(arrays))
