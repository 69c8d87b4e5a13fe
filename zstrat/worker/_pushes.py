"""What a step pushes, in which format, and what it contributes to rounds.

The gradients of an optimizer with rounds are a contribution: they wait on the servers
until the coordinator closes the round. All other updates of a step are applied when
they arrive. What an optimizer computes from all gradients of a round, such as a global
norm, is computed by one worker from the merged gradients, before the round closes.

`PushEncoding` encodes gradients that are sent over a network in the format that their
optimizer asks for (``wire=``). What such a format leaves out is the *residual*. Law:
the sum of what was sent and acknowledged, plus what `Residuals` keep, is the sum of the
gradients whose pushes were acknowledged. A step takes the residual out of `Residuals`.
When its push is acknowledged, what the format left out is put there instead; when the
push fails, the residual is put back as it was, because the step runs again elsewhere.
So several steps may be under way at the same time, and none sends a residual twice.

Error feedback is from Seide et al., "1-Bit Stochastic Gradient Descent" (2014).
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Final, final

import numpy as np

from zstrat.codecs import GRADIENT_BLOCK, ROW_BLOCK, decode_gradient, encode_gradient
from zstrat.errors import InvalidArgumentError
from zstrat.ps import PsUpdate
from zstrat.wire import CODED, Codec, MergeRule, StepContribution, UpdateOp

from ._closure import Lent, RoundPush

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from zstrat.codecs import Wire
    from zstrat.optimizers import Binding
    from zstrat.program import Plan, StepResult
    from zstrat.variables import OptimizerHandle
    from zstrat.wire import MergeOperands

    from ._closure import ClosureStep
    from ._needs import Needs
    from ._resources import Resources


MIN_NUMBERS: Final = GRADIENT_BLOCK
"""Gradients with fewer numbers are sent unencoded: the header costs more than the
format saves."""

_BYTES: Final = {Codec.BFLOAT16: 2, Codec.INT8: 1}
"""Bytes of one number; gradients with numbers this small or smaller are sent
unencoded."""


@final
class Residuals:
    """The residuals (what formats left out of gradients) of one worker for one
    coordinator, in all sessions. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all residuals."""
        with self._lock:
            return sum(array.nbytes for array in self._kept.values())

    def take(self, key: int) -> np.ndarray | None:
        """Removes and returns the residual of a variable; None if there is none."""
        with self._lock:
            return self._kept.pop(key, None)

    def clear(self) -> None:
        """Drops all residuals, because the variables have other values now."""
        with self._lock:
            self._kept.clear()

    def settle(self, lent: Iterable[Lent], *, is_sent: bool) -> None:
        """Puts residuals back after a push has ended: what the format left out, or, if
        the push failed, what the push had taken."""
        for key, before, after in lent:
            back = after if is_sent else before
            if back is None:
                continue
            with self._lock:
                # Several steps may be under way: what they leave out is added up, and
                # the next step sends it all.
                there = self._kept.get(key)
                self._kept[key] = back if there is None else there + back


@final
class PushEncoding:
    """Encodes the pushes of one session of a worker. For the executor thread.

    Args:
        shares_memory: Returns whether bodies of messages to a parameter server go
            through shared memory, which is faster than any format. For any thread.
        counts: Bytes of gradients before they were encoded (``encoded_from``), and
            after (``encoded_to``).
        residuals: Those of the coordinator's previous session; None: this is its first.
    """

    def __init__(
        self,
        shares_memory: Callable[[int], bool],
        counts: Counter[str],
        residuals: Residuals | None = None,
    ) -> None:
        self._shares_memory, self._counts = shares_memory, counts
        self.residuals: Final = Residuals() if residuals is None else residuals

    def encoded(
        self, step: int, updates: Sequence[PsUpdate], wires: Mapping[int, Wire]
    ) -> tuple[list[PsUpdate], list[Lent]]:
        """Encodes the updates of a step.

        Args:
            wires: The formats, by number of the optimizer.

        Returns:
            The encoded updates, and the residuals that they have taken; give the latter
            back to `residuals` when the push has ended.
        """
        lent: list[Lent] = []
        try:
            sent = [self._encoded(step, update, wires, lent) for update in updates]
        except BaseException:  # to the step, which does not push
            # Some residuals were taken before the one that failed.
            self.residuals.settle(lent, is_sent=False)
            raise
        return sent, lent

    def _encoded(
        self,
        step: int,
        update: PsUpdate,
        wires: Mapping[int, Wire],
        lent: list[Lent],
    ) -> PsUpdate:
        wire = wires.get(update.optimizer)
        # Indices of rows, and operands of the optimizer, stand before it.
        gradient = update.arrays[-1]
        if (
            wire is None
            or wire.push is None
            or update.op not in (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS)
            or gradient.size < MIN_NUMBERS
            or gradient.dtype.kind in "iubc"
            or gradient.dtype.itemsize <= _BYTES.get(wire.codec, 0)
            or self._shares_memory(update.ps)
        ):
            return update
        is_of_rows = update.op == UpdateOp.OPTIMIZE_ROWS
        codec = wire.codec
        # Rows keep no residuals, and top-k without them would lose most of each row for
        # good.
        if is_of_rows and codec is Codec.TOP_K:
            return update
        block = ROW_BLOCK if is_of_rows else GRADIENT_BLOCK
        # Without feedback rounding has to be random, so its errors cancel over steps;
        # the seed makes a step that runs again send the same.
        seed: int | None = step << 32 | update.key
        if wire.has_feedback and not is_of_rows:
            before, seed = self.residuals.take(update.key), None
            # Noted before the work that may fail, so the caller can give it back.
            lent.append(Lent(update.key, before, gradient))
            if before is not None:
                gradient = gradient + before
            coded = encode_gradient(
                codec, gradient, block=block, seed=seed, density=wire.density or 1.0
            )
            after = np.subtract(
                gradient,
                decode_gradient(codec, gradient.shape, coded, block),
                dtype=np.float32,
            )
            # What is not finite was sent; kept, it would spoil all later steps.
            np.nan_to_num(after, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
            lent[-1] = Lent(update.key, before, after)
        else:
            coded = encode_gradient(codec, gradient, block=block, seed=seed)
        self._counts["encoded_from"] += gradient.nbytes
        self._counts["encoded_to"] += sum(array.nbytes for array in coded)
        arrays = (*update.arrays[:-1], *coded)
        return update._replace(op=update.op + CODED * codec, arrays=arrays)


@final
class StepPushes:
    """Makes the pushes of one session's steps. For the executor thread.

    Args:
        encoding: Encodes gradients for the network.
    """

    def __init__(self, resources: Resources, encoding: PushEncoding) -> None:
        self._resources, self._encoding = resources, encoding
        self._bindings: Final[dict[tuple[bytes, bytes], Binding]] = {}
        """By digests of the optimizer and the tree: the optimizers for which operands
        were computed."""

    def push_of(
        self, step: ClosureStep, result: StepResult
    ) -> tuple[list[PsUpdate] | RoundPush | None, Sequence[Lent]]:
        """Returns the push of a step that was computed (None if the step changes
        nothing), and the residuals that the push has taken.

        Raises:
            ValueError: The user's function returned something that is not a weight.
            Exception: Whatever the user's function of weights raises.
        """
        updates = [
            PsUpdate(spec.ps, spec.key, op, optimizer, arrays)
            for spec, op, optimizer, arrays, _ in result.updates
        ]
        needs: Needs = step.needs
        rounds = needs.rounds
        if not rounds and not needs.wires:  # as of most steps, each of which pays
            return updates or None, ()
        plan: Plan = step.work.plan
        read = {} if step.notes is None else step.notes.rounds or {}
        place = step.place
        # A window that read another round than it was made for contributes with weight
        # 0, as its fragment is not the one that is exchanged now.
        is_due = place is None or self._resources.residents.has_run(
            place, read.get(place.optimizer, place.round)
        )
        rules = {rule.id: rule for _, rule in plan.targets if rule is not None}
        coupled = {x.optimizer for x in updates if x.op == UpdateOp.OPERANDS}
        contributions = [
            StepContribution(
                step.number,
                step.task.context.attempt,
                optimizer,
                read.get(optimizer, -1),  # -1: it has read nothing
                _weight(rules[optimizer], step, result) if is_due else 0.0,
                optimizer in coupled,
            )
            for optimizer in rounds
        ]
        lent: Sequence[Lent] = ()
        if needs.wires and is_due:  # last: what fails must not take residuals away
            updates, lent = self._encoding.encoded(step.number, updates, needs.wires)
        if not rounds:
            return updates or None, lent
        apart = [update for update in updates if update.optimizer not in rounds]
        gradients = [
            update
            for update in updates
            # Operands of one step say nothing about the merged gradients.
            if update.optimizer in rounds and update.op != UpdateOp.OPERANDS
        ]
        return RoundPush(apart, gradients if is_due else [], contributions), lent

    def operands(
        self,
        asked: MergeOperands,
        trees: Iterable[bytes],
        merged: Mapping[int, tuple[np.ndarray, ...]],
    ) -> list[np.ndarray]:
        """Computes what an optimizer needs from all merged gradients of a round; see
        `PsClient.pull_merged`. Works also if no step with that optimizer has run on
        this worker.

        Raises:
            InvalidArgumentError: The gradients are those of several trees.
            Exception: Whatever loading or tracing the transformation raises.
        """
        from zstrat.optimizers import Binding, checked  # which import optax

        name = str(asked.order.optimizer)
        for tree in trees:
            binding = self._bindings.get((asked.code, tree))
            if binding is None:
                transformation = checked(self._resources.code(asked.code))
                binding = Binding.decoded(name, transformation, tree)
                # Decoded and traced once for all rounds; only the merged values differ.
                self._bindings[asked.code, tree] = binding
            if merged.keys() <= {key for keys in binding.keys for key in keys}:
                return binding.operands(merged)
        raise InvalidArgumentError(
            f"the gradients of a round are of several trees of optimizer {name}, which "
            "looks at all gradients of one: give it all its variables at once, "
            "zs.Optimizer(transformation, params=params)"
        )


def _weight(rule: OptimizerHandle, step: ClosureStep, result: StepResult) -> float:
    """Returns the weight of a step's gradients in a round, by the user's function.

    Raises:
        ValueError: The weight is not a finite number, or is negative.
    """
    assert rule.rounds is not None
    plan: Plan = step.work.plan
    if rule.rounds.weights is None:
        if step.place is None or rule.rounds.rule is MergeRule.SUM:
            return 1.0
        own: float = step.place.weight(step.work.examples)
        return own
    weight = float(rule.rounds.weights(plan.out_structure.unflatten(result.leaves)))
    if not 0 <= weight < math.inf:
        raise ValueError(
            f"optimizer {rule.name!r}: Rounds(weights=) returned {weight} for the "
            "result of a step; expected a finite number, 0 or more"
        )
    return weight
