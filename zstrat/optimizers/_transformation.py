"""An optax transformation and the tree that it updates, called as optax calls it.

Nothing is traced or cached here: `zstrat.optimizers._tree` does that.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import optax

from zstrat.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._structure import TreeStructure

Shape = jax.ShapeDtypeStruct
Sizes = tuple[int | None, ...]
"""For each leaf the length of its first axis; None for the length that the leaf has."""


def checked(transformation: Any, name: str = "Optimizer") -> Any:
    """Returns the optax transformation in ``transformation``: the argument, or what it
    makes if it is an object that makes one. ``name`` is that of the optimizer in
    errors.

    Raises:
        TypeError: Neither the argument nor what it makes is a transformation.
    """
    # Such as `optax.MultiSteps`, which is not itself a pair of functions.
    make = getattr(transformation, "gradient_transformation", None)
    made = make() if callable(make) else transformation
    if not all(callable(getattr(made, name, None)) for name in ("init", "update")):
        raise TypeError(
            f"optimizer {name!r}: expected an optax GradientTransformation, as "
            f"optax.adam(1e-3), got {transformation!r:.100}"
        )
    return made


def takes_extras(transformation: Any) -> bool:
    """Returns whether the transformation's ``update`` may take further arguments."""
    return isinstance(transformation, optax.GradientTransformationExtraArgs)


