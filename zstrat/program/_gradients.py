"""Gradients with respect to variables: ``zs.value_and_grad`` and ``zs.grad``.

A differentiated argument may contain variables in place of arrays. `Differentiated`
cuts it into what jax differentiates and what the function is given in place of each
leaf: the array itself for arrays, the value for dense variables. Variables that the
function reads by itself are differentiated by `Substitution`, a recorder that hands out
the arrays of jax's trace in place of values read from outside.

Everything here is ordinary jax around ordinary reads, so it works inside a step (reads
are captured) and outside of one (reads go to the home, at each call).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from zstrat.variables import Variable, is_staging, recorder

from . import _refusals
from ._eager import Immediate
from ._fresh import apart, current_trace, fresh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.variables import Optimizer, Recorder
    from zstrat.wire._messages import UpdateOp

    from ._iterator import StepIterator

Argnums = int | tuple[int, ...] | list[int]


def value_and_grad(
    fn: Callable[..., Any],
    argnums: Argnums | None = None,
    *,
    variables: Any = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns ``(fn(...), gradients)``; as ``jax.value_and_grad``.

    Args:
        fn: Returns a scalar, or ``(scalar, aux)`` with ``has_aux``. It must not update
            variables or draw elements; return what is needed for that as ``aux``.
        argnums: Positions of the arguments to differentiate: one number, whose gradient
            is returned by itself, or several, whose gradients are a tuple. Each of
            these arguments is an array, a `Variable` or a pytree of both; ``fn`` is
            given arrays in place of the variables, and the gradient has the argument's
            structure. Left out: 0, or no argument if ``variables`` is given.
        variables: A variable or a pytree of variables that ``fn`` reads by itself, with
            ``v.value()`` or in arithmetic (TF's GradientTape way); gradients have the
            same structure, and a variable that is there twice the same gradient twice.
            With ``argnums`` too, the gradients are the pair
            ``(of the arguments, of the variables)``.

    Raises:
        ValueError: ``variables`` contains something else, or nothing.

    The function that is returned raises:
        TypeError: A differentiated leaf is not of a floating or complex dtype.
        RuntimeError: ``fn`` updates a variable or draws an element.
    """
    if variables is not None:
        _require_variables(variables)
    elif argnums is None:
        argnums = 0
    if isinstance(argnums, list):
        argnums = tuple(argnums)
    return _ValueAndGrad(fn, argnums, variables, has_aux)


