"""The stages of a step as jax runs them.

Law of the file: the memory of what a step gives up is used by its last stage alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from ._compile import own

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._cross import Channel, CrossKind
    from ._stages import Crossing, Stage


@dataclass(frozen=True, slots=True)
class Compiled:
    """A stage as jax runs it: of the values ``given_up``, whose memory it may use, and
    ``kept``. ``dead`` are values that nobody needs after it."""

    stage: Stage
    run: Any
    given_up: tuple[int, ...]
    kept: tuple[int, ...]
    dead: tuple[int, ...]
    calls: tuple[tuple[Channel, CrossKind, tuple[Crossing, ...]], ...]


def compiled(
    cut: Sequence[Stage],
    name: str,
    moved: Sequence[int],
    inputs: int,
    out_shardings: list[Any] | None,
) -> list[Compiled]:
    found = []
    for number, stage in enumerate(cut):
        is_last = number == len(cut) - 1
        given_up = [n for n in moved if is_last and n in stage.takes]
        kept = [n for n in stage.takes if n not in set(given_up)]
        later = {n for other in cut[number + 1 :] for n in other.takes}
        later |= {n for x in cut[number + 1 :] for c in x.crossings for n in c.operands}
        here = {n for x in stage.crossings for n in (*x.operands, *x.results)}
        dead = ({*stage.takes, *stage.gives, *here} - later) if not is_last else set()
        found.append(
            Compiled(
                stage,
                _jitted(
                    stage,
                    f"{name}_{number}" if number else name,
                    given_up,
                    kept,
                    out_shardings if is_last else None,
                ),
                tuple(given_up),
                tuple(kept),
                tuple(sorted(n for n in dead if n >= inputs)),
                _calls(stage.crossings),
            )
        )
    return found


def _jitted(
    stage: Stage,
    name: str,
    given_up: list[int],
    kept: list[int],
    out_shardings: list[Any] | None,
) -> Any:
    def program(first: list[Any], second: list[Any]) -> list[Any]:
        known = dict(zip((*given_up, *kept), (*first, *second), strict=True))
        made = stage.run(*[known[n] for n in stage.takes])
        # What is handed on as it came would be the same memory twice.
        given = {id(value) for value in known.values()}
        return [own(array, given) for array in made]

    program.__name__ = program.__qualname__ = name
    if out_shardings is None:
        return jax.jit(program, donate_argnums=0)
    return jax.jit(program, donate_argnums=0, out_shardings=out_shardings)


def _calls(
    crossings: Sequence[Crossing],
) -> tuple[tuple[Channel, CrossKind, tuple[Crossing, ...]], ...]:
    """Those that can be done as one, in the order of the program."""
    groups: dict[tuple[Channel, CrossKind], list[Crossing]] = {}
    for each in crossings:
        groups.setdefault((each.channel, each.kind), []).append(each)
    return tuple([(*key, tuple(found)) for key, found in groups.items()])


def shared(cut: Sequence[Stage], inputs: int) -> list[int]:
    """Arguments that several stages take: they go to the device once."""
    taken = [n for stage in cut for n in stage.takes if n < inputs]
    return sorted({n for n in taken if taken.count(n) > 1})
