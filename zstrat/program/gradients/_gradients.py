"""Gradients with respect to variables: ``zs.value_and_grad`` and ``zs.grad``.

A differentiated argument may contain variables in place of arrays. `Differentiated`
cuts it into what jax differentiates and what the function is given in place of each
leaf: the array itself for arrays, the value for dense variables. Variables that the
function reads by itself are differentiated by `Substitution`, a recorder that hands out
the arrays of jax's trace in place of values read from outside.

A function that looks rows up is looked through first (`_lookup_discovery`), and the
gradient of a table that it only looked up is one of those rows (`_difference`).

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
    """A function that returns ``(fn(...), gradients)``; as ``jax.value_and_grad``.

    Args:
        fn: Returns a scalar, or ``(scalar, aux)`` with ``has_aux``. It must not update
            variables or draw elements; return what is needed for that as ``aux``.
        argnums: Positions of the arguments to differentiate: one number, whose gradient
            is returned by itself, or several, whose gradients are a tuple. Each of
            these arguments is an array, a `Variable`, a `ShardedVariable` or a pytree
            of them. ``fn`` is given arrays in place of variables, which
            `embedding_lookup` takes for what they stand for, and a `ShardedVariable` as
            itself; the gradient has the argument's structure. Left out: 0, or no
            argument if ``variables`` is given.
        variables: A variable or a pytree of variables that ``fn`` reads by itself, with
            ``v.value()`` or in arithmetic (TF's GradientTape way); gradients have the
            same structure, and a variable that is there twice the same gradient twice.
            With ``argnums`` too, the gradients are the pair
            ``(of the arguments, of the variables)``.

    The gradient of a variable is dense. That of one of which ``fn`` only looks rows up
    is an `IndexedSlices` of these rows, in the order of the lookups, duplicates
    included. That of a `ShardedVariable` which ``fn`` does not read is one without
    rows, with a warning: momentum does not move it. Parts of a list that was looked up
    together have dense gradients: join them in a `ShardedVariable`. With lookups ``fn``
    is traced a few times, and its ids are computed once by themselves.

    Raises:
        ValueError: ``variables`` contains something else, or nothing.

    The function that is returned raises:
        TypeError: A differentiated leaf is not of a floating or complex dtype.
        RuntimeError: ``fn`` updates a variable or draws an element, or looks rows up
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
    """As `value_and_grad`, but the function returns the gradients, or ``(gradients,
    aux)``."""
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
            # Reads under jax.jit are callbacks (see `Immediate`), which must have been
            # made before the caller goes on to update the variables.
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
        found = wrong[0] if wrong else "nothing"
        raise ValueError(
            f"variables= takes a zs.Variable or a pytree of them, got {found}"
        )