def grad(
    fn: Callable[..., Any],
    argnums: Argnums | None = None,
    *,
    variables: Any = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """As `value_and_grad`, but returns the gradients, or ``(gradients, aux)``."""
    both = value_and_grad(fn, argnums, variables=variables, has_aux=has_aux)
    return _Grad(both, has_aux)


class Substitution:
    """A recorder that hands out given arrays in place of the values of some variables.

    Other reads go on to ``outer``; updates and draws are refused. If nothing is being
    captured, a substituted read under jax.jit and the like is refused too: jax would
    keep that trace with the array of this one, and `fresh` would compile every
    operation again and again.
    """

    def __init__(self, outer: Recorder | None, values: dict[int, jax.Array]) -> None:
        self.live = outer is None or _is_live(outer)
        """Whether values are real, so that nothing is being captured."""
        self._outer = Immediate() if outer is None else outer
        self._values = values
        inherited: tuple[int, ...] = ()
        if isinstance(outer, Substitution):
            inherited = outer.substituted
        self.substituted: tuple[int, ...] = (*inherited, *sorted(values))
        self._outermost: object = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Substitutes in what is inside; entered in the trace of the given arrays."""
        self._outermost = current_trace()
        before = recorder.set(self)
        try:
            with apart(("live", *self.substituted)) if self.live else fresh():
                yield
        finally:
            recorder.reset(before)

    def read(self, variable: Variable) -> jax.Array:
        key = variable.spec.key
        if key not in self._values:
            return self._outer.read(variable)
        if self.live and current_trace() != self._outermost:
            raise _refusals.live_read_inside(variable.spec)
        return self._values[key]

    def update(
        self,
        variable: Variable,
        op: UpdateOp,
        operands: tuple[jax.Array, ...],
        optimizer: Optimizer | None,
    ) -> None:
        raise _refusals.update_inside(variable.spec, op.name)

    def draw(self, iterator: StepIterator) -> Any:
        raise _refusals.draw_inside()

    def drew(self, leaf: object) -> bool:
        return self._outer.drew(leaf)


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A pytree of arrays and variables, cut for jax.

    ``arrays`` is what jax differentiates, one per leaf; ``treedef`` rebuilds the pytree
    with arrays in place of variables, and gives the gradients the same structure.
    """

    treedef: Any
    arrays: list[jax.Array]

    @staticmethod
    def of(tree: Any, name: str) -> Differentiated:
        """Reads the variables in the tree, through the step or their home."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
        arrays = [_floating(leaf, f"{name}{keystr(path)}") for path, leaf in paths]
        return Differentiated(treedef, arrays)

    def rebuilt(self, arrays: Sequence[Any]) -> Any:
        return self.treedef.unflatten(arrays)


@dataclass(frozen=True, slots=True)
class _ValueAndGrad:
    # A class and not a closure: it is pickled by reference, with its fields.
    fn: Callable[..., Any]
    argnums: int | tuple[int, ...] | None
    variables: Any
    has_aux: bool

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        numbers = self._numbers(len(args))
        cuts = [Differentiated.of(args[n], f"args[{n}]") for n in numbers]
        own = Differentiated.of(self.variables, "variables")
        keys = [v.spec.key for v in jax.tree.leaves(self.variables)]
        # One of each: a variable that is named twice has one gradient, not two halves.
        distinct = dict(zip(keys, own.arrays, strict=True))
        outer = recorder.get()
        # Then reads are refused, and must be: what `Substitution` read would be kept.
        untold = outer is None and is_staging()

        def inner(given: list[list[jax.Array]], values: dict[int, jax.Array]) -> Any:
            rebuilt = list(args)
            for n, part, arrays in zip(numbers, cuts, given, strict=True):
                rebuilt[n] = part.rebuilt(arrays)
            if untold:
                return self.fn(*rebuilt, **kwargs)
            with Substitution(outer, values).recording():
                return self.fn(*rebuilt, **kwargs)

        differentiate = jax.value_and_grad(inner, (0, 1), has_aux=self.has_aux)
        value, (of_args, of_own) = differentiate([c.arrays for c in cuts], distinct)
        if outer is None:
            # Reads under jax.jit are callbacks (see `Immediate`), which must have been
            # made before the caller goes on to update the variables.
            jax.block_until_ready((value, of_args, of_own))  # type: ignore[no-untyped-call]
        parts = [c.rebuilt(g) for c, g in zip(cuts, of_args, strict=True)]
        return value, self._arranged(parts, own.rebuilt([of_own[key] for key in keys]))

    def _numbers(self, count: int) -> tuple[int, ...]:
        numbers = () if self.argnums is None else self.argnums
        numbers = (numbers,) if isinstance(numbers, int) else numbers
        if any(not -count <= n < count for n in numbers):
            raise ValueError(
                f"argnums={self.argnums} asks for gradients of positional arguments, "
                f"but the function was called with {count} of them"
            )
        return tuple(n % count for n in numbers)

    def _arranged(self, parts: list[Any], of_variables: Any) -> Any:
        of_args = parts[0] if isinstance(self.argnums, int) else tuple(parts)
        if self.variables is None:
            return of_args
        return of_variables if self.argnums is None else (of_args, of_variables)


@dataclass(frozen=True, slots=True)
class _Grad:
    both: Callable[..., tuple[Any, Any]]
    has_aux: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value, gradients = self.both(*args, **kwargs)
        return (gradients, value[1]) if self.has_aux else gradients


def _is_live(outer: Recorder) -> bool:
    return isinstance(outer, Immediate) or (
        isinstance(outer, Substitution) and outer.live
    )


def _floating(leaf: Any, place: str) -> jax.Array:
    if isinstance(leaf, float | complex):
        return leaf  # type: ignore[return-value]  # jax takes it, and it stays weak
    array = jnp.asarray(leaf.value() if isinstance(leaf, Variable) else leaf)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        what = str(leaf.spec) if isinstance(leaf, Variable) else f"{array.dtype} array"
        raise TypeError(
            f"cannot differentiate with respect to {place}, {what}: gradients need a "
            "floating dtype. Leave it out of what is differentiated"
        )
    return array


def _require_variables(variables: Any) -> None:
    leaves = jax.tree.leaves(variables)
    wrong = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Variable)]
    if wrong or not leaves:
        found = wrong[0] if wrong else "nothing"
        raise ValueError(
            f"variables= takes a zs.Variable or a pytree of them, got {found}"
        )
