"""Optimizers run beside the variables; this is their handle.

``apply_gradients`` records or sends gradients, nothing more: the transformation runs
where each variable lives, one variable at a time, with its slots beside the value. On
another task the handle is a number and a name, without the transformation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax

from zstrat.wire import UpdateOp

from ._abstract import AbstractVariable
from ._creator import creator
from ._home import update_all, update_all_async
from ._recorder import recorder
from ._slices import IndexedSlices
from ._spec import LOCAL, VariableAggregation
from ._variable import Variable

if TYPE_CHECKING:
    from ._home import HomeUpdate

_local_ids = itertools.count(-1, -1)


class Optimizer:
    """An optax transformation that runs next to the variables that it moves.

    Args:
        transformation: An optax ``GradientTransformation`` that treats each variable by
            itself: what looks at all gradients at once (``clip_by_global_norm``) is
            refused by the parameter server or has to be done in the step.
        count_iterations: Also keep TF's ``iterations``: an int32 variable that grows by
            one with each ``apply_gradients``. It is one more (small) update per step.

    Raises:
        TypeError: ``transformation`` has no ``init`` and ``update``.
    """

    def __init__(
        self,
        transformation: Any,
        name: str | None = None,
        *,
        count_iterations: bool = False,
    ) -> None:
        self.name = "Optimizer" if name is None else name
        self._transformation: Any = _checked(transformation)
        self.compiled: Any = None
        """Used by homes in this process: the compiled update."""
        self.is_by_rows: bool | None = None
        """Used by them too: whether it treats rows one by one; None until tried."""
        self.iterations: Variable | None = None
        current = creator.get()
        self.is_local = current is None
        """Whether it was created outside every scope."""
        self.id: int = (
            next_id() if current is None else current.register_optimizer(self)
        )
        """Unique in the session; negative for an optimizer of this process."""
        if count_iterations:
            try:
                self.iterations = self._counter()
            except BaseException:  # to the caller, who has no optimizer
                if current is not None:
                    current.forget_optimizer(self.id)
                raise

    def _counter(self) -> Variable:
        return Variable(
            0,
            trainable=False,
            name=f"{self.name}/iterations",
            dtype="int32",
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @property
    def transformation(self) -> Any:
        """The optax transformation.

        Raises:
            RuntimeError: This handle came from another task.
        """
        if self._transformation is None:
            raise RuntimeError(
                f"optimizer {self.name!r} came from another task without its "
                "transformation; gradients are applied on the parameter servers"
            )
        return self._transformation

    def apply_gradients(self, grads: Any, variables: Any = None) -> None:
        """Moves each variable by its gradient.

        Args:
            grads: A pytree of gradients, each an array of its variable's shape and
                dtype, or `IndexedSlices` of some of its rows: only these rows, and
                what the optimizer keeps beside them, are moved (Adam's moments of
                other rows do not decay; steps are counted all the same). Or, without
                ``variables``, TF's iterable of ``(gradient, variable)`` pairs. A
                gradient that is None is left out.
            variables: A pytree of the same structure. Where it has None, so must
                ``grads``.

        Raises:
            ValueError: The structures differ, a shape or dtype does not fit, no
                gradient is there at all, a variable is there twice, or lives on a
                parameter server that does not know this optimizer.
        """
        pairs = self._pairs(grads, variables)
        if recorder.get() is None:
            update_all(self._planned(pairs))
            return
        for gradient, variable in pairs:
            self._record(gradient, variable)
        if self.iterations is not None:
            self.iterations.assign_add(1)

    async def apply_gradients_async(self, grads: Any, variables: Any = None) -> None:
        """`apply_gradients` outside a step, without blocking the running loop.

        Cancellation: some of the gradients may have been applied.
        """
        await update_all_async(self._planned(self._pairs(grads, variables)))

    def _planned(self, pairs: list[tuple[Any, AbstractVariable]]) -> list[HomeUpdate]:
        """All that one call does outside of a step: checked before any of it is."""
        updates: list[HomeUpdate] = []
        for gradient, variable in pairs:
            if isinstance(gradient, IndexedSlices):
                op = UpdateOp.OPTIMIZE_ROWS
                updates += variable._planned_rows(op, gradient, self)
            else:
                updates += variable._planned(UpdateOp.OPTIMIZE, gradient, self)
        if self.iterations is not None:
            updates += self.iterations._planned(UpdateOp.ADD, 1, None)
        return updates

    def _record(self, gradient: Any, variable: AbstractVariable) -> None:
        if isinstance(gradient, IndexedSlices):
            variable._sparse(UpdateOp.OPTIMIZE_ROWS, gradient, self)
        else:
            variable._dense(UpdateOp.OPTIMIZE, gradient, self)

    def _check_place(self, variable: AbstractVariable) -> None:
        for part in variable.components if self.is_local else ():
            if part.spec.ps != LOCAL:
                raise ValueError(
                    f"{part.spec} lives on {part.device}, but optimizer "
                    f"{self.name!r} was created outside strategy.scope() and is not "
                    "known there: create it inside the scope"
                )

    def _pairs(self, grads: Any, variables: Any) -> list[tuple[Any, AbstractVariable]]:
        pairs = _listed(grads) if variables is None else _matched(grads, variables)
        # None beside None is an absent part of a model, a bias it does not have.
        pairs = [(g, v) for g, v in pairs if g is not None or v is not None]
        for _, variable in pairs:
            if not isinstance(variable, AbstractVariable):
                raise ValueError(
                    f"apply_gradients moves zs.Variable objects, got "
                    f"{type(variable).__name__}"
                )
        found = [(g, v) for g, v in pairs if g is not None]
        if not found:
            names = [v.name for _, v in pairs]
            raise ValueError(f"No gradients provided for any variable: {names}")
        _require_distinct([v for _, v in found])
        for _, variable in found:
            self._check_place(variable)
        return found

    def __reduce__(self) -> Any:
        state = (self.id, self.name, self.is_local, self.iterations)
        return _handle, state

    def __repr__(self) -> str:
        return f"<zstrat.Optimizer {self.name!r}>"


def next_id() -> int:
    """The number of an optimizer of this process."""
    return next(_local_ids)


def _handle(
    optimizer: int, name: str, is_local: bool, iterations: Variable | None
) -> Optimizer:
    made = object.__new__(Optimizer)
    made.id, made.name, made.is_local = optimizer, name, is_local
    made.iterations, made.compiled, made._transformation = iterations, None, None
    made.is_by_rows = None
    return made


def _checked(transformation: Any) -> Any:
    for method in ("init", "update"):
        if not callable(getattr(transformation, method, None)):
            raise TypeError(
                f"zs.Optimizer takes an optax GradientTransformation, as "
                f"zs.Optimizer(optax.adam(1e-3)); got {transformation!r:.100}"
            )
    return transformation


def _require_distinct(variables: list[AbstractVariable]) -> None:
    seen = set()
    for part in (part for variable in variables for part in variable.components):
        key = part.spec.key
        if key in seen:
            raise ValueError(
                f"{part.spec} is there twice in one apply_gradients, which would "
                "be two steps of the optimizer: give each variable once. Gradients "
                "with respect to several arguments that hold it are added first; "
                "zs.value_and_grad(variables=...) gives the whole gradient each time"
            )
        seen.add(key)


def _listed(pairs: Any) -> list[tuple[Any, Any]]:
    if not isinstance(pairs, Iterable):
        raise ValueError(
            "apply_gradients takes (grads, variables) or an iterable of "
            f"(gradient, variable) pairs, got {type(pairs).__name__}"
        )
    listed = list(pairs)
    if any(not isinstance(p, tuple | list) or len(p) != 2 for p in listed):
        raise ValueError(
            "apply_gradients(pairs) takes an iterable of (gradient, variable) pairs; "
            "for a pytree of gradients give the variables too: "
            "apply_gradients(grads, variables)"
        )
    return [(gradient, variable) for gradient, variable in listed]


def _matched(grads: Any, variables: Any) -> list[tuple[Any, Any]]:
    leaves: list[Any]
    wanted: Any  # a PyTreeDef; its stubs lack comparison
    leaves, wanted = jax.tree.flatten(variables, is_leaf=lambda node: node is None)
    found, given = jax.tree.flatten(grads, is_leaf=_is_gradient)
    if given != wanted:
        raise ValueError(
            f"gradients and variables must have the same structure: gradients are "
            f"{given}, variables are {wanted}"
        )
    return list(zip(found, leaves, strict=True))


def _is_gradient(node: Any) -> bool:
    return node is None or isinstance(node, IndexedSlices)
