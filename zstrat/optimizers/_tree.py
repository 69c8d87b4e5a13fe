"""An optax transformation on a tree of given shapes, as flat programs.

``TreeRule`` is a transformation, the structure of its tree, and what its leaves and
gradients look like. It traces ``init`` and ``update`` abstractly, on the real tree:
paths, labels, masks and shapes are what the user has in mind. `_cut` reads from these
programs what each leaf depends on.

A state is a flat list of arrays here, see `_state`.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax
import optax
from jax.tree_util import keystr

from zstrat.errors import InvalidArgumentError

from ._cut import StateOwner, TreeCut, owners_in, places_in
from ._jaxprs import flat, mask_of, masks, primitives, who_wrote
from ._state import (
    StateGrowsError,
    initial_of,
    new_state,
    require_same,
    require_unread,
    shaped,
    unwrapped,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ._state import StateLeaf, StateOfTree
    from ._structure import TreeStructure

T = TypeVar("T")

Shape = jax.ShapeDtypeStruct
Sizes = tuple[int | None, ...]
"""For each leaf the length of its first axis, None for its own."""


GENERATIONS: Final = 4
"""How often the dtypes of a state may change before they have to stay as they are."""


_TRACES: Final = frozenset({"state", "init", "update"})
"""What is remembered of a tree however it is cut."""


def checked(transformation: Any) -> Any:
    """The optax transformation itself: of an object that makes one, what it makes.

    Raises:
        TypeError: It is none.
    """
    make = getattr(transformation, "gradient_transformation", None)
    made = make() if callable(make) else transformation
    if not all(callable(getattr(made, name, None)) for name in ("init", "update")):
        raise TypeError(
            f"zs.Optimizer takes an optax GradientTransformation, as "
            f"zs.Optimizer(optax.adam(1e-3)); got {transformation!r:.100}"
        )
    return made


def takes_extras(transformation: Any) -> bool:
    """Whether its update may want further arguments."""
    return isinstance(transformation, optax.GradientTransformationExtraArgs)


@dataclass(frozen=True)
class Extras:
    """Further arguments of ``update``: a pytree of arrays by name, and what is no
    array, as it is."""

    treedef: Any
    kinds: tuple[Shape, ...]
    static: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def none() -> Extras:
        """Those of an update that takes none."""
        return Extras(jax.tree.structure({}), ())

    def arguments(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """As ``update`` takes them."""
        return {**self.treedef.unflatten(list(arrays)), **dict(self.static)}


@dataclass(frozen=True)
class TreeProgram:
    """A flat program, with what each of its variables depends on.

    Its inputs are, one behind the other, what ``counts`` says: gradients, values,
    leaves of the state, further arguments. ``mask`` is by variable.
    """

    closed: Any
    counts: tuple[int, int, int, int]
    mask: Mapping[Any, int]

    @functools.cached_property
    def inputs(self) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Its variables: gradients, values, state, further arguments."""
        left = iter(self.closed.jaxpr.invars)
        g, v, s, x = ([next(left) for _ in range(n)] for n in self.counts)
        return g, v, s, x

    @functools.cached_property
    def outputs(self) -> list[Any]:
        """Its results: of ``update`` the new values, then the new state."""
        return list(self.closed.jaxpr.outvars)

    @property
    def acts(self) -> str:
        """The primitive by which it does more than compute, or nothing."""
        found = [n for n in primitives(self.closed.jaxpr) if "callback" in n]
        return found[0] if found else ("an effect" if self.closed.effects else "")


