"""`LocalOptimizer`: trains a worker's own copy for several steps, then exchanges once.

After Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
Models" (2023), and "Streaming DiLoCo with overlapping communication" (2025).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.program._function import Function
from zstrat.variables import Optimizer, Rounds, Variable, creator, unplaced

from ._fragments import Exchanges
from ._window import WindowBody
from ._window_recorder import window_of_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.codecs import Wire

_EPOCHS: Final = 8
"""Number of epochs of rounds for which the largest speed is kept."""


@dataclass(frozen=True, kw_only=True)
class _FragmentRounds(Rounds):
    """Rounds that drop late contributions even without backup workers: a late
    contribution would count as zeros for the fragment of the open round, and the other
    workers' contributions as zeros for its own fragment."""

    @property
    def drops_late(self) -> bool:
        return True


class LocalOptimizer:
    """Trains a copy of the variables on each worker, and exchanges it from time to
    time.

    A worker makes ``every`` steps with ``inner``, on its own copy and with its own
    state. Then it contributes the difference between the values on the parameter
    servers and its copy to a round of ``outer``, as one gradient. So traffic falls by a
    factor of ``every``. `window` makes the step function that runs these steps.

    Args:
        inner: An optax transformation, for the local steps. Its state stays on the
            worker.
        outer: An optax transformation, for rounds, on the parameter servers:
            ``optax.sgd(0.7, momentum=0.9, nesterov=True)``.
        every: Number of steps between two exchanges of a variable.
        fragments: Number of parts of the tree, which are exchanged one after the other:
            a window then runs ``every / fragments`` steps, and exchanges one part.
        overlap: Number of steps that a window makes before it needs the result of the
            previous round; less than ``every / fragments``.
        adapt: A worker that is slower than the fastest one makes fewer steps in a
            window, so that all windows take about as long (Liu et al., 2024). Without
            `Rounds.weights` the weight of its contribution is examples times examples
            per step.
        mix: The part of the worker's own copy that it keeps at an exchange, in [0, 1).
        rounds: Which windows become one update of ``outer``. Default: one window of
            each worker.
        wire: The format in which differences are sent, as that of `Optimizer`.
        name: Name of the optimizer in errors and in ``coordinator.metrics()``.

    Raises:
        TypeError: A transformation has no ``init`` and ``update``.
        ValueError: A number is out of range, or this is not in the scope of a strategy
            with parameter servers.
    """

    def __init__(
        self,
        inner: Any,
        outer: Any,
        *,
        every: int,
        fragments: int = 1,
        overlap: int = 0,
        mix: float = 0.0,
        adapt: bool = False,
        rounds: Rounds | None = None,
        wire: Wire | str | None = None,
        name: str | None = None,
    ) -> None:
        self.every = _whole("every", every, 1)
        """Number of steps between two exchanges of a variable."""
        self.fragments = _whole("fragments", fragments, 1)
        """Number of parts of the tree that are exchanged one after the other."""
        self.overlap = _whole("overlap", overlap, 0)
        """Number of steps of a window that do not wait for the result of the previous
        round."""
        if not isinstance(mix, int | float | np.floating) or not 0 <= mix < 1:
            raise ValueError(
                f"LocalOptimizer(mix={mix!r:.80}): expected a number in [0, 1)"
            )
        self.mix = float(mix)
        """The part of its own copy that a worker keeps at an exchange."""
        if self.fragments > self.every:
            raise ValueError(
                f"LocalOptimizer(every={every}, fragments={fragments}): each fragment "
                "is exchanged at another step, so give fragments=every at most"
            )
        if self.overlap * self.fragments >= self.every:
            raise ValueError(
                f"LocalOptimizer(every={every}, fragments={fragments}, "
                f"overlap={overlap}): the result of an exchange has to be there before "
                "the next one begins, so overlap has to be less than every / fragments"
            )
        if self.fragments > 1 and rounds is not None and rounds.late == "next":
            raise ValueError(
                "LocalOptimizer(fragments=, rounds=): a late contribution is of "
                "another fragment than the round that is open: use late='drop'"
            )
        if creator.get() is None:
            raise ValueError(
                "a zs.LocalOptimizer trains copies of variables that are on parameter "
                "servers: create it, and the variables, in the scope of a "
                "zs.ParameterServerStrategy"
            )
        self.name = "LocalOptimizer" if name is None else name
        """Name of the optimizer in errors and metrics."""
        # Its state is on the workers, so no server ever gets this optimizer.
        self._inner = unplaced(inner, f"{self.name}/inner")
        rounds = Rounds() if rounds is None else rounds
        # What is something else is refused by `Optimizer` below.
        if self.fragments > 1 and isinstance(rounds, Rounds):
            rounds = _FragmentRounds(**vars(rounds))
        self.outer = Optimizer(outer, self.name, rounds=rounds, wire=wire)
        """The optimizer on the parameter servers."""
        self.pace: Variable | None = None
        """A variable with the largest speeds of workers, in steps per second, for each
        of the last epochs; None without ``adapt``."""
        if adapt:
            # On a server, where all workers see who is the fastest.
            zeros = np.zeros(_EPOCHS, np.float32)
            self.pace = Variable(zeros, trainable=False, name=f"{self.name}/pace")
        self._exchanges = Exchanges(
            self.name,
            self.outer,
            self._inner,
            self.every,
            self.fragments,
            self.overlap,
            self.mix,
            self.pace,
        )

    @property
    def inner(self) -> Any:
        """The optax transformation of the local steps."""
        return self._inner.transformation

    def window(self, step: Callable[..., Any]) -> Function:
        """Makes a step function that runs ``every`` steps, to be scheduled.

        Each array that ``step`` returns gets a first axis of steps. ``step`` is the
        same step function as in training with `zs.Optimizer`: it draws from iterators,
        reads variables, and calls `apply_gradients` of this optimizer once. It may not
        update variables otherwise. All of its arguments are the same in each step,
        except random keys (``jax.random.key``), which are different in each step
        (`jax.random.fold_in` with the step's number).

        The elements of all steps are drawn first. At the end of the data a window that
        gets fewer elements raises OutOfRangeError, and draws none.

        Raises:
            TypeError: ``step`` cannot be a step function, or is ``eager``.
        """
        checked = step if isinstance(step, Function) else Function(step)
        if checked.eager:
            raise TypeError(
                f"a window compiles its steps, and {checked.name!r} is an eager step "
                "function: leave out eager=True"
            )
        return Function(WindowBody(self._exchanges, checked.body))

    def apply_gradients(self, grads: Any, variables: Any = None, **extra: Any) -> None:
        """Updates the worker's copy of the variables by ``inner``; see
        `Optimizer.apply_gradients`.

        Raises:
            RuntimeError: Not called in the step of a `window`.
            ValueError: As `Optimizer.apply_gradients`; or there are further arguments.
        """
        if window_of_step.get() != self._inner.id:
            raise RuntimeError(
                f"apply_gradients of {self.name!r} is called outside of its windows: "
                "schedule optimizer.window(step), and call it in that step"
            )
        self._inner.apply_gradients(grads, variables, **extra)

    def __repr__(self) -> str:
        return f"<zstrat.LocalOptimizer {self.name!r} every={self.every}>"


def _whole(name: str, value: Any, least: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise ValueError(
            f"LocalOptimizer({name}={value!r:.80}): expected a whole number, {least} "
            "or more"
        )
    return count
