"""Data flow in a traced program: which inputs a result depends on, and how to compute
it.

A program is jax's jaxpr: equations in order, each with the variables that it reads and
writes. One pass over them finds the inputs that each variable depends on. A function
that jax compiles by itself (an inner ``jax.jit``) is one equation with a jaxpr inside,
which the pass enters. Loops, branches and unknown equations are opaque: each of their
results depends on all their operands.

Law of the file: a set of inputs is the bits of one integer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, no_effects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jax.extend.core import JaxprEqn, Var


def marked(indices: jax.Array) -> jax.Array:
    """Marks indices of rows that the program uses itself, and does not return."""
    named: jax.Array = checkpoint_name(indices, _MARK)  # type: ignore[no-untyped-call]
    return named


_MARK: Final = "zstrat rows"


_CALLS: Final = frozenset(
    {
        "jit", "pjit", "closed_call", "core_call", "custom_jvp_call",
        "custom_vjp_call", "checkpoint", "remat2", "shard_map",
    }
)  # fmt: skip
"""Equations that run the jaxpr inside of them once, on their operands."""


class Flow:
    """The dependencies of one traced program."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        self._closed = closed
        self._jaxpr: Any = closed.jaxpr
        self._masks = _masks(self._jaxpr, {})
        self._maker: dict[Var, JaxprEqn] = {
            var: eqn for eqn in self._jaxpr.eqns for var in eqn.outvars
        }

    @property
    def outputs(self) -> int:
        """Number of outputs of the program."""
        return len(self._jaxpr.outvars)

    @property
    def has_effects(self) -> bool:
        """Whether the program prints, or calls back."""
        return bool(self._jaxpr.effects)

    def inputs_of(self, outputs: Sequence[int]) -> int:
        """Returns the inputs that any of these outputs depends on, as bits."""
        inputs = 0
        for number in outputs:
            inputs |= _mask(self._masks, self._jaxpr.outvars[number])
        return inputs

    def origin(self, output: int) -> tuple[Any, ...]:
        """Returns the variables whose elements an output of integers consists of.

        Looks through reshapes and concatenations, which keep the order of elements.
        Outputs of equal origins have equal elements in equal order.
        """
        return tuple(self._origins(self._jaxpr.outvars[output]))

    def input_at_origin(self, output: int) -> int | None:
        """Returns the number of the input that the output is a reshape of, if any."""
        origin = self.origin(output)
        if len(origin) != 1:
            return None
        numbers = [n for n, var in enumerate(self._jaxpr.invars) if var is origin[0]]
        return numbers[0] if numbers else None

    def has_marked(self, name: str) -> bool:
        """Returns whether a value is marked with this name."""
        return any(
            eqn.primitive.name == "name" and eqn.params["name"] == name
            for eqn in self._jaxpr.eqns
        )

    def inputs_of_marked(self, name: str) -> int:
        """Returns the inputs, as bits, that values marked with this name by jax's
        ``checkpoint_name`` depend on."""
        return _marked(self._jaxpr, name)

    def kind_of(self, output: int) -> Any:
        """Returns shape and dtype of an output."""
        return self._jaxpr.outvars[output].aval

    def part(
        self,
        outputs: Sequence[int],
        *,
        with_effects: bool = False,
        evaluate: Callable[[ClosedJaxpr, list[int]], Callable[..., Any]] | None = None,
    ) -> tuple[Callable[..., list[jax.Array]], list[int]]:
        """Extracts the part that computes these outputs: a function, and the numbers of
        its inputs.

        Args:
            with_effects: Include equations with side effects.
            evaluate: Makes the function that evaluates the part, whose inputs have
                these numbers in the whole.
        """
        wanted = [self._jaxpr.outvars[number] for number in outputs]
        needed = {var for var in wanted if not isinstance(var, Literal)}
        kept: list[JaxprEqn] = []
        for eqn in reversed(self._jaxpr.eqns):
            acts = with_effects and bool(eqn.effects)
            if acts or any(var in needed for var in eqn.outvars):
                kept.append(eqn)
                needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
        invars = [var for var in self._jaxpr.invars if var in needed]
        effects = set(no_effects).union(*[eqn.effects for eqn in kept])
        pruned = self._jaxpr.replace(
            invars=invars, outvars=wanted, eqns=kept[::-1], effects=effects
        )
        closed = ClosedJaxpr(pruned, self._closed.consts)
        acts = with_effects and bool(self._jaxpr.effects)
        used = -1 if acts else self.inputs_of(outputs)
        numbers = {var: n for n, var in enumerate(self._jaxpr.invars)}
        run: Callable[..., Any] = jaxpr_as_fun(closed)
        if evaluate is not None:
            run = evaluate(closed, [numbers[var] for var in invars])
        inputs = [numbers[var] for var in invars if used >> numbers[var] & 1]

        def part(*given: Any) -> list[jax.Array]:
            known = dict(zip(inputs, given, strict=True))
            filled = [
                known[number]
                if (number := numbers[var]) in known
                else jnp.zeros(var.aval.shape, var.aval.dtype)
                for var in invars
            ]
            return list(run(*filled))

        if len(inputs) == len(invars):
            return part, inputs
        # The other inputs go into an inner jit, for other results. These must not be
        # computed, as a loop over placeholders may never end; XLA removes them.
        return jax.jit(part), inputs

    def _origins(self, var: Any) -> Iterator[Any]:
        eqn = None if isinstance(var, Literal) else self._maker.get(var)
        if eqn is None:
            yield var
        elif eqn.primitive.name == "concatenate" and len(var.aval.shape) == 1:
            for operand in eqn.invars:
                yield from self._origins(operand)
        elif _moves_nothing(eqn):
            yield from self._origins(eqn.invars[0])
        else:
            yield var


