"""Gradients with respect to variables: ``zs.value_and_grad`` and ``zs.grad``.

A differentiated argument may contain variables in place of arrays. `Differentiated`
splits it into the arrays that jax differentiates and the objects that the function gets
for each leaf: the array itself, or the value of a variable that is not sharded.
`Substitution`, a recorder, differentiates variables that the function reads by itself:
reads return arrays of jax's trace.

If the function looks up rows, `_lookup_discovery` finds them first, and the gradient of
a table that is only looked up is the gradient of these rows (`_difference`).

Everything here is ordinary jax around ordinary reads, so it works inside a step (reads
are captured) and outside of one (reads go to the storage, at each call).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from zstrat.variables import AbstractVariable, recorder

from ._difference import Difference, Differentiated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._lookup_discovery import Substitution

Argnums = int | tuple[int, ...] | list[int]


def value_and_grad(
    fn: Callable[..., Any],
    argnums: Argnums | None = None,
    *,
    variables: Any = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that returns ``(fn(...), gradients)``; as
    ``jax.value_and_grad``.

    Args:
        fn: Returns a scalar, or ``(scalar, aux)`` with ``has_aux``. It must not update
            variables or draw elements; return what is needed for that as ``aux``.
        argnums: Positions of the arguments to differentiate: one number, whose gradient
            is returned by itself, or several, whose gradients are a tuple. Each of
            these arguments is an array, a `Variable`, a `ShardedVariable` or a pytree
            of them. ``fn`` gets arrays in place of variables, which `embedding_lookup`
            accepts for these variables, and a `ShardedVariable` as itself; the gradient
            has the argument's structure. Default: 0, or no argument if ``variables`` is
            given.
        variables: A variable or a pytree of variables that ``fn`` reads by itself, with
            ``v.value()`` or in arithmetic (TF's GradientTape way); gradients have the
            same structure; a variable that occurs twice has the same gradient twice.
            With ``argnums`` too, the gradients are the pair
            ``(of the arguments, of the variables)``.

    The gradient of a variable is dense. If ``fn`` only looks up rows of it, the
    gradient is an `IndexedSlices` of these rows, in the order of the lookups, with
    duplicates. If ``fn`` does not read a `ShardedVariable`, its gradient has no rows,
    with a warning: momentum does not change it. Variables that are looked up together
    as a list have dense gradients: join them in a `ShardedVariable`. With lookups
    ``fn`` is traced several times, and its ids are computed once by themselves.

    Raises:
        ValueError: ``variables`` contains something else, or nothing.

    The returned function raises:
        TypeError: A differentiated leaf is not of a floating or complex dtype.
        RuntimeError: ``fn`` updates a variable or draws an element, or looks up rows
            inside a function that jax transforms.
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
    """Makes a function as `value_and_grad` does, which returns only the gradients, or
    ``(gradients, aux)``."""
    both = value_and_grad(fn, argnums, variables=variables, has_aux=has_aux)
    return _Grad(both, has_aux)


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
        outer = recorder.get()

        def call(given: Sequence[Any], recording: Substitution | None) -> Any:
            rebuilt, left = list(args), iter(given)
            for n, part in zip(numbers, cuts, strict=True):
                rebuilt[n] = part.rebuilt(left)
            if recording is None:
                return self.fn(*rebuilt, **kwargs)
            with recording.recording():
                return self.fn(*rebuilt, **kwargs)

        difference = Difference(call, outer, self.has_aux, cuts, own)
        value, gradients = difference.computed()
        if outer is None:
            # Reads under jax.jit are callbacks (see `Immediate`), which must end before
            # the caller updates the variables.
            jax.block_until_ready((value, gradients))  # type: ignore[no-untyped-call]
        parts = [c.treedef.unflatten(g) for c, g in zip(cuts, gradients, strict=False)]
        return value, self._arranged(parts, own.treedef.unflatten(gradients[-1]))

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


def _require_variables(variables: Any) -> None:
    leaves = jax.tree.leaves(variables)
    wrong = [
        type(leaf).__name__ for leaf in leaves if not isinstance(leaf, AbstractVariable)
    ]
    if wrong or not leaves:
        got = wrong[0] if wrong else "nothing"
        raise ValueError(
            f"variables= takes a zs.Variable or a pytree of them, got {got}"
        )
