"""Finds updates that do the same to each element, whatever the shape of the variable.

Such an update, as Adam's or SGD's, may be applied to the elements of several variables
concatenated in one array, which takes one program instead of one for each variable. A
program is elementwise if each of its equations is

- between arrays of the variable's shape, and known to act element by element;
- between scalars, whatever it computes;
- or broadcasts one scalar to the variable's shape.

Law of the file: an equation that is not known to be elementwise counts as not
elementwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import Literal

from zstrat.jaxprs import evaluated

from ._jaxprs import comparable, constant
from ._rows import ELEMENTWISE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._leaf import LeafRule


@dataclass(frozen=True, eq=False)
class ElementwiseUpdate:
    """An update that does the same to each element of a variable.

    ``form`` is equal for two updates that do the same to an element. ``by_element``:
    for each slot, whether it has the shape of the variable; the other slots are
    scalars.
    """

    form: Any
    by_element: tuple[bool, ...]
    closed: Any

    def run(
        self, value: Any, slots: Sequence[Any], gradient: Any, operands: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Returns the new value and new slots of several variables, whose elements are
        concatenated.

        Args:
            value: ``[n]``, as are the gradient and the slots of ``by_element``.
        """

        # Equation by equation, not as a jaxpr: its shapes are those of one variable,
        # and this runs on several side by side.
        def compute(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
            if spreads(eqn):
                return [jax.lax.broadcast(inputs[0], value.shape)]
            outputs = eqn.primitive.bind(*inputs, **eqn.params)
            return outputs if eqn.primitive.multiple_results else [outputs]

        given = [value, *slots, gradient, *operands]
        moved, *after = evaluated(self.closed.jaxpr, self.closed.consts, given, compute)
        return moved, after


def elementwise(
    rule: LeafRule, shape: tuple[int, ...], dtypes: tuple[Any, ...]
) -> ElementwiseUpdate | None:
    """Returns the update that a rule does to each element; None if the rule is not
    elementwise.

    Args:
        shape: The shape of the variable.
        dtypes: The dtypes of its slots.
    """
    if not shape:
        return None  # it has the shape of a scalar beside it
    closed = rule.program(shape[0], dtypes)
    jaxpr, slots = closed.jaxpr, len(rule.slots)
    consts = [constant(const) for const in closed.consts]
    shapes = [tuple(var.aval.shape) for var in jaxpr.invars]
    elements = [each == shape for each in shapes]
    is_fit = (
        elements[0]
        and elements[1 + slots]
        and all(each in (shape, ()) for each in shapes[: 1 + slots])
        and not any(shapes[2 + slots :])
        # An array among the constants may differ from element to element.
        and not any(const.shape for const in consts)
        and all(_is_elementwise(eqn, shape) for eqn in jaxpr.eqns)
    )
    outputs = [tuple(var.aval.shape) for var in jaxpr.outvars]
    if not is_fit or outputs != shapes[: 1 + slots]:
        return None
    # By number: each trace makes variables of its own.
    numbers: dict[Any, int] = {}
    for var in (*jaxpr.constvars, *jaxpr.invars):
        numbers[var] = len(numbers)

    def place(var: Any) -> Any:
        if isinstance(var, Literal):
            return _kind(var, shape), np.asarray(var.val).tobytes()
        return numbers[var]

    form: list[Any] = [(const.dtype, const.tobytes()) for const in consts]
    form += [_kind(var, shape) for var in jaxpr.invars]
    for eqn in jaxpr.eqns:
        params = [] if spreads(eqn) else sorted(eqn.params.items())
        known = [(name, comparable(value)) for name, value in params]
        form.append((eqn.primitive, *map(place, eqn.invars), *known))
        for var in eqn.outvars:
            numbers[var] = len(numbers)
    form += map(place, jaxpr.outvars)
    by_element = tuple(elements[1 : 1 + slots])
    made = tuple(form), rule.tree.wide, rule.tree.random
    return ElementwiseUpdate(made, by_element, closed)


def _kind(var: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    aval = var.aval
    return tuple(aval.shape) == shape, aval.dtype, getattr(aval, "weak_type", False)


def spreads(eqn: Any) -> bool:
    """Returns whether an equation broadcasts one scalar to an array."""
    is_scalar = not getattr(eqn.invars[0].aval, "shape", None) if eqn.invars else False
    return eqn.primitive.name == "broadcast_in_dim" and is_scalar


def _is_elementwise(eqn: Any, shape: tuple[int, ...]) -> bool:
    shapes = {
        tuple(getattr(var.aval, "shape", (-1,))) for var in (*eqn.invars, *eqn.outvars)
    }
    # Between scalars anything may be computed, but nothing else may happen.
    if shapes == {()}:
        return not eqn.effects
    if not shapes <= {(), shape}:
        return False
    outputs = {tuple(var.aval.shape) for var in eqn.outvars}
    if spreads(eqn):
        return outputs == {shape}
    return eqn.primitive.name in ELEMENTWISE and outputs == {shape}