def _moves_nothing(eqn: Any) -> bool:
    """Returns whether an equation returns the elements of its operand, in their
    order."""
    match eqn.primitive.name:
        case "reshape":
            # With dimensions it transposes first: ravel(order="F") does that.
            return eqn.params.get("dimensions") is None
        case "copy" | "copy_p" | "squeeze" | "stop_gradient":
            return True
        case "convert_element_type":
            before = eqn.invars[0].aval.dtype
            after = eqn.outvars[0].aval.dtype
            # Into a wider dtype; values may wrap in a smaller one. Random keys have
            # dtypes that are not numpy's.
            is_integer = isinstance(before, np.dtype) and before.kind in "iu"
            return is_integer and np.can_cast(before, after, "safe")
    return False


def _mask(masks: dict[Any, int], var: Any) -> int:
    return 0 if isinstance(var, Literal) else masks.get(var, 0)


def _masks(jaxpr: Any, known: dict[int, list[int]]) -> dict[Any, int]:
    """Finds the inputs that each variable depends on, as bits."""
    masks: dict[Any, int] = {var: 1 << n for n, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        given = [_mask(masks, var) for var in eqn.invars]
        inner = inside(eqn)
        if inner is None:
            union = 0
            for mask in given:
                union |= mask
            masks.update(dict.fromkeys(eqn.outvars, union))
            continue
        if id(inner) not in known:
            within = _masks(inner, known)
            known[id(inner)] = [_mask(within, var) for var in inner.outvars]
        for var, mask in zip(eqn.outvars, known[id(inner)], strict=True):
            masks[var] = _through(mask, given)
    return masks


def _marked(jaxpr: Any, name: str) -> int:
    masks, inputs = _masks(jaxpr, {}), 0
    for eqn in jaxpr.eqns:
        given = [_mask(masks, var) for var in eqn.invars]
        inner = inside(eqn)
        if inner is not None:
            inputs |= _through(_marked(inner, name), given)
        elif eqn.primitive.name == "name" and eqn.params["name"] == name:
            inputs |= given[0]
    return inputs


def _through(mask: int, given: Sequence[int]) -> int:
    """Converts bits of inputs of an inner jaxpr to bits of outer inputs."""
    inputs = 0
    for number, outside in enumerate(given):
        if mask >> number & 1:
            inputs |= outside
    return inputs


def inside(eqn: JaxprEqn) -> Any:
    """Returns the jaxpr that an equation runs once; None if there is none."""
    if eqn.primitive.name not in _CALLS:
        return None
    program = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    if inner is None or len(inner.invars) != len(eqn.invars):
        return None
    return inner if len(inner.outvars) == len(eqn.outvars) else None
