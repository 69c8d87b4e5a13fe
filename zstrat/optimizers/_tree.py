"""Traces an optax transformation on a tree of given shapes, to flat programs.

``TreeRule`` is a transformation, the structure of its tree, and the shapes and dtypes
of its leaves and gradients. It traces ``init`` and ``update`` abstractly, on a tree of
the user's structure, so the transformation sees the user's paths, labels, masks and
shapes. `_cut` reads from these programs what each leaf depends on.

A state is represented as a flat list of arrays, see `_state`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax
from jax.tree_util import keystr

from zstrat.jaxprs import mask_of, mask_of_all

from ._cut import TreeCut
from ._jaxprs import TreeProgram, flat, who_wrote
from ._owners import owners_in, places_in
from ._state import (
    StateGrowsError,
    initial_of,
    new_state,
    require_same,
    require_unread,
    unwrapped,
)
from ._transformation import TreeTransformation, shaped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ._owners import StateOwner
    from ._state import StateLeaf, StateOfTree
    from ._transformation import Sizes

T = TypeVar("T")

GENERATIONS: Final = 4
"""Number of updates after which the dtypes of a state may no longer change."""


_TRACES: Final = frozenset({"state", "init", "update"})
"""The names of cached results that do not depend on how the tree's program is cut into
updates of leaves."""


@dataclass(frozen=True, eq=False)
class TreeRule(TreeTransformation):
    """An optax transformation on one tree, with its traces, which are cached.
    `TreeTransformation` has the fields."""

    _programs: dict[Any, Any] = field(default_factory=dict)

    def state(self, sizes: Sizes | None = None) -> list[StateLeaf]:
        """Returns the leaves of a new state (shapes and dtypes), for a tree whose
        leaves have these sizes."""
        return self.state_of(sizes).leaves

    def state_of(self, sizes: Sizes | None = None) -> StateOfTree:
        """Returns the shapes and dtypes of a new state, for a tree whose leaves have
        these sizes."""

        def made() -> StateOfTree:
            with self.precision():
                return new_state(self, sizes)

        return self.remembered(("state", sizes), made)

    def remembered(self, key: Any, find: Callable[[], T]) -> T:
        """Returns the result of ``find``, cached under ``key`` for this tree."""
        if key not in self._programs:
            self._programs[key] = find()
        result: T = self._programs[key]
        return result

    def read_state(self) -> frozenset[int]:
        """Returns the numbers of the leaves of the state that an update reads."""
        return self.remembered(("read",), self._read_state)

    def _read_state(self) -> frozenset[int]:
        program = self.update()
        union = mask_of_all(program.mask, program.outputs)
        # The bits of inputs: gradients, values, then the state.
        first = 2 * len(self.kinds)
        return frozenset(
            n for n in range(len(self.state())) if union >> (first + n) & 1
        )

    def owners(self) -> list[StateOwner | None]:
        """Returns for each leaf of the state the leaf of the tree that it belongs
        to."""
        return self.remembered(
            ("owners",),
            lambda: owners_in(self.structure, self.state_of(), self.update),
        )

    def place(self, state: int) -> tuple[int | None, str]:
        """Returns, for a leaf of the state in a copy of the structure of the tree, the
        number of the leaf of the tree with the same path, and the rest of its own path.
        For any other: None, and its whole path."""
        owners: dict[int, StateOwner]
        owners = self.remembered(
            ("places",), lambda: places_in(self.structure, self.state_of())
        )
        owner, path = owners.get(state), self.state()[state].path
        if owner is None or owner.start is None:
            return None, keystr(path)
        # The path of the leaf is in the middle of the path in the state.
        end = owner.start + len(self.structure.paths[owner.leaf])
        return owner.leaf, keystr((*path[: owner.start], *path[end:]))

    def early_rule(self) -> TreeRule:
        """Returns this rule with ``early`` set, and with the same traces."""
        # Traces take most of the time, and do not depend on how they are cut.
        kept = {key: x for key, x in self._programs.items() if key[0] in _TRACES}
        return replace(self, early=True, _programs=kept)

    def cut(
        self, sizes: Sizes | None = None, dtypes: tuple[Any, ...] | None = None
    ) -> TreeCut:
        """Returns the program of a tree of these sizes, divided into an update for each
        leaf; ``dtypes`` are those of the state."""
        return self.remembered(
            ("cut", sizes, dtypes),
            lambda: TreeCut(
                self,
                self.state(),
                self.owners(),
                functools.partial(self.update, sizes, dtypes),
                self._combining_function,
            ),
        )

    def steady(self, generation: int) -> tuple[Any, ...] | None:
        """Returns the dtypes of the leaves of the state after ``generation`` updates,
        None for 0: float32 gradients turn the moments of a bfloat16 variable into
        float32."""
        if not generation:
            return None
        # Recursive, but each generation is traced once.
        before = self.steady(generation - 1)
        states = self.update(None, before).outputs[len(self.kinds) :]
        return tuple([var.aval.dtype for var in states])

    def settled(self) -> tuple[Any, ...] | None:
        """Returns the dtypes of the state that updates no longer change; None if these
        are the dtypes of a new state.

        Raises:
            TypeError: The dtypes change with every update.
        """
        for generation in range(GENERATIONS):
            known = self.steady(generation)
            if known is None:
                now = tuple([leaf.kind.dtype for leaf in self.state()])
            else:
                now = known
            # One more update leaves them as they are.
            if self.steady(generation + 1) == now:
                return known
        raise TypeError(
            f"the dtypes of the state of optimizer {self.name!r} change with every "
            "update: write the transformation so that its update gives a state of the "
            "dtypes that it is given"
        )

    def init(self, sizes: Sizes | None = None) -> TreeProgram:
        """Returns the program ``values -> state``."""

        def made() -> TreeProgram:
            with self.precision():
                initial = initial_of(self, self.state(sizes))
                closed = flat(initial, self.values_at(sizes), selects=False)
            return TreeProgram.of(closed, (0, len(self.kinds), 0, 0))

        return self.remembered(("init", sizes), made)

    def update(
        self,
        sizes: Sizes | None = None,
        dtypes: tuple[Any, ...] | None = None,
        *,
        selects: bool = False,
    ) -> TreeProgram:
        """Returns the program ``gradients, values, state, extras -> values, state``.

        Args:
            dtypes: The dtypes of the leaves of the state; None for those of a new
                state.
        """
        return self.remembered(
            ("update", sizes, dtypes, selects),
            lambda: self._update(sizes, dtypes, selects),
        )

    def whole(
        self,
        gradients: Sequence[Any],
        values: Sequence[Any],
        state: Sequence[Any],
        extras: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Returns new values and new state of the whole tree, computed by optax
        itself."""
        before = self.state_of().unflattened(state)
        moved, after = self.applied(gradients, values, before, extras)
        new_values = self.fitting(moved, values)
        require_same(self, before, after)
        return new_values, [unwrapped(leaf) for leaf in jax.tree.leaves(after)]

    def traced(self) -> TreeRule:
        """Traces the tree, and cuts its program into updates of leaves. Returns this
        rule; if the first update adds leaves to the state, a rule whose state has them
        from the start.

        Raises:
            TypeError: The update returns a state of another structure than it was
                given.
        """
        try:
            self.cut()
        except StateGrowsError:
            # Without the traces, which are of the state that lacks these leaves.
            result = replace(self, grows=True, _programs={})
            # Leaves that the first update adds are there from the start then, as zeros:
            # only an update that does not look at them gives what optax gives.
            require_unread(result, result.update(), result.state())
            result.cut()
            return result
        return self

    def _combining_function(self) -> str:
        """Returns the name of the optax function that first combines values, or parts
        of the state, of several leaves; "" if it cannot be found."""
        leaves, owners = len(self.kinds), self.owners()
        function, arguments, counts = self._function(None, None)

        def count(mask: int) -> int:
            touched = {n for n in range(2 * leaves) if mask >> n & 1}
            for number, owner in enumerate(owners):
                if owner is not None and mask >> (2 * leaves + number) & 1:
                    touched.add(owner.leaf)
            return len({n % leaves for n in touched})

        known = (1 << leaves) - 1
        extras = ((1 << counts[3]) - 1) << (2 * leaves + counts[2])

        def brings(eqn: Any, by_input: Mapping[Any, int]) -> bool:
            given = [mask_of(by_input, var) for var in eqn.invars]
            # What depends on gradients and further arguments alone would be an operand.
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
        return TreeProgram.of(closed, counts)

    def _function(
        self, sizes: Sizes | None, dtypes: tuple[Any, ...] | None
    ) -> tuple[Callable[..., list[Any]], list[Any], tuple[int, int, int, int]]:
        """Returns the update as a function of arrays, the shapes of its arguments, and
        how many there are of each kind (`TreeProgram.counts`)."""
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
