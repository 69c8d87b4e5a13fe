"""Gradients of variables and tables: ``zs.value_and_grad`` and ``zs.grad``.

A differentiated argument may contain variables in place of arrays. `Differentiated`
splits it into the arrays that jax differentiates and the objects that the function gets
for each leaf: the array itself, or the value of a variable that is not sharded.
`Substitution`, a recorder, differentiates variables that the function reads by itself:
reads return arrays of jax's trace.

Everything here is ordinary jax around ordinary reads of variables, so it works inside a
step (reads are captured) and outside of one (reads use the storage, at each call).

`Difference` computes the value and gradients of one call. Without lookups this is
`jax.value_and_grad` under a `Substitution`. If the function has lookups,
`_lookup_discovery` finds them first; jax then differentiates with respect to their
rows, too, and the gradient of a table that is only looked up consists of the gradients
of these rows.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from zstrat.program.trace._eager import Immediate
from zstrat.variables import (
    AbstractVariable,
    IndexedSlices,
    Variable,
    VariableHandle,
    is_staging,
    recorder,
    rows_of_component,
    user_stacklevel,
)

from ._lookup_discovery import (
    DiscoveredLookups,
    LookupDiscovery,
    NotKnownYet,
    Substitution,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.variables import TraceRecorder

    from ._lookup_discovery import SoughtLookup


def _floating(leaf: Any, place: str) -> Any:
    if isinstance(leaf, float | complex):
        return leaf  # jax takes it, and it stays weak
    in_parts = isinstance(leaf, AbstractVariable) and not isinstance(leaf, Variable)
    array = leaf
    if not in_parts:
        array = jnp.asarray(leaf.value() if isinstance(leaf, Variable) else leaf)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        what = f"{array.dtype} array"
        if isinstance(leaf, AbstractVariable):
            what = str(leaf.table if in_parts else leaf.components[0].spec)
        raise TypeError(
            f"cannot differentiate with respect to {place}, {what}: gradients need a "
            "floating dtype. Leave it out of argnums and variables"
        )
    # A table is read only if the function asks for its value: it may be large.
    return None if in_parts else array


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A pytree of arrays and variables, split into its leaves for jax.

    For each leaf, ``arrays`` has the array that jax differentiates, or None for a
    sharded variable, whose value is read only if the function reads it; ``variables``
    has the variable, or None if the leaf is an array. ``treedef`` gives the gradients
    the same structure.
    """

    treedef: Any
    arrays: list[Any]
    variables: list[AbstractVariable | None]

    @staticmethod
    def of(tree: Any, name: str) -> Differentiated:
        """Reads the values of the variables in a tree, in a step as reads of the step,
        otherwise from their storage."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
        leaves = [leaf for _, leaf in paths]
        arrays = [_floating(leaf, f"{name}{keystr(path)}") for path, leaf in paths]
        variables = [
            leaf if isinstance(leaf, AbstractVariable) else None for leaf in leaves
        ]
        return Differentiated(treedef, arrays, variables)

    @property
    def given(self) -> list[tuple[Any, Variable | None]]:
        """Pairs of an array and the variable whose value it is (None: no variable)."""
        return [
            (array, variable if isinstance(variable, Variable) else None)
            for array, variable in zip(self.arrays, self.variables, strict=True)
            if array is not None
        ]

    def rebuilt(self, arrays: Iterator[Any]) -> Any:
        """Rebuilds the tree with other arrays; sharded variables stay."""
        return self.treedef.unflatten(
            [
                variable if array is None else next(arrays)
                for array, variable in zip(self.arrays, self.variables, strict=True)
            ]
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """One call of ``zs.value_and_grad``.

    ``call`` calls the differentiated function with one list of arrays in place of those
    of ``cuts`` (the differentiated arguments); ``own`` are the variables that the
    function reads by itself.
    """

    call: Callable[[Sequence[Any], Substitution | None], Any]
    outer: TraceRecorder | None
    has_aux: bool
    cuts: Sequence[Differentiated]
    own: Differentiated

    def computed(self) -> tuple[Any, list[list[Any]]]:
        """Computes the value (and aux), and the gradient of each leaf of ``cuts`` and
        ``own``."""
        given = [array for cut in self.cuts for array, _ in cut.given]
        # By key: a variable that occurs twice has one gradient, not two halves.
        values = {v.spec.key: array for array, v in self.own.given if v is not None}
        if not self._late():
            recordings: list[Substitution] = []

            def attempt(given: Any, values: Any) -> Any:
                # Without a recorder reads are refused: jax would keep their values.
                if self.outer is None and is_staging():
                    return self.call(given, None)
                recordings.append(Substitution(self.outer, values, self._handed(given)))
                return self.call(given, recordings[-1])

            # Optimistic: most functions have no lookups, and are traced once.
            differentiate = jax.value_and_grad(attempt, (0, 1), has_aux=self.has_aux)
            try:
                value, (of_given, of_values) = differentiate(given, values)
            except NotKnownYet as met:
                # An outer differentiated function needs the rows.
                if not recordings or met.by is not recordings[-1]:
                    raise
            else:
                left = iter(of_given)
                gradients = [[next(left) for _ in cut.given] for cut in self.cuts]
                keys = [v.spec.key for _, v in self.own.given if v is not None]
                return value, [*gradients, [of_values[key] for key in keys]]
        return self._with_lookups(given, values)

    def _with_lookups(
        self, given: list[Any], values: dict[int, jax.Array]
    ) -> tuple[Any, list[list[Any]]]:
        # Outside of steps rows are read at once, from where they are stored.
        outer = Immediate() if self.outer is None else self.outer
        stand_for: list[VariableHandle | None]
        stand_for = [variable for cut in self.cuts for _, variable in cut.given]
        discovered = LookupDiscovery(
            self._plain, outer, given, stand_for, values, self._late()
        ).run()
        # Rows of integers have no gradient.
        floating = [
            n
            for n, rows in enumerate(discovered.rows)
            if jnp.issubdtype(rows.dtype, jnp.inexact)
        ]

        def inner(given: Any, values: Any, late: Any, rows: Any) -> Any:
            all_rows = list(discovered.rows)
            for number, array in zip(floating, rows, strict=True):
                all_rows[number] = array
            recording = Substitution(
                self.outer,
                {**values, **late},
                self._handed(given),
                rows_of=discovered.rows_of(all_rows),
            )
            return self.call(given, recording)

        differentiate = jax.value_and_grad(inner, (0, 1, 2, 3), has_aux=self.has_aux)
        rows = [discovered.rows[number] for number in floating]
        value, gradients = differentiate(given, values, discovered.late, rows)
        of_given, of_values, of_late, of_rows = gradients
        looked_up = [
            _LookedUp(discovered.sought[n], discovered.ids[n], gradient)
            for n, gradient in zip(floating, of_rows, strict=True)
        ]
        gathered = _Gathered(discovered, of_given, {**of_values, **of_late}, looked_up)
        return value, gathered.arranged(self.cuts, self.own)

    def _plain(self, given: Sequence[Any], recording: Substitution) -> Any:
        result = self.call(given, recording)
        return result[0] if self.has_aux else result

    def _handed(self, given: Sequence[Any]) -> list[tuple[Any, VariableHandle | None]]:
        stand_for = [variable for cut in self.cuts for _, variable in cut.given]
        return list(zip(given, stand_for, strict=True))

    def _late(self) -> dict[int, VariableHandle]:
        """Returns the components of sharded variables, whose values are read only if
        the function reads them, by key."""
        return {
            part.spec.key: part
            for cut in (*self.cuts, self.own)
            for array, variable in zip(cut.arrays, cut.variables, strict=True)
            if array is None and variable is not None
            for part in variable.components
        }


@dataclass(frozen=True, slots=True)
class _LookedUp:
    """A lookup, and the gradient of the rows that it returned."""

    sought: SoughtLookup
    ids: jax.Array
    gradient: jax.Array

    @property
    def flat_ids(self) -> jax.Array:
        return self.ids.reshape(-1)

    @property
    def flat(self) -> jax.Array:
        row = self.sought.table.shape[1:]
        return self.gradient.reshape(self.ids.size, *row)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The gradients that jax has computed: of given arrays by number, of variables'
    values by key, and of looked-up rows."""

    found: DiscoveredLookups
    of_given: Sequence[jax.Array]
    of_keys: dict[int, jax.Array]
    looked_up: Sequence[_LookedUp]

    def arranged(
        self, cuts: Sequence[Differentiated], own: Differentiated
    ) -> list[list[Any]]:
        """Returns the gradients in the order of the leaves: a list for each of
        ``cuts``, then one for ``own``."""
        numbers = iter(range(len(self.of_given)))
        parts = [[self._of_leaf(v, numbers) for v in cut.variables] for cut in cuts]
        parts.append([self._of_leaf(v, None) for v in own.variables])
        return parts

    def _of_leaf(
        self, variable: AbstractVariable | None, numbers: Iterator[int] | None
    ) -> Any:
        if isinstance(variable, Variable) or variable is None:
            number = None if numbers is None else next(numbers)
            if variable is None:
                assert number is not None
                return self.of_given[number]
            return self._of_variable(variable, number)
        return self._in_parts(variable)

    def _of_variable(self, variable: VariableHandle, number: int | None) -> Any:
        """Returns the gradient of a variable: by ``number`` if it is an argument, and
        with ``number`` None if the function reads it by itself."""
        key = variable.spec.key
        lookups = [x for x in self.looked_up if _meets(x.sought, key, number)]
        if number is None:
            dense, used = self.of_keys[key], key in self.found.used_keys
        else:
            dense, used = self.of_given[number], number in self.found.used_given
        # Only rows, if only lookups use it: a dense gradient would be as large as the
        # table.
        # Rows of a list are numbered over all its variables, which fits none of them.
        if lookups and not used and all(len(x.sought.via) == 1 for x in lookups):
            return _slices(lookups, variable.shape, variable.dtype)
        return self._dense(variable, dense, lookups, number)

    def _in_parts(self, variable: AbstractVariable) -> Any:
        table = variable.table
        keys = set(table.keys)
        lookups = [
            x
            for x in self.looked_up
            if any(_meets(x.sought, key, None) for key in keys)
        ]
        # A variable that is read whole, without an effect on the result, has a zero
        # gradient as any array: momentum updates it. With lookups a read may be only
        # for its shape.
        dense = self.found.used_keys if lookups else self.of_keys.keys()
        if not keys & dense and all(x.sought.table == table for x in lookups):
            if not lookups:
                _warn_of_unused(variable)
            return _slices(lookups, variable.shape, variable.dtype)
        parts = [
            self._dense(part, self.of_keys.get(part.spec.key), lookups, None)
            for part in variable.components
        ]
        return jnp.concatenate(parts)

    def _dense(
        self,
        variable: VariableHandle,
        dense: jax.Array | None,
        lookups: Sequence[_LookedUp],
        number: int | None,
    ) -> jax.Array:
        if dense is None:
            dense = jnp.zeros(variable.shape, variable.dtype)
        for x in lookups:
            for place, component in enumerate(x.sought.table.components):
                same = component.spec.key == variable.spec.key
                if same and x.sought.via[place] == number:
                    local = rows_of_component(x.sought.table, place, x.flat_ids)
                    dense = dense.at[local].add(x.flat)
        return dense


