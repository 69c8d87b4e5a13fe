"""An optax transformation and the tree that it is for, called as optax calls it.

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
"""For each leaf the length of its first axis, None for its own."""


def checked(transformation: Any, name: str = "Optimizer") -> Any:
    """Returns the optax transformation itself: of an object that makes one, the one
    that it makes. ``name``: of the optimizer.

    Raises:
        TypeError: It is not a transformation.
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
    """Returns whether its update may take further arguments."""
    return isinstance(transformation, optax.GradientTransformationExtraArgs)


@dataclass(frozen=True)
class Extras:
    """Further arguments of ``update``: a pytree of arrays by name, and others as
    they are."""

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
    """The settings of jax for random numbers, for optimizers that draw some.

    ``kind`` of keys, and whether arrays of them may be drawn in parts: as jax's
    settings ``jax_default_prng_impl`` and ``jax_threefry_partitionable``. The defaults
    of jax leave it to the process, which its environment may have set.
    """

    kind: str = "threefry2x32"
    is_partitionable: bool = True

    @staticmethod
    def of_this_thread() -> RandomNumbers:
        """Returns what the program has set, by ``jax.config.update`` or in a
        ``with``."""
        config: Any = jax.config
        return RandomNumbers(
            config.jax_default_prng_impl, config.jax_threefry_partitionable
        )

    @property
    def is_set(self) -> bool:
        """Whether they differ from the defaults of jax."""
        return self.kind != RandomNumbers.kind or not self.is_partitionable

    def enter(self, entered: contextlib.ExitStack) -> None:
        """Sets them until the stack is closed."""
        if self.kind != RandomNumbers.kind:
            entered.enter_context(jax.default_prng_impl(self.kind))
        if not self.is_partitionable:
            entered.enter_context(jax.threefry_partitionable(False))


@dataclass(frozen=True, eq=False)
class TreeTransformation:
    """A transformation, the structure of its tree, and what its leaves look like.

    ``kinds`` are shape and dtype of each leaf, ``gradients`` the dtype of its gradient.
    ``wide``: it is traced with 64 bits, whatever the process computes with. ``early``:
    what is made of one gradient alone, as its norm, is an operand, too, so that the
    rows of that leaf can be moved one by one. ``grows``: its first update adds leaves
    to its state, as ``optax.monitor`` does, and it has them from the start here, zeros
    at first. ``examples``: for how many examples there is a gradient of each leaf,
    along an axis before its own; 0 for one gradient of its shape. Empty: 0 for all.
    ``random``: how it draws random numbers.
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
        """Returns new values and new state, as optax does."""
        unflatten = self.structure.treedef.unflatten
        params, further = unflatten(list(values)), self.extras.arguments(extras)
        given = unflatten(list(gradients))
        updates, after = self.transformation.update(given, before, params, **further)
        return optax.apply_updates(params, updates), after

    def initial(self, *values: Any) -> Any:
        """Returns a new state, as optax does."""
        return self.transformation.init(self.structure.treedef.unflatten(list(values)))

    def fitting(self, moved: Any, values: Sequence[Any]) -> list[Any]:
        """Checks that new values fit the old ``values`` that they replace; returns
        their leaves.

        Raises:
            InvalidArgumentError: They have another structure, or other shapes.
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
        """Sets the precision for tracing and running: 64 bits if the transformation has
        some, and jax's own rules of dtypes, which optax is written for, whatever the
        user has set."""
        # The user may have set stricter ones, which optax is not written for.
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            self.arithmetic(),
        ):
            yield

    def arithmetic(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the context in which its programs are compiled and called: with 64 bits
        if it has some, as jax would take a float64 variable and give back a float32
        one, and with the random numbers that it draws where it was made."""
        if not (self.wide or self.random.is_set):
            # At each update, so not even a stack is made.
            return contextlib.nullcontext()
        entered = contextlib.ExitStack()
        if self.wide:
            entered.enter_context(jax.enable_x64(True))
        self.random.enter(entered)
        return entered

    def values_at(self, sizes: Sizes | None) -> list[Shape]:
        """Returns shapes and dtypes of the leaves, in these sizes."""
        if sizes is None:
            return list(self.kinds)
        return [
            kind if size is None else shaped((size, *kind.shape[1:]), kind.dtype)
            for kind, size in zip(self.kinds, sizes, strict=True)
        ]

    def gradients_at(self, sizes: Sizes | None) -> list[Shape]:
        """Returns shapes and dtypes of the gradients, in these sizes."""
        counts = self.examples or (0,) * len(self.kinds)
        return [
            shaped((count, *kind.shape) if count else kind.shape, dtype)
            for count, kind, dtype in zip(
                counts, self.values_at(sizes), self.gradients, strict=True
            )
        ]

    def sizes(self, size: int) -> Sizes:
        """Returns the sizes of all leaves that have rows, with this number of rows."""
        return tuple([size if kind.shape else None for kind in self.kinds])


def shaped(dims: Sequence[int], dtype: Any) -> Shape:
    """Makes an array without a value."""
    made: Any = jax.ShapeDtypeStruct  # untyped
    result: Shape = made(tuple(dims), dtype)
    return result
