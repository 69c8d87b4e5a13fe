"""`zs.keras.Embedding`, and the choice of embeddings that are tables on servers.

A step reads an embedding that is an ordinary variable as a whole, and sends a gradient
of the same size. If the embedding is a table, the step gets only the rows of its ids
(`_steps`), and returns gradients of these rows.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import keras
import numpy as np

from zstrat.program import KerasWarning
from zstrat.variables import HashTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LARGE: Final = 64 << 20
"""Size in bytes above which a `keras.layers.Embedding` becomes a table, provided that
this changes only the cost of training and not its result."""

_STAND_IN_ROWS: Final = 251
"""Rows of the variable that Keras has in place of a `zs.HashTable`. Any number above 1
works, as updates are traced for any number of rows."""

_is_building: Final[ContextVar[bool]] = ContextVar("zstrat_building", default=False)
"""Whether a model is only called to compute its shapes."""


@keras.saving.register_keras_serializable("zstrat")
class Embedding(keras.layers.Embedding):  # type: ignore[misc]  # Keras has no types
    """An embedding whose gradients are rows, under a `zs.ParameterServerStrategy`.

    A step reads and updates the rows of the ids in its batch. A row without a gradient,
    and the optimizer's state of that row, do not change in that step; in plain Keras,
    optimizers with moments, averages or decay (Adam, RMSprop, weight decay) would
    change such rows. So the user has to choose this class. Under other strategies, and
    without a strategy, it acts as `keras.layers.Embedding`.

    Args:
        input_dim: Number of rows; or a `zs.HashTable` with rows of one axis, which has
            a row for any 64-bit id, and is stored on the servers alone. Its ids may be
            int32 in the model (``keras.Input(dtype="int32")``): look-ups use all 64
            bits of the ids in the data.
        output_dim: Length of a row; optional with a table, which has its own.
        options: Options of `keras.layers.Embedding`; with a table only ``name``,
            ``dtype``, ``trainable``, and ``mask_zero``, for ids of 32 bits.

    Raises:
        TypeError: ``output_dim`` is missing.
        ValueError: The table has rows of several axes or another length, or an option
            was given that the table determines.
    """

    def __init__(
        self, input_dim: int | HashTable, output_dim: int | None = None, **options: Any
    ) -> None:
        table = input_dim if isinstance(input_dim, HashTable) else None
        if table is not None:
            _require_fitting(table, output_dim, options)
            # Keras has to have a variable of some size, whose shape the model follows.
            input_dim, output_dim = _STAND_IN_ROWS, table.dim
            options["embeddings_initializer"] = "zeros"
        elif output_dim is None:
            raise TypeError(
                "zs.keras.Embedding needs output_dim, the length of a row, beside the "
                "number of rows"
            )
        super().__init__(input_dim, output_dim, **options)
        self.table = table
        """The `zs.HashTable` of the layer; None: its rows are a variable of Keras."""

    def call(self, inputs: Any) -> Any:
        """Looks up rows. Returns ``inputs.shape + [output_dim]``.

        Raises:
            RuntimeError: The layer has a `zs.HashTable`, and was called outside of
                `fit`, `evaluate` and `predict`.
        """
        if self.table is None:
            return super().call(inputs)
        if not _is_building.get():
            raise RuntimeError(
                f"layer {self.name!r} looks up rows of {self.table} with 64 bits of "
                "each id, but a model that is called gets 32, as jax has: use predict "
                "of a model that is built, and was compiled in the scope of the "
                "zs.ParameterServerStrategy, or table.lookup(ids)"
            )
        rows = np.zeros((*inputs.shape, self.output_dim), self.table.dtype)
        return keras.ops.cast(rows, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments from which Keras can create the layer again.

        Raises:
            NotImplementedError: The layer has a `zs.HashTable`.
        """
        if self.table is None:
            config: dict[str, Any] = super().get_config()
            return config
        raise NotImplementedError(
            f"layer {self.name!r} cannot be described, as {self.table} is on servers. "
            "Save the model with save_weights and the table with a zs.Checkpoint; make "
            "both by the same code, then load_weights and restore"
        )

    def save_own_variables(self, store: Any) -> None:
        if self.table is None:
            super().save_own_variables(store)
            return
        warnings.warn(
            f"the rows of {self.table} are not in the file that Keras writes: save "
            "them with a zs.Checkpoint",
            KerasWarning,
            stacklevel=2,
        )

    def load_own_variables(self, store: Any) -> None:
        if self.table is None:
            super().load_own_variables(store)


def _require_fitting(
    table: HashTable, output_dim: int | None, options: Mapping[str, Any]
) -> None:
    if len(table.shape) != 2 or output_dim not in (None, table.dim):
        raise ValueError(
            f"an embedding of {table} has rows of one axis and of its length: got "
            f"rows {list(table.shape[1:])} and output_dim={output_dim}"
        )
    if wrong := sorted(set(options) - {"name", "dtype", "trainable", "mask_zero"}):
        raise ValueError(
            f"{wrong[0]}= with {table}: that is for embeddings with a number of rows. "
            "A table has its initializer, and no whole value to regularize"
        )


@contextlib.contextmanager
def building(*, is_on: bool = True) -> Iterator[None]:
    """Makes embeddings with a `zs.HashTable` return zeros in the block, as only shapes
    are needed."""
    token = _is_building.set(is_on)
    try:
        yield
    finally:
        _is_building.reset(token)


def is_large(variable: Any) -> bool:
    """Returns whether a variable is larger than `LARGE`, so that steps should not read
    it as a whole."""
    size = math.prod(variable.shape) * np.dtype(variable.dtype).itemsize
    return bool(size > LARGE)


def warn_of_whole(variables: Sequence[Any], why: str, remedy: str) -> None:
    """Warns that steps read large embeddings as a whole, which costs more than reading
    rows.

    Args:
        why: The reason that rows are not looked up; ``remedy`` says what to change.
    """
    paths = ", ".join(sorted(repr(each.path) for each in variables))
    size = sum(math.prod(v.shape) * np.dtype(v.dtype).itemsize for v in variables)
    warnings.warn(
        f"embeddings {paths} are large ({size / 2**20:.3g} MiB), and each step reads "
        f"all of them and sends gradients of the same size, {why}. {remedy} "
        "(docs/moving_keras.md)",
        KerasWarning,
        stacklevel=3,
    )


def layer_table(layer: Any) -> HashTable | None:
    """Returns the `zs.HashTable` of a layer; None if it has none."""
    return layer.table if isinstance(layer, Embedding) else None


def embeddings_of(layers: Sequence[Any], variables: Sequence[Any]) -> dict[int, Any]:
    """Returns the layers whose rows can be looked up, by the numbers of their
    variables: `Embedding`, and subclasses of `keras.layers.Embedding` that do not
    override ``call``."""
    numbers = {id(variable): n for n, variable in enumerate(variables)}
    plain = keras.layers.Embedding
    found = {}
    for layer in layers:
        # A class with a call of its own may read rows otherwise.
        if isinstance(layer, plain) and type(layer).call in (
            plain.call,
            Embedding.call,
        ):
            number = numbers.get(id(layer.embeddings))
            if number is not None and layer.quantization_mode is None:
                found[number] = layer
    return found