@dataclass(frozen=True)
class Extras:
    """Further arguments of ``update``, by name: pytrees of arrays, and other objects,
    which are passed unchanged."""

    treedef: Any
    kinds: tuple[Shape, ...]
    static: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def none() -> Extras:
        """Returns the further arguments of an update that takes none."""
        return Extras(jax.tree.structure({}), ())

    def arguments(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Returns the further arguments in the form that ``update`` takes."""
        return {**self.treedef.unflatten(list(arrays)), **dict(self.static)}


@dataclass(frozen=True)
class RandomNumbers:
    """The settings of jax for random numbers, for optimizers that draw random numbers.

    ``kind`` of keys, and whether arrays of random numbers may be drawn in parts: jax's
    settings ``jax_default_prng_impl`` and ``jax_threefry_partitionable``. If both have
    jax's defaults, the process that runs the optimizer uses its own settings, which its
    environment may have changed.
    """

    kind: str = "threefry2x32"
    is_partitionable: bool = True

    @staticmethod
    def of_this_thread() -> RandomNumbers:
        """Returns the settings of this thread, made by ``jax.config.update`` or in a
        ``with``."""
        config: Any = jax.config
        return RandomNumbers(
            config.jax_default_prng_impl, config.jax_threefry_partitionable
        )

    @property
    def is_set(self) -> bool:
        """Whether the settings differ from the defaults of jax."""
        return self.kind != RandomNumbers.kind or not self.is_partitionable

    def enter(self, entered: contextlib.ExitStack) -> None:
        """Applies the settings until the stack ``entered`` is closed."""
        if self.kind != RandomNumbers.kind:
            entered.enter_context(jax.default_prng_impl(self.kind))
        if not self.is_partitionable:
            entered.enter_context(jax.threefry_partitionable(False))


@dataclass(frozen=True, eq=False)
class TreeTransformation:
    """A transformation, the structure of its tree, and the shapes and dtypes of its
    leaves.

    ``kinds`` has shape and dtype of each leaf, ``gradients`` the dtype of its gradient.
    ``wide``: the transformation is traced with 64 bits enabled, whatever the process
    uses. ``early``: scalars that depend on one gradient alone, as its norm, are
    operands, too, so that the rows of that leaf can be updated one by one. ``grows``:
    the first update adds leaves to the state, as that of ``optax.monitor`` does; here
    the initial state has these leaves, as zeros. ``examples``: for each leaf, the
    number of examples for which its gradient has an entry along an additional first
    axis; 0 for a gradient of the leaf's shape. Empty: 0 for all. ``random``: how the
    transformation draws random numbers.
    """

    name: str
    transformation: Any
    structure: TreeStructure
    kinds: tuple[Shape, ...]
    gradients: tuple[Any, ...]
    extras: Extras = field(default_factory=Extras.none)
    wide: bool = False
    early: bool = False
    grows: bool = False
    examples: tuple[int, ...] = ()
    random: RandomNumbers = RandomNumbers()

    def applied(
        self,
        gradients: Sequence[Any],
        values: Sequence[Any],
        before: Any,
        extras: Sequence[Any],
    ) -> tuple[Any, Any]:
        """Applies one update; returns new values and the new state, in the structure of
        optax."""
        unflatten = self.structure.treedef.unflatten
        params, further = unflatten(list(values)), self.extras.arguments(extras)
        given = unflatten(list(gradients))
        updates, after = self.transformation.update(given, before, params, **further)
        return optax.apply_updates(params, updates), after

    def initial(self, *values: Any) -> Any:
        """Returns a new state, in the structure of optax."""
        return self.transformation.init(self.structure.treedef.unflatten(list(values)))

    def fitting(self, moved: Any, values: Sequence[Any]) -> list[Any]:
        """Checks that the pytree ``moved`` of new values has the structure and shapes
        of the old ``values``; returns its leaves.

        Raises:
            InvalidArgumentError: The new values have another structure, or other
                shapes.
        """
        result, treedef = jax.tree.flatten(moved)
        if treedef != self.structure.treedef:
            raise InvalidArgumentError(
                f"optimizer {self.name!r} gives updates of another structure than its "
                f"tree, which is {self.structure.treedef}: {treedef}"
            )
        for leaf, (new, old) in enumerate(zip(result, values, strict=True)):
            if new.shape != old.shape:
                raise InvalidArgumentError(self._misshapen(leaf, new.shape))
        return result

    def _misshapen(self, leaf: int, shape: tuple[int, ...]) -> str:
        words, kind = self.structure.words(leaf), self.kinds[leaf]
        if self.examples and self.examples[leaf]:
            return (
                f"shape mismatch. {words} has shape {kind.shape}, and its gradient "
                f"{(self.examples[leaf], *kind.shape)}; expected {kind.shape}. "
                f"Optimizer {self.name!r} does not bring gradients of single examples "
                "together, as optax.contrib.dpsgd does: give it their sum or their mean"
            )
        return (
            f"optimizer {self.name!r} gives {words}, of shape {kind.shape}, an update "
            f"that makes it {shape}: give the variable that shape, or leave it to "
            "another optimizer"
        )

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Sets jax up for tracing and running the transformation: as `arithmetic`, and
        with jax's standard promotion of dtypes and ranks, which optax is written for,
        whatever the user has set."""
        # The user may have set stricter ones, which optax is not written for.
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            self.arithmetic(),
        ):
            yield

    def arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which programs of the transformation are compiled and
        called: with 64 bits enabled if any dtype has 64 bits, as jax would otherwise
        return float32 for a float64 variable; and with the settings of random numbers
        of the process that made the optimizer."""
        if not (self.wide or self.random.is_set):
            # At each update, so not even a stack is made.
            return contextlib.nullcontext()
        entered = contextlib.ExitStack()
        if self.wide:
            entered.enter_context(jax.enable_x64(True))
        self.random.enter(entered)
        return entered

    def values_at(self, sizes: Sizes | None) -> list[Shape]:
        """Returns shapes and dtypes of the leaves, with the given lengths of first
        axes."""
        if sizes is None:
            return list(self.kinds)
        return [
            kind if size is None else shaped((size, *kind.shape[1:]), kind.dtype)
            for kind, size in zip(self.kinds, sizes, strict=True)
        ]

    def gradients_at(self, sizes: Sizes | None) -> list[Shape]:
        """Returns shapes and dtypes of the gradients, with the given lengths of first
        axes."""
        counts = self.examples or (0,) * len(self.kinds)
        return [
            shaped((count, *kind.shape) if count else kind.shape, dtype)
            for count, kind, dtype in zip(
                counts, self.values_at(sizes), self.gradients, strict=True
            )
        ]

    def sizes(self, size: int) -> Sizes:
        """Returns `Sizes` that give each leaf that is not a scalar ``size`` rows."""
        return tuple([size if kind.shape else None for kind in self.kinds])


def shaped(dims: Sequence[int], dtype: Any) -> Shape:
    """Returns the shape and dtype of an array, without a value."""
    made: Any = jax.ShapeDtypeStruct  # untyped
    result: Shape = made(tuple(dims), dtype)
    return result