def _warn_of_unused(variable: AbstractVariable) -> None:
    warnings.warn(
        f"the result does not depend on ShardedVariable {variable.name!r}: its "
        "gradient has no rows, and optimizers do not change it. (The gradient of a "
        "variable that is not sharded is zeros, with which momentum and weight decay "
        "change it; zeros would be as large as the table.) Leave it out of argnums and "
        "variables",
        stacklevel=user_stacklevel(),
    )


def _meets(sought: SoughtLookup, key: int, number: int | None) -> bool:
    """Returns whether a lookup uses the variable ``key``: through the given array
    ``number``, or, if that is None, by itself."""
    return any(
        component.spec.key == key and via == number
        for component, via in zip(sought.table.components, sought.via, strict=True)
    )


def _slices(
    lookups: Sequence[_LookedUp], shape: tuple[int, ...], dtype: Any
) -> IndexedSlices:
    if not lookups:
        values = jnp.zeros((0, *shape[1:]), dtype)
        return IndexedSlices(values, jnp.zeros(0, jnp.int32), shape)
    if len(lookups) == 1:
        return IndexedSlices(lookups[0].flat, lookups[0].flat_ids, shape)
    ids = [x.flat_ids for x in lookups]
    # The wider dtype holds all ids; it depends on whether jax has 64 bits.
    if len({x.dtype for x in ids}) > 1:
        wide: Any = jax.dtypes.canonicalize_dtype(jnp.int64)
        ids = [x.astype(wide) for x in ids]
    return IndexedSlices(
        jnp.concatenate([x.flat for x in lookups]), jnp.concatenate(ids), shape
    )


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
        fn: Returns a scalar, or ``(scalar, aux)`` with ``has_aux``. The function must
            not update variables or draw elements; return what is needed for that as
            ``aux``.
        argnums: Positions of the arguments to differentiate: one number, whose gradient
            is returned by itself, or several, whose gradients are a tuple. Each of
            these arguments is an array, a `Variable`, a `ShardedVariable` or a pytree
            of them. ``fn`` gets arrays in place of variables, which `embedding_lookup`
            accepts for these variables, and a `ShardedVariable` as itself; the gradient
            has the argument's structure. Default: 0, or no argument if ``variables`` is
            given.
        variables: A variable or a pytree of variables that ``fn`` reads by itself, with
            ``v.value()`` or in arithmetic (as with TF's GradientTape); gradients have
            the same structure; a variable that occurs twice has the same gradient
            twice. With ``argnums`` too, the gradients are the pair ``(of the arguments,
            of the variables)``.

    The gradient of a variable is dense. If ``fn`` only looks up rows of the variable,
    the gradient is an `IndexedSlices` of these rows, in the order of the lookups, with
    duplicates. If ``fn`` does not read a `ShardedVariable`, its gradient has no rows,
    with a warning: momentum does not change the variable. Variables that are looked up
    together as a list have dense gradients: join them in a `ShardedVariable`. With
    lookups ``fn`` is traced several times, and its ids are computed once separately.

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
    """Makes a function that returns only the gradients, or ``(gradients, aux)``; the
    arguments are those of `value_and_grad`."""
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
