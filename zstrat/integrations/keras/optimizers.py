"""Converts Keras optimizers to optax transformations by tracing their own code.

``optimizer.stateless_apply`` is public and pure: its computation on gradients, values
and state is traced once, on arrays of the shapes of the model. So everything that Keras
computes is included: weight decay, clipping, averages, accumulation, schedules,
constraints; also in optimizers that the user wrote. ``after - before`` is added to each
value, which is exact where an update changes a value by less than half of it, and
elsewhere adds one rounding error.

A learning rate that is a variable of Keras is not part of the state: the program reads
it when it schedules a step, and sends it with the step. A rate that a callback assigns
takes effect in the next scheduled step.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import keras
import numpy as np

from ._private import with_shapes
from .shipped import ROWS, Kind, Operations, ShippedUpdate, at, traced

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class OptimizerState:
    """The variables of a Keras optimizer, without the learning rate.

    Args:
        optimizer: An optimizer that is built for the variables of its model.
    """

    def __init__(self, optimizer: Any) -> None:
        _require_possible(optimizer)
        self._optimizer: Final = optimizer
        # A MultiOptimizer has no rate, but those of its parts, which are state here.
        rate = getattr(optimizer, "learning_rate", None)
        self._rate: Final = rate if isinstance(rate, keras.Variable) else None
        self.variables: Final = [v for v in optimizer.variables if v is not rate]
        self._read: tuple[Any, np.float32] = None, np.float32(0)

    def learning_rate(self) -> np.float32:
        """Reads the current learning rate; 0 if the optimizer has a schedule, which is
        part of its traced program."""
        if self._rate is None:
            return np.float32(0)
        value = self._rate.value
        # Reading an array of jax waits for it; one that is known is not read again.
        if value is not self._read[0]:
            self._read = value, np.float32(value)
        return self._read[1]

    def shipped(self, trained: Sequence[Any]) -> ShippedUpdate:
        """Traces the optimizer.

        Args:
            trained: The variables of the model that the optimizer updates, in its
                order.

        Raises:
            NotImplementedError: The optimizer uses an operation that parameter servers
                cannot run.
        """
        kinds = [Kind.of(variable) for variable in trained]
        sizes = [kind.shape[0] if kind.shape else None for kind in kinds]
        whole, first = self._traced(trained, {})
        # Lengths that a program of its own treats as it would treat any other.
        named = {n: ROWS + n for n, kind in enumerate(kinds) if kind.shape}
        try:
            free, free_first = self._traced(trained, named)
        except Exception:  # it cannot be traced in another size
            return ShippedUpdate(whole, first, tuple(sizes))
        known = {name: kinds[n].shape[0] for n, name in named.items()}
        if not free.at(known).equals(whole):
            return ShippedUpdate(whole, first, tuple(sizes))
        rows = [named.get(n) for n in range(len(kinds))]
        return ShippedUpdate(free, free_first, tuple(rows))

    def _owners(self, trained: Sequence[Any]) -> list[int | None]:
        """Returns for each optimizer variable the number of the trained variable that
        it belongs to: the one of the same shape from whose path Keras made its name."""
        paths = [variable.path.replace("/", "_") + "_" for variable in trained]
        owners: list[int | None] = []
        seen: Counter[str] = Counter()
        for slot in self.variables:
            alike = [n for n, v in enumerate(trained) if v.shape == slot.shape]
            after = [n for n in alike if slot.name.startswith(paths[n])] or alike
            longest = max([len(paths[n]) for n in after], default=0)
            after = [n for n in after if len(paths[n]) == longest]
            # Layers in different models may have one path.
            owners.append(after[seen[slot.name] % len(after)] if after else None)
            seen[slot.name] += 1
        return owners

    def _traced(
        self, trained: Sequence[Any], named: Mapping[int, int]
    ) -> tuple[Operations, tuple[tuple[Kind, Any], ...]]:
        """Traces the optimizer for variables of other lengths. ``named`` has these
        lengths by the number of the trained variable.

        Returns:
            The program, and for each optimizer variable its shape, dtype and initial
            value.
        """

        def kind_of(variable: Any, owner: int | None) -> Kind:
            kind = Kind.of(variable)
            if owner is None or owner not in named:
                return kind
            return Kind((named[owner], *kind.shape[1:]), kind.dtype)

        n = len(trained)
        state = list(map(kind_of, self.variables, self._owners(trained)))
        kinds = list(map(kind_of, trained, range(n)))
        pairs = zip([*self.variables, *trained], [*state, *kinds], strict=True)
        shapes = [(variable, kind.shape) for variable, kind in pairs]

        def update(*arrays: Any) -> list[Any]:
            rate, grads, values = arrays[-1], arrays[:n], arrays[n + len(state) : -1]
            mine = iter(arrays[n : n + len(state)])
            variables = self._optimizer.variables
            given = [rate if v is self._rate else next(mine) for v in variables]
            after, left = self._optimizer.stateless_apply(
                given, list(grads), list(values)
            )
            moves = [new - old for new, old in zip(after, values, strict=True)]
            kept = [
                x for v, x in zip(variables, left, strict=True) if v is not self._rate
            ]
            return moves + kept

        with with_shapes(shapes):
            closed = traced(update, [*kinds, *state, *kinds, Kind((), "float32")])
        try:
            program = Operations.of(closed)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"optimizer {self._optimizer.name!r} of Keras computes "
                f"{error.args[0]!r}, which parameter servers cannot run for one "
                "variable alone; write the update without loops and callbacks, or take "
                "an optimizer of keras.optimizers"
            ) from None
        first = [_uniform(np.asarray(variable.value)) for variable in self.variables]
        return program, tuple(zip(state, first, strict=True))

    def rests(self, trained: Sequence[Any], number: int) -> bool:
        """Returns whether the optimizer never changes a row without a gradient, nor the
        state of that row, whatever their values: then it suffices to update the other
        rows."""
        update, rng = self.shipped(trained), np.random.default_rng(0)
        rows, optimizer = update.rows[number], self._optimizer
        if rows is None or rows < ROWS or trained[number].constraint is not None:
            return False
        # Decay may begin with a later step (a schedule), or be for some variables.
        if any(
            each.gradient_accumulation_steps or each.weight_decay
            for each in parts_of(optimizer)
        ):
            return False

        # One step on random numbers: what moves a row without a gradient shows.
        def drawn(kind: Kind, least: float) -> np.ndarray:
            return rng.uniform(least, 2, kind.shape).astype(kind.dtype)

        kinds = [Kind((2, *v.shape[1:]) if v.shape else (), v.dtype) for v in trained]
        values, grads = ([drawn(kind, -2) for kind in kinds] for _ in range(2))
        grads[number][1] = 0  # others have gradients
        sizes = {name: 2 for name in update.rows if name is not None}
        state = [drawn(at(kind, sizes), 1) for kind, _ in update.first]
        moves, after = update.update(grads, state, values, learning_rate=0.5)
        own = [n for n, (kind, _) in enumerate(update.first) if rows in kind.shape]
        return not np.any(moves[number][1]) and all(
            np.array_equal(after[n][1], state[n][1]) for n in own
        )

    def is_fresh(self) -> bool:
        """Whether the optimizer's variables have the values that `ShippedUpdate.init`
        gives."""
        arrays = [np.asarray(variable.value) for variable in self.variables]
        return all((array == _uniform(array)).all() for array in arrays)


def _uniform(array: np.ndarray) -> Any:
    """Returns the value that all elements of an array have; 0 if they differ."""
    first = array.flat[0] if array.size else 0
    return first if (array == first).all() else array.dtype.type(0)


def parts_of(optimizer: Any) -> list[Any]:
    """Returns the optimizer, and the optimizers that a MultiOptimizer consists of. An
    optimizer of the user's own may have an attribute of that name, of any type."""
    parts = getattr(optimizer, "optimizers", None)
    given = parts if isinstance(parts, list | tuple) else ()
    return [optimizer, *[x for x in given if isinstance(x, keras.optimizers.Optimizer)]]


def _require_possible(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise NotImplementedError(
            f"{kind} scales the loss by a number that all workers would have to share. "
            "Use keras.mixed_precision.set_dtype_policy('mixed_bfloat16'), which needs "
            "no scaling, or compile(auto_scale_loss=False)"
        )
    for each in parts_of(optimizer):
        rate = getattr(each, "learning_rate", None)
        if rate is None or isinstance(rate, keras.Variable) or _follows_steps(each):
            continue
        raise NotImplementedError(
            f"the learning rate of {type(each).__name__} is a function without "
            "arguments, which parameter servers cannot call. Use a number, which "
            "callbacks can assign, or a keras.optimizers.schedules.LearningRateSchedule"
        )


def _follows_steps(optimizer: Any) -> bool:
    """Returns whether the learning rate is computed from the number of the step."""
    iterations = optimizer.variables[0]

    def rate(step: Any) -> Any:
        with keras.StatelessScope(state_mapping=[(iterations, step)]):
            return optimizer.learning_rate

    jaxpr = traced(rate, [Kind.of(iterations)]).jaxpr
    return any(jaxpr.invars[0] in eqn.invars for eqn in jaxpr.eqns)