@dataclass(frozen=True, eq=False)
class TreeRule:
    """See the module's docstring.

    ``kinds`` are shape and dtype of each leaf, ``gradients`` the dtype of its gradient.
    ``wide``: it is traced with 64 bits, whatever the process computes with. ``early``:
    what is made of one gradient alone, as its norm, is an operand, too, so that the
    rows of that leaf can be moved one by one. ``grows``: its first update adds leaves
    to its state, as ``optax.monitor`` does, and it has them from the start here, zeros
    at first. ``examples``: for how many examples there is a gradient of each leaf,
    along an axis before its own; 0 for one gradient of its shape. Empty: 0 for all.
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
    _programs: dict[Any, Any] = field(default_factory=dict)

    def state(self, sizes: Sizes | None = None) -> list[StateLeaf]:
        """The leaves of a new state, for a tree of these sizes."""
        return self.state_of(sizes).leaves

    def state_of(self, sizes: Sizes | None = None) -> StateOfTree:
        """A new state, for a tree of these sizes."""
        key = ("state", sizes)
        if key not in self._programs:
            with self.precision():
                self._programs[key] = new_state(self, sizes)
        found: StateOfTree = self._programs[key]
        return found

    def state_structure(self) -> Any:
        """The treedef of the state."""
        return self.state_of().treedef

    def unflattened(self, leaves: Sequence[Any]) -> Any:
        """The state in optax's own structure, from its leaves."""
        return self.state_of().unflattened(leaves)

    def remembered(self, key: Any, find: Callable[[], T]) -> T:
        """What was found out about the tree, once."""
        if key not in self._programs:
            self._programs[key] = find()
        found: T = self._programs[key]
        return found

    def read_state(self) -> frozenset[int]:
        """The leaves of the state that an update looks at."""
        return self.remembered(("read",), self._read_state)

    def _read_state(self) -> frozenset[int]:
        program, union = self.update(), 0
        for var in program.outputs:
            union |= mask_of(program.mask, var)
        first = 2 * len(self.kinds)
        return frozenset(
            n for n in range(len(self.state())) if union >> (first + n) & 1
        )

    def owners(self) -> list[StateOwner | None]:
        """For each leaf of the state the leaf of the tree that it belongs to."""
        return self.remembered(("owners",), lambda: owners_in(self))

    def place(self, state: int) -> tuple[int | None, str]:
        """The leaf of the tree in whose place a leaf of the state lies, if it is in a
        copy of the tree's structure, and its path without the leaf's own."""
        found: dict[int, StateOwner]
        found = self.remembered(("places",), lambda: places_in(self))
        owner, path = found.get(state), self.state()[state].path
        if owner is None or owner.start is None:
            return None, keystr(path)
        end = owner.start + len(self.structure.paths[owner.leaf])
        return owner.leaf, keystr((*path[: owner.start], *path[end:]))

    def early_rule(self) -> TreeRule:
        """The same with `early`, of the same traces."""
        kept = {key: x for key, x in self._programs.items() if key[0] in _TRACES}
        return replace(self, early=True, _programs=kept)

    def cut(
        self, sizes: Sizes | None = None, dtypes: tuple[Any, ...] | None = None
    ) -> TreeCut:
        """How the program of such a tree is cut."""
        key = ("cut", sizes, dtypes)
        if key not in self._programs:
            self._programs[key] = TreeCut(self, sizes, dtypes)
        found: TreeCut = self._programs[key]
        return found

    def steady(self, generation: int) -> tuple[Any, ...] | None:
        """The dtypes of the leaves of the state after so many updates: gradients of
        float32 make moments of a bfloat16 variable float32."""
        if not generation:
            return None
        before = self.steady(generation - 1)
        states = self.update(None, before).outputs[len(self.kinds) :]
        return tuple([var.aval.dtype for var in states])

    def settled(self) -> tuple[Any, ...] | None:
        """Those that stay as they are; None for those of a new state.

        Raises:
            TypeError: They change with every update.
        """
        for generation in range(GENERATIONS):
            known = self.steady(generation)
            if known is None:
                now = tuple([leaf.kind.dtype for leaf in self.state()])
            else:
                now = known
            if self.steady(generation + 1) == now:
                return known
        raise TypeError(
            f"the dtypes of the state of optimizer {self.name!r} change with every "
            "update"
        )

    def init(self, sizes: Sizes | None = None) -> TreeProgram:
        """``values -> state``."""
        key = ("init", sizes)
        if key not in self._programs:
            with self.precision():
                initial = initial_of(self, sizes)
                closed = flat(initial, self.values_at(sizes), selects=False)
            counts = (0, len(self.kinds), 0, 0)
            self._programs[key] = TreeProgram(closed, counts, _by_input(closed))
        found: TreeProgram = self._programs[key]
        return found

    def update(
        self,
        sizes: Sizes | None = None,
        dtypes: tuple[Any, ...] | None = None,
        *,
        selects: bool = False,
    ) -> TreeProgram:
        """``gradients, values, state, extras -> values, state``.

        Args:
            dtypes: Of the leaves of the state, None for those of a new one.
        """
        key = ("update", sizes, dtypes, selects)
        if key not in self._programs:
            self._programs[key] = self._update(sizes, dtypes, selects)
        found: TreeProgram = self._programs[key]
        return found

    def whole(
        self,
        gradients: Sequence[Any],
        values: Sequence[Any],
        state: Sequence[Any],
        extras: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """New values and new state: plain optax on the tree."""
        before = self.unflattened(state)
        moved, after = self.applied(gradients, values, before, extras)
        found = self._fitting(moved, values)
        require_same(self, before, after)
        return found, [unwrapped(leaf) for leaf in jax.tree.leaves(after)]

    def _fitting(self, moved: Any, values: Sequence[Any]) -> list[Any]:
        """The leaves of new values in place of others.

        Raises:
            InvalidArgumentError: They have another structure, or other shapes.
        """
        found, treedef = jax.tree.flatten(moved)
        if treedef != self.structure.treedef:
            raise InvalidArgumentError(
                f"optimizer {self.name!r} gives updates of another structure than its "
                f"tree, which is {self.structure.treedef}: {treedef}"
            )
        for leaf, (new, old) in enumerate(zip(found, values, strict=True)):
            if new.shape != old.shape:
                raise InvalidArgumentError(self._misshapen(leaf, new.shape))
        return found

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

    def applied(
        self,
        gradients: Sequence[Any],
        values: Sequence[Any],
        before: Any,
        extras: Sequence[Any],
    ) -> tuple[Any, Any]:
        """New values and new state, as optax has them."""
        unflatten = self.structure.treedef.unflatten
        params, further = unflatten(list(values)), self.extras.arguments(extras)
        given = unflatten(list(gradients))
        updates, after = self.transformation.update(given, before, params, **further)
        return optax.apply_updates(params, updates), after

    def initial(self, *values: Any) -> Any:
        """A new state, as optax has it."""
        return self.transformation.init(self.structure.treedef.unflatten(list(values)))

    def traced(self) -> TreeRule:
        """The same, cut; one that grows, if that is what its first update does.

        Raises:
            TypeError: Its update returns another state than it was given.
        """
        try:
            self.cut()
        except StateGrowsError:
            found = replace(self, grows=True, _programs={})
            require_unread(found)
            found.cut()
            return found
        return self

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """In which it is traced and runs: with 64 bits if it has some, and by jax's own
        rules of dtypes, which optax is written for, whatever the user has set."""
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            jax.enable_x64(True) if self.wide else contextlib.nullcontext(),
        ):
            yield

    def values_at(self, sizes: Sizes | None) -> list[Shape]:
        """What the leaves look like in these sizes."""
        if sizes is None:
            return list(self.kinds)
        return [
            kind if size is None else shaped((size, *kind.shape[1:]), kind.dtype)
            for kind, size in zip(self.kinds, sizes, strict=True)
        ]

    def gradients_at(self, sizes: Sizes | None) -> list[Shape]:
        """What the gradients look like in these sizes."""
        counts = self.examples or (0,) * len(self.kinds)
        return [
            shaped((count, *kind.shape) if count else kind.shape, dtype)
            for count, kind, dtype in zip(
                counts, self.values_at(sizes), self.gradients, strict=True
            )
        ]

    def sizes(self, size: int) -> Sizes:
        """All leaves that have rows, with this number of them."""
        return tuple([size if kind.shape else None for kind in self.kinds])

    # ---- private -------------------------------------------------------------------

    def brought_together(self, owners: Sequence[StateOwner | None]) -> str:
        """The function of optax that first makes something of the values, or of the
        state, of several leaves; "" if it cannot be told."""
        leaves = len(self.kinds)
        function, arguments, counts = self._function(None, None)

        def count(mask: int) -> int:
            found = {n for n in range(2 * leaves) if mask >> n & 1}
            for number, owner in enumerate(owners):
                if owner is not None and mask >> (2 * leaves + number) & 1:
                    found.add(owner.leaf)
            return len({n % leaves for n in found})

        known = (1 << leaves) - 1
        extras = ((1 << counts[3]) - 1) << (2 * leaves + counts[2])

        def brings(eqn: Any, by_input: Mapping[Any, int]) -> bool:
            given = [mask_of(by_input, var) for var in eqn.invars]
            return any(
                mask_of(by_input, var) & ~(known | extras)
                and count(mask_of(by_input, var)) > max(map(count, given), default=0)
                and count(mask_of(by_input, var)) > 1
                for var in eqn.outvars
            )

        with self.precision():
            return who_wrote(function, arguments, brings)

    def _update(
        self, sizes: Sizes | None, dtypes: tuple[Any, ...] | None, selects: bool
    ) -> TreeProgram:
        function, arguments, counts = self._function(sizes, dtypes)
        with self.precision():
            closed = flat(function, arguments, selects=selects)
        return TreeProgram(closed, counts, _by_input(closed))

    def _function(
        self, sizes: Sizes | None, dtypes: tuple[Any, ...] | None
    ) -> tuple[Callable[..., list[Any]], list[Any], tuple[int, int, int, int]]:
        """The update as a function of arrays, what these look like, and how many there
        are of each sort (`TreeProgram.counts`)."""
        values, state = self.values_at(sizes), [x.kind for x in self.state(sizes)]
        if dtypes is not None:
            pairs = zip(state, dtypes, strict=True)
            state = [shaped(kind.shape, dtype) for kind, dtype in pairs]
        gradients = self.gradients_at(sizes)
        counts = (len(values), len(values), len(state), len(self.extras.kinds))

        def update(*given: Any) -> list[Any]:
            left = iter(given)
            g, v, s, x = ([next(left) for _ in range(n)] for n in counts)
            moved, after = self.whole(g, v, s, x)
            return [*moved, *after]

        return update, [*gradients, *values, *state, *self.extras.kinds], counts


def _by_input(closed: Any) -> Mapping[Any, int]:
    inputs = len(closed.jaxpr.invars)
    return masks(closed.jaxpr, [1 << n for n in range(inputs)])
