"""What a program makes late, and changes by all that there is: what it has to be.

A `LateModel` is computed here, with numpy, from what the program has asked for. The law
of the file: as that of `_contract`, nothing here asks the system what is right. A
change of which nobody knows whether it was made leaves two *worlds*, one with it and
one without; what is read later has to be so in one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, final

import numpy as np

from zstrat.wire import UpdateOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

SHAPE: Final = (4, 2)
"""Of each variable that is made late: four rows."""
RATE: Final = 0.5
DECAY: Final = 0.5
"""Of the optimizer that is made late: powers of two, so that few steps are exact."""


class Held(NamedTuple):
    """A variable. ``trace`` is what its optimizer keeps beside it, which is zero before
    the first gradient."""

    value: np.ndarray
    trace: np.ndarray


World: TypeAlias = "Mapping[int, Held]"
"""Variables by key."""


def made(value: np.ndarray) -> Held:
    """A new variable."""
    return Held(value, np.zeros_like(value))


def updated(held: Held, op: UpdateOp, arrays: Sequence[np.ndarray]) -> Held:
    """The variable after an update."""
    value, trace = held.value.copy(), held.trace.copy()
    match op:
        case UpdateOp.ASSIGN:
            value = arrays[0]
        case UpdateOp.ADD:
            value += arrays[0]
        case UpdateOp.SUB:
            value -= arrays[0]
        case UpdateOp.OPTIMIZE:
            trace = arrays[0] + DECAY * trace
            value -= RATE * trace
        case UpdateOp.OPTIMIZE_ROWS:
            at, rows = arrays
            trace[at] = rows + DECAY * trace[at]
            value[at] -= RATE * trace[at]
        case _:
            at, rows = arrays
            _SCATTERED[op](value, at, rows)
    return Held(value, trace)


def _replace(value: np.ndarray, at: np.ndarray, rows: np.ndarray) -> None:
    for row, new in zip(at.tolist(), rows, strict=True):
        value[row] = new


_SCATTERED: Final[Mapping[UpdateOp, Callable[..., None]]] = {
    UpdateOp.SCATTER_ADD: np.add.at,
    UpdateOp.SCATTER_SUB: np.subtract.at,
    UpdateOp.SCATTER_MUL: np.multiply.at,
    UpdateOp.SCATTER_DIV: np.divide.at,
    UpdateOp.SCATTER_MIN: np.minimum.at,
    UpdateOp.SCATTER_MAX: np.maximum.at,
    UpdateOp.SCATTER_UPDATE: _replace,
}


@final
class LateModel:
    """What was made late in one session, or in several that go on with one another."""

    def __init__(self, worlds: Iterable[World] = ({},)) -> None:
        self.worlds: list[World] = list(worlds)
        self.gone: set[int] = set()
        """Variables that were deleted."""
        self.next_key = 0
        """How many variables there were, with those that are gone."""
        self.has_optimizer = False
        """It is there, or may be."""
        self.is_unsure = False
        """A change has failed, and may be made at any time: no other follows."""
        self._change: Callable[[World], World] | None = None
        """The last one, unless it is acknowledged."""
        self._is_under_way = False

    @property
    def keys(self) -> list[int]:
        """Variables that are there in some world."""
        return sorted({key for world in self.worlds for key in world})

    def begin(self, change: Callable[[World], World]) -> None:
        """A change is asked for; `done` or `failed` follows, or the program is lost."""
        assert not self._is_under_way, "one change at a time"
        self._change, self._is_under_way = change, True

    def done(self) -> None:
        """It is acknowledged."""
        change = self._change
        assert change is not None, "nothing was begun"
        self.worlds = list(map(change, self.worlds))
        self._change, self._is_under_way = None, False

    def failed(self) -> None:
        """It may be made now or later, or never."""
        if self._is_under_way:
            self._fork()
        self._is_under_way, self.is_unsure = False, True

    def restored(self, worlds: Sequence[World]) -> None:
        """The servers were filled with what a checkpoint has: one of these. What is not
        acknowledged comes to it, or does not."""
        self.worlds, self.is_unsure = list(worlds), False
        self._fork()

    def go_on(self) -> None:
        """Another program goes on: what the one before has asked for was done by then,
        or never will be."""
        if self._is_under_way:
            self._fork()
        self._change, self._is_under_way, self.is_unsure = None, False, False

    def found(self, world: World) -> bool:
        """Whether what was found may be there; all other worlds were none."""
        fitting = [each for each in self.worlds if is_same(each, world)]
        if fitting and not self.is_unsure:
            self.worlds = fitting[:1]
        return bool(fitting)

    def _fork(self) -> None:
        if (change := self._change) is not None:
            self.worlds += [change(each) for each in self.worlds]


def is_same(wanted: World, found: World) -> bool:
    """Whether these are the same variables, values and slots."""
    return wanted.keys() == found.keys() and all(
        np.allclose(wanted[key].value, found[key].value, rtol=1e-4, atol=1e-4)
        and np.allclose(wanted[key].trace, found[key].trace, rtol=1e-4, atol=1e-4)
        for key in wanted
    )


@final
class Momentum:
    """As `optax.sgd(RATE, momentum=DECAY)`, of a tree of one leaf."""

    def init(self, params: Mapping[str, np.ndarray]) -> object:
        return {"trace": {name: value * 0 for name, value in params.items()}}

    def update(
        self,
        gradients: Mapping[str, np.ndarray],
        state: Mapping[str, Mapping[str, np.ndarray]],
        params: object = None,
    ) -> tuple[object, object]:
        del params
        trace = {
            name: gradient + state["trace"][name] * DECAY
            for name, gradient in gradients.items()
        }
        return {name: each * -RATE for name, each in trace.items()}, {"trace": trace}
