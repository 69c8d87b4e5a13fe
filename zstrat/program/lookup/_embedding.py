"""``zs.embedding_lookup``: looks up rows of a table by ids, and combines rows.

In a step the looked-up rows arrive with its other reads; only these rows are sent, each
of them once. Under `zs.value_and_grad` their gradient is the gradient of the table.
Outside of steps the rows are read at once from where they are stored. Rows of plain
arrays are looked up in the arrays.

``zs.embedding_lookup_sparse`` combines the rows of several ids. jax computes with fixed
shapes, so ids of different lengths (`RaggedIds`) are either a padded array with a mask,
or pairs of an id and the row that it belongs to. Law: padding causes no fetch of a row,
and no update of one by an optimizer.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.program.gradients._lookup_discovery import Substitution
from zstrat.program.trace import _refusals
from zstrat.program.trace._eager import Immediate
from zstrat.program.trace._wide import whole
from zstrat.variables import (
    ABSENT,
    AbstractVariable,
    Table,
    TableLayout,
    Variable,
    VariableHandle,
    array_given,
    integers,
    is_staging,
    reaching,
    recorder,
    require_untruncated,
    require_whole_ids,
    traced_ids,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


_STRATEGIES: Final = {"div": TableLayout.DIV, "mod": TableLayout.MOD}


def embedding_lookup(
    params: Any,
    ids: Any,
    max_norm: float | None = None,
    *,
    partition_strategy: str = "div",
) -> jax.Array:
    """Looks up rows of a table. The result has the shape ``ids.shape + row``, in the
    order of ``ids``.

    In a step, call this at the top level or under `zs.value_and_grad`. Ids may be
    computed from any value of the step, also from rows of other lookups, which costs
    one more request for each such level. The rows are those from before the step.

    Args:
        params: A `Variable`, a `ShardedVariable`, a `HashTable`, an array, or a list of
            variables or arrays that are the parts of a table.
        ids: Integers of any shape, in ``[0, rows of the table)``: an array, or lists.
            For a `HashTable` any integers of 64 bits.
        max_norm: Rows with a larger L2 norm are scaled down to it.
        partition_strategy: The order of the rows of a list: ``"div"``, one part after
            the other, or ``"mod"``, as in TF's v1 API: row i is row ``i // n`` of part
            ``i % n``.

    Raises:
        ValueError: ``params`` is empty, its parts do not fit each other or the
            strategy, or ids are not integers.
        TypeError: ``params`` is something else.
        IndexError: An id is outside of the table. If ids are known only when the step
            runs, the step raises this then; a lookup in an array, or in a variable on
            devices of this process (`MirroredStrategy`, say), gives a row of nan
            instead, as in jax.
        RuntimeError: Called inside a function that jax transforms, or the same step has
            updated the table.
    """
    return lookup(params, ids, None, max_norm, partition_strategy)


def lookup(
    params: Any, ids: Any, valid: Any, max_norm: float | None, partition_strategy: str
) -> jax.Array:
    """Looks up rows as `embedding_lookup`, for the ids that are ``valid``: a mask of
    their shape, or None for all.

    Other ids give arbitrary rows; nothing is fetched or updated for them.
    """
    if max_norm is not None and not isinstance(max_norm, jax.Array):
        if not isinstance(max_norm, int | float | np.number | np.ndarray):
            raise TypeError(f"max_norm must be a number or None, got {max_norm!r:.80}")
        if max_norm < 0:
            raise ValueError(f"max_norm must not be negative, got {max_norm}")
    if partition_strategy not in _STRATEGIES:
        raise ValueError(
            f"partition_strategy must be 'div' or 'mod', got {partition_strategy!r}"
        )
    layout = _STRATEGIES[partition_strategy]
    table, via = _table(params, layout)
    ids = _ids_given(ids, "ids" if table is None else f"ids of {table}")
    if table is not None and not _is_immediate():
        require_whole_ids(table, ids)
    if valid is not None:
        ids = _masked(ids, valid, table)
    if table is None:
        rows = _taken(_parts(params), ids, layout)
    else:
        rows = _looked_up(table, ids, via)
    return rows if max_norm is None else _clipped(rows, np.ndim(ids), max_norm)


def _ids_given(ids: Any, what: str) -> Any:
    """Converts ids to an array. Ids may be a variable, or lists of numbers, which may
    be traced."""
    ids = array_given(ids)
    return integers(ids, what) if isinstance(ids, list | tuple) else ids


def _known(given: Any) -> Any:
    """Converts ids to a numpy array unless they are traced, so that ids that are known
    while a step is traced can be checked."""
    given = array_given(given)
    return given if isinstance(given, jax.core.Tracer) else np.asarray(given)


def _downcast(ids: Any) -> jax.Array:
    """Casts ids to jax's dtype. Ids that are too large become the largest integer, not
    the id of another row."""
    dtype = jax.dtypes.canonicalize_dtype(ids.dtype)
    if dtype != ids.dtype:
        ids = np.clip(ids, np.iinfo(dtype).min, np.iinfo(dtype).max)
    return jnp.asarray(ids, dtype)


def _is_immediate() -> bool:
    """Returns whether lookups are executed at once, because no step is being traced."""
    return isinstance(recorder.get(), Immediate | None)


def _signed(table: Table, ids: Any) -> Any:
    """Casts unsigned ids of a hash table to signed ones, different ids to different
    ones. Raises as `require_whole_ids`."""
    if ids.dtype.kind != "u" or ids.dtype.itemsize < 4:
        return ids
    if _is_immediate() and not isinstance(ids, jax.core.Tracer):
        return np.asarray(ids).astype(np.int64)
    require_whole_ids(table, ids)
    ids, signed = jnp.asarray(ids), jax.dtypes.canonicalize_dtype(np.int64)
    # With 32 bits some are negative in the trace, not where it is evaluated.
    return (whole(ids) if signed == np.int32 else ids).astype(signed)


def _masked(ids: Any, valid: Any, table: Table | None) -> Any:
    """Replaces ids that are not valid: by `ABSENT` if they are ids of a table, else by
    0; in numpy if nothing is traced."""
    fill = 0 if table is None else ABSENT
    if table is not None and table.is_hashed:
        ids = _signed(table, ids)
    xp: Any = np
    wide = np.dtype(np.int64)
    if any(isinstance(array, jax.core.Tracer) for array in (ids, valid)):
        xp, wide, ids = jnp, jax.dtypes.canonicalize_dtype(wide), _downcast(ids)
    # `ABSENT` has 32 bits.
    if ids.dtype.itemsize < 4:
        ids = ids.astype(np.int32)
    elif ids.dtype.kind == "u":
        # Too large for a signed dtype: the largest, which is not a row either.
        most = min(np.iinfo(ids.dtype).max, np.iinfo(wide).max)
        ids = xp.minimum(ids, xp.array(most, ids.dtype)).astype(wide)
    fills = xp.full(ids.shape, fill, ids.dtype)
    # An id with the value of `ABSENT` is outside of the table, and must not pass for
    # padding.
    if table is not None and not table.is_hashed:
        ids = xp.where(ids == fills, fills - 1, ids)
    return xp.where(valid, ids, fills)


def _looked_up(table: Table, ids: Any, via: Sequence[int | None]) -> jax.Array:
    recording = recorder.get()
    if recording is None:
        if is_staging():
            raise _refusals.lookup_not_ready(table)
        _require_integers(ids, str(table))
        return Immediate().lookup(table, ids)
    for component in table.components:
        require_untruncated(component.spec)
    if table.is_hashed and isinstance(recording, Immediate):
        return recording.lookup(table, ids)  # before jax casts them to 32 bits
    index = traced_ids(table, ids)
    if isinstance(recording, Substitution):
        return recording.lookup(table, index, via)
    return recording.lookup(table, index)


def _taken(parts: Sequence[Any], ids: Any, layout: TableLayout) -> jax.Array:
    """Looks up rows in arrays, which are the parts of a table."""
    arrays = [jnp.asarray(part) for part in parts]
    _require_alike([(array.shape, array.dtype) for array in arrays], layout)
    whole = arrays[0]
    if len(arrays) > 1 and layout is TableLayout.DIV:
        whole = jnp.concatenate(arrays)
    elif len(arrays) > 1:
        # Row i is row i // n of part i % n: parts are interleaved, and the padding of
        # shorter ones comes last.
        height = arrays[0].shape[0]
        padding = [(0, 0)] * (arrays[0].ndim - 1)
        full = [jnp.pad(a, [(0, height - a.shape[0]), *padding]) for a in arrays]
        rows = sum(a.shape[0] for a in arrays)
        whole = jnp.stack(full, 1).reshape(-1, *arrays[0].shape[1:])[:rows]
    what = f"an array {whole.dtype}{list(whole.shape)}"
    _require_integers(ids, what)
    if not isinstance(ids, jax.core.Tracer):
        known, rows = np.asarray(ids), whole.shape[0]
        outside = (known < 0) | (known >= rows)
        if outside.any():
            wrong = known[outside].flat[0]
            raise IndexError(f"{what} has no row {wrong}: ids are in [0, {rows})")
        return jnp.take(whole, jnp.asarray(ids), axis=0)
    # After the last row: jax would count negative ones from the end.
    index = reaching(ids)
    return jnp.take(whole, jnp.where(index < 0, whole.shape[0], index), axis=0)


def _table(params: Any, layout: TableLayout) -> tuple[Table | None, list[int | None]]:
    """Makes a table of variables; None if the parts are arrays.

    Also returns, for each component, the number of the array that replaces it in a
    differentiated function, or None.
    """
    parts = _parts(params)
    if len(parts) == 1 and isinstance(parts[0], AbstractVariable):
        table = parts[0].table
        if layout is TableLayout.MOD and len(table.components) > 1:
            raise ValueError(
                f"partition_strategy='mod' is for lists, but {table} is sharded in "
                "ranges of rows: leave it out"
            )
        return table, [None] * len(table.components)
    parts_found: list[tuple[VariableHandle, int | None]] = []
    for part in parts:
        variable = _variable(part)
        if variable is None:
            return None, []
        parts_found.append(variable)
    shapes = [(variable.shape, variable.dtype) for variable, _ in parts_found]
    _require_alike(shapes, layout)
    components = tuple([variable for variable, _ in parts_found])
    name = "+".join(variable.name for variable in components)
    return Table(name, components, layout), [via for _, via in parts_found]


def _variable(part: Any) -> tuple[VariableHandle, int | None] | None:
    """Returns the variable that a part is, or whose value it is in a differentiated
    function, with the number of that value; None for other arrays."""
    if isinstance(part, Variable):
        return part, None
    if isinstance(part, AbstractVariable):
        raise ValueError(
            f"{part.table} is sharded already: pass it by itself, not in a list"
        )
    recording = recorder.get()
    return recording.behind(part) if isinstance(recording, Substitution) else None


def _parts(params: Any) -> Sequence[Any]:
    parts = params if isinstance(params, list | tuple) else [params]
    if params is None or not parts:
        raise ValueError("embedding_lookup needs params: a variable, or a list of them")
    kinds = (AbstractVariable, jax.Array, np.ndarray)
    wrong = [type(part).__name__ for part in parts if not isinstance(part, kinds)]
    if wrong:
        raise TypeError(
            "embedding_lookup takes a zs.Variable, a zs.ShardedVariable, a "
            f"zs.HashTable, an array, or a list of variables or arrays; got {wrong[0]}"
        )
    return parts


def _require_alike(
    kinds: Sequence[tuple[tuple[int, ...], Any]], layout: TableLayout
) -> None:
    shapes = [shape for shape, _ in kinds]
    if any(not shape for shape in shapes):
        raise ValueError("embedding_lookup: params is a scalar and has no rows")
    if len({(shape[1:], dtype) for shape, dtype in kinds}) > 1:
        raise ValueError(
            "embedding_lookup: the parts of a table differ in dtype, or in shape "
            f"beyond the first axis: {[f'{d}{list(s)}' for s, d in kinds]}"
        )
    heights = [shape[0] for shape in shapes]
    rows, count = sum(heights), len(heights)
    expected = [-(-(rows - n) // count) for n in range(count)]
    if layout is TableLayout.MOD and heights != expected:
        raise ValueError(
            f"partition_strategy='mod' distributes {rows} rows round-robin: expected "
            f"parts of {expected} rows, got {heights}"
        )


def _require_integers(ids: Any, what: str) -> None:
    dtype = ids.dtype if isinstance(ids, jax.Array) else np.asarray(ids).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"ids of {what} must be integers, got {dtype}")


def _clipped(rows: jax.Array, rank: int, max_norm: Any) -> jax.Array:
    limit = jnp.asarray(max_norm, rows.dtype)
    axes = tuple(range(rank, rows.ndim))
    square = jnp.sum(rows * rows, axis=axes, keepdims=True)
    # The derivative of the root is infinite at zero.
    norm = jnp.sqrt(jnp.where(square > 0, square, jnp.ones_like(square)))
    # A row of exactly this norm has the gradient of scaled rows, as in TF.
    scaled = (square > 0) & (norm >= limit)
    return jnp.where(scaled, rows * (limit / norm), rows)


_COMBINERS: Final = ("sum", "mean", "sqrtn")


@dataclass(frozen=True, slots=True)
class RaggedIds:
    """Rows of ids of different lengths; a pytree. Make one with `padded` or `pairs`."""

    ids: Any
    mask: Any = None
    row_ids: Any = None
    nrows: int | None = None

    @staticmethod
    def padded(ids: Any, mask: Any) -> RaggedIds:
        """Makes rows of ids from an array ``[..., n]`` and a mask of the same shape."""
        return RaggedIds(ids, mask)

    @staticmethod
    def pairs(values: Any, row_ids: Any, nrows: int) -> RaggedIds:
        """Makes rows of ids from pairs: the id ``values[i]`` belongs to row
        ``row_ids[i]`` of ``[0, nrows)``, or is ignored if there is no such row.

        For row splits (a RaggedTensor) ``row_ids`` are ``np.repeat(np.arange(nrows),
        np.diff(row_splits))``, for a SparseTensor ``indices[:, 0]``.
        """
        return RaggedIds(values, None, row_ids, operator.index(nrows))


jax.tree_util.register_pytree_node(
    RaggedIds,
    lambda ragged: ((ragged.ids, ragged.mask, ragged.row_ids), ragged.nrows),
    lambda nrows, leaves: RaggedIds(*leaves, nrows),
)


def embedding_lookup_sparse(
    params: Any,
    ids: Any,
    weights: Any = None,
    combiner: str = "mean",
    max_norm: float | None = None,
    *,
    partition_strategy: str = "div",
) -> jax.Array:
    """Looks up and combines rows of a table: gives one row for each row of ids.

    A row without ids, or whose weights sum to 0, gives zeros (``"sum"``: its sum).

    Args:
        params: As for `embedding_lookup`; so are ``max_norm`` (applied to each
            looked-up row) and ``partition_strategy``.
        ids: `RaggedIds`, or a tuple ``(ids, mask)`` or ``(values, row_ids, nrows)``.
        weights: One weight for each id, of a floating dtype; None: all are one.
        combiner: ``"sum"``, ``"mean"`` (divides by the sum of the weights) or
            ``"sqrtn"`` (divides by the root of the sum of their squares).

    Returns:
        ``[..., row]`` for ids ``[..., n]``, or ``[nrows, row]``.

    Raises:
        ValueError: Shapes do not fit, ids are not integers, weights are not floats, or
            the combiner is unknown. Otherwise as `embedding_lookup`.
    """
    bag = _Bag.of(ids, weights)
    return bag.combined(params, combiner, max_norm, partition_strategy)


def safe_embedding_lookup_sparse(
    params: Any,
    ids: Any,
    weights: Any = None,
    combiner: str = "mean",
    default_id: int | None = None,
    max_norm: float | None = None,
    *,
    partition_strategy: str = "div",
) -> jax.Array:
    """Looks up as `embedding_lookup_sparse`, and ignores ids below 0, except those of a
    `HashTable`, for which they are ordinary ids.

    ``"mean"`` and ``"sqrtn"`` also ignore ids whose weight is not positive, ``"sum"``
    uses every weight. A row without remaining ids gives the row of ``default_id``, or
    zeros.
    """
    bag = _Bag.of(ids, weights)
    table = _hashed_table(params)
    if table is None:
        bag = bag.with_valid(bag.valid & (bag.ids >= 0))
    if combiner != "sum" and bag.weights is not None:
        bag = bag.with_valid(bag.valid & (bag.weights > 0))
    if default_id is not None:
        bag = bag.filled(operator.index(default_id), table)
    return bag.combined(params, combiner, max_norm, partition_strategy)


def _hashed_table(params: Any) -> Table | None:
    for part in params if isinstance(params, list | tuple) else [params]:
        if isinstance(part, AbstractVariable) and part.table.is_hashed:
            return part.table
    return None


def _with_default(
    ids: Any, default: int, shape: tuple[int, ...], table: Table | None
) -> Any:
    """Adds a default id to each row of ids; ids of a hash table are not downcast.

    Raises:
        ValueError: The default id does not fit the dtype of ids that are traced, or as
            `require_whole_ids`.
    """
    if table is not None:
        ids = _signed(table, ids)
        if not isinstance(ids, jax.core.Tracer):
            defaults = np.full(shape, default, np.int64)
            return np.concatenate([ids.astype(np.int64), defaults], axis=-1)
    own = _downcast(ids)
    fit = np.iinfo(own.dtype)
    if not fit.min <= default <= fit.max:
        raise ValueError(
            f"default_id={default} does not fit {own.dtype}, the dtype of ids in a "
            "step: choose one of 32 bits, or switch on jax_enable_x64"
        )
    return jnp.concatenate([own, jnp.full(shape, default, own.dtype)], axis=-1)


@dataclass(frozen=True, slots=True)
class _Bag:
    """Ids, their mask and their weights, all of one shape; numpy arrays if their values
    are known.

    With ``row_ids`` they are pairs of an id and its row; otherwise the ids along the
    last axis are combined.
    """

    ids: jax.Array | np.ndarray
    valid: jax.Array | np.ndarray
    weights: jax.Array | None
    row_ids: jax.Array | np.ndarray | None
    nrows: int

    @staticmethod
    def of(given: Any, weights: Any) -> _Bag:
        ragged = _ragged(given)
        ids = _known(_ids_given(ragged.ids, "ids"))
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"ids must be integers, got {ids.dtype}")
        ids = reaching(ids)  # as far as the default id, too
        row_ids, nrows = None, ragged.nrows or 0
        if ragged.row_ids is None:
            valid = _known(ragged.mask)
            if ids.ndim < 1 or valid.shape != ids.shape or valid.dtype != jnp.bool_:
                raise ValueError(
                    f"padded ids [..., n] need a mask of booleans of the same shape; "
                    f"got ids {list(ids.shape)} and mask {valid.dtype}"
                    f"{list(valid.shape)}"
                )
        else:
            row_ids = _known(_ids_given(ragged.row_ids, "row_ids"))
            integers = jnp.issubdtype(row_ids.dtype, jnp.integer)
            if ids.ndim != 1 or row_ids.shape != ids.shape or not integers:
                raise ValueError(
                    f"pairs need values [m] and integer row_ids [m]; got values "
                    f"{list(ids.shape)} and row_ids {row_ids.dtype}"
                    f"{list(row_ids.shape)}"
                )
            row_ids = reaching(row_ids)
            valid = (row_ids >= 0) & (row_ids < nrows)
        if weights is not None:
            weights = jnp.asarray(weights)
            floats = jnp.issubdtype(weights.dtype, jnp.floating)
            if weights.shape != ids.shape or not floats:
                raise ValueError(
                    f"weights must be floats of shape {list(ids.shape)}, got "
                    f"{weights.dtype}{list(weights.shape)}"
                )
        return _Bag(ids, valid, weights, row_ids, nrows)

    def with_valid(self, valid: Any) -> _Bag:
        return replace(self, valid=valid)

    def filled(self, default: int, table: Table | None) -> _Bag:
        """Adds the default id to each row; it is valid only in rows without another
        valid id."""
        empty = self._summed(self.valid.astype(jnp.int32)) == 0
        row_ids = self.row_ids
        if row_ids is not None:
            row_ids = _downcast(row_ids)
            every = jnp.arange(self.nrows, dtype=row_ids.dtype)
            row_ids = jnp.concatenate([row_ids, every])
        else:
            empty = empty[..., None]
        weights = self.weights
        if weights is not None:
            ones = jnp.ones(empty.shape, weights.dtype)
            weights = jnp.concatenate([weights, ones], axis=-1)
        return _Bag(
            _with_default(self.ids, default, empty.shape, table),
            jnp.concatenate([self.valid, empty], axis=-1),
            weights,
            row_ids,
            self.nrows,
        )

    def combined(
        self, params: Any, combiner: str, max_norm: float | None, strategy: str
    ) -> jax.Array:
        if combiner not in _COMBINERS:
            raise ValueError(f"combiner must be one of {_COMBINERS}, got {combiner!r}")
        rows = lookup(params, self.ids, self.valid, max_norm, strategy)
        dtype = rows.dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"rows to combine must be floats, got {dtype}")
        # Narrower floats would lose the digits of sums.
        wide: Any = dtype if dtype.itemsize > 4 else jnp.float32
        weights = self.valid.astype(wide)
        if self.weights is not None:
            # Not multiplied: weights of padding may be nan.
            weights = jnp.where(self.valid, self.weights.astype(wide), weights)
        trailing = (1,) * (rows.ndim - weights.ndim)
        valid = self.valid.reshape(*self.valid.shape, *trailing)
        rows = jnp.where(valid, rows.astype(wide), jnp.zeros((), wide))
        total = self._summed(rows * weights.reshape(valid.shape))
        if combiner != "sum":
            by = self._summed(weights if combiner == "mean" else weights**2)
            by = by.reshape(*by.shape, *trailing)
            # Divided by one where there is nothing, or the gradient would be nan.
            nothing, by = by == 0, jnp.where(by == 0, jnp.ones_like(by), by)
            by = by if combiner == "mean" else jnp.sqrt(by)
            total = jnp.where(nothing, jnp.zeros_like(total), total / by)
        return total.astype(dtype)

    def _summed(self, x: Any) -> jax.Array:
        if self.row_ids is None:
            return jnp.sum(x, axis=self.ids.ndim - 1)
        return jax.ops.segment_sum(x, self.row_ids, self.nrows)


def _ragged(given: Any) -> RaggedIds:
    match given:
        case RaggedIds():
            return given
        case (ids, mask):
            return RaggedIds.padded(ids, mask)
        case (values, row_ids, nrows):
            return RaggedIds.pairs(values, row_ids, nrows)
    raise ValueError(
        "ids must be zs.RaggedIds, a tuple (ids, mask) of padded ids, or a tuple "
        f"(values, row_ids, nrows); got {type(given).__name__}"
    )
