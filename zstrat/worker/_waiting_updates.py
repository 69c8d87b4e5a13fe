"""Updates of an eager step that wait to be pushed, and the names that tell them apart.

A name says where in the user's code an update was made, for which time, and what it
does. The operands are no part of it, nor is which rows and components are updated:
another run of the step may have other data, and is the same run all the same.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, final

from zstrat.program import digest, here
from zstrat.ps import PsUpdate, ordinal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.variables import HomeUpdate, VariableSpec

MOST: Final = 4096
"""Updates of one push: they fit into a header by far."""
LARGEST: Final = 256 * 2**20
"""Bytes of operands that wait, beyond the last update."""
_LONGEST: Final = 1800
"""Characters of the names of a push: the servers remember them."""


@final
class WaitingUpdates:
    """Those of one run since its last push."""

    def __init__(self) -> None:
        self.specs: list[VariableSpec] = []
        self.updates: list[PsUpdate] = []
        self._names: list[str] = []
        self._nbytes = 0
        self._times: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self.updates)

    @property
    def is_full(self) -> bool:
        return len(self.updates) >= MOST or self._nbytes > LARGEST

    def add(self, updates: Sequence[HomeUpdate]) -> None:
        """One call of the user's, of one variable or of the rows of a table."""
        for variable, op, operands, optimizer in updates:
            spec = variable.spec
            rule = 0 if optimizer is None else optimizer.id
            self.updates.append(PsUpdate(spec.ps, spec.key, op, rule, operands))
            self.specs.append(spec)
            self._nbytes += sum(operand.nbytes for operand in operands)
        self._names.append(self._name(updates))

    def take(self) -> tuple[list[PsUpdate], list[str]]:
        """What waits, with its names; nothing waits then."""
        taken = self.updates, _bounded(self._names)
        self.updates, self.specs, self._names, self._nbytes = [], [], [], 0
        return taken

    def _name(self, updates: Sequence[HomeUpdate]) -> str:
        variable, op, operands, optimizer = updates[0]
        whole = variable.sharded_container if len(operands) > 1 else None
        name = variable.name if whole is None else whole.name
        by = "" if optimizer is None else f" by {optimizer.name!r}"
        what = f"{op.name} of {name!r}{by} at {here()}"
        self._times[what] += 1
        times = self._times[what]
        return what if times == 1 else f"{what}, the {ordinal(times)} time"


def _bounded(names: list[str]) -> list[str]:
    length = 0
    for at, name in enumerate(names):
        length += len(name)
        if length > _LONGEST:
            rest = digest("\n".join(names[at:]).encode()).hex()
            return [*names[:at], f"{len(names) - at} more updates ({rest})"]
    return names
