"""The state of a transformation on a tree, as a flat list of arrays.

Keys of ``jax.random`` are kept as integers (``jax.random.key_data``). If the first
update of a transformation adds leaves to its state (as ``optax.monitor`` adds
measurements), the initial state has these leaves here, as zeros. This is done only if
the update is the same program with these leaves as without them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.tree_util import (
    DictKey,
    GetAttrKey,
    SequenceKey,
    keystr,
    tree_flatten_with_path,
)

from ._jaxprs import flat
from ._structure import Pairs
from ._transformation import shaped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._jaxprs import TreeProgram
    from ._structure import Path
    from ._transformation import Shape, Sizes, TreeTransformation


@dataclass(frozen=True)
class StateLeaf:
    """One array of the state: its path, its shape and dtype, and for a key of
    ``jax.random`` the implementation (None for other arrays). ``is_added``: the first
    update adds it."""

    path: Path
    kind: Shape
    random: str | None
    is_added: bool = False


@dataclass(frozen=True)
class StateOfTree:
    """The shapes and dtypes of the state of a tree, and its structure."""

    leaves: list[StateLeaf]
    treedef: Any

    def unflattened(self, arrays: Sequence[Any]) -> Any:
        """Builds a state in the structure of optax from its arrays."""
        pairs = zip(arrays, self.leaves, strict=True)
        return self.treedef.unflatten([_wrapped(x, about.random) for x, about in pairs])

    def with_lists(self, arrays: Sequence[Any]) -> Any:
        """Builds a state as `unflattened` does, with lists in place of `Pairs`."""
        return Pairs.as_lists(self.unflattened(arrays))

    def flattened(self, state: Any) -> list[Any]:
        """Returns the leaves of a state that has the structure of optax, with `Pairs`
        or with lists in place of `Pairs`.

        Raises:
            ValueError: The state has another structure.
        """
        leaves, treedef = jax.tree.flatten(state)
        # A user who has read the state got lists in place of pairs, and may assign
        # that.
        numbered = self.treedef.unflatten(range(self.treedef.num_leaves))
        expected = jax.tree.structure(Pairs.as_lists(numbered))
        if treedef not in (self.treedef, expected):
            raise ValueError(f"expected the structure {expected}, got {treedef}")
        return [unwrapped(leaf) for leaf in leaves]


def state_classes(transformation: Any) -> dict[str, str]:
    """Returns, by the path of an array in the state of a single leaf, the name of the
    class of the state that has the array as a field; empty for a transformation that
    needs a tree."""
    try:
        # As the update is traced (`precision`), whatever the user has set.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            leaf = shaped((1,), jnp.float32)
            state = jax.eval_shape(transformation.init, leaf)
    except Exception:  # the user's, who would see it where the optimizer is used
        return {}
    paths = [path for path, _ in tree_flatten_with_path(state)[0]]
    named = [path for path in paths if path and isinstance(path[-1], GetAttrKey)]
    holders = {keystr(path): _child(state, path[:-1]) for path in named}
    return {
        k: type(holder).__name__ for k, holder in holders.items() if holder is not None
    }


def _child(node: Any, path: Path) -> Any:
    """Returns the descendant of a node at a path; None if a node on the path hides its
    children."""
    for key in path:
        match key:
            case GetAttrKey(name=name):
                node = getattr(node, name)
            case SequenceKey(idx=at) | DictKey(key=at):
                node = node[at]
            case _:
                return None
    return node


class StateGrowsError(Exception):
    """An update returned a state with more leaves than it was given."""


def new_state(tree: TreeTransformation, sizes: Sizes | None) -> StateOfTree:
    """Returns the shapes and dtypes of a new state, for a tree whose leaves have these
    sizes."""
    at_first = _state_of(tree.initial, tree.values_at(sizes))
    if not tree.grows:
        return at_first
    function, arguments = _first_update(tree, at_first, sizes)
    after = _state_of(lambda *given: function(*given)[1], arguments)
    # By path: the first update may add leaves anywhere.
    had = {leaf.path for leaf in at_first.leaves}
    leaves = [replace(leaf, is_added=leaf.path not in had) for leaf in after.leaves]
    return StateOfTree(leaves, after.treedef)


def initial_of(
    tree: TreeTransformation, about: Sequence[StateLeaf]
) -> Callable[..., list[Any]]:
    """Returns a function from values to a new state, whose leaves have the shapes and
    dtypes of ``about``."""

    def initial(*values: Any) -> list[Any]:
        leaves = iter(jax.tree.leaves(tree.initial(*values)))
        # Copies, because a leaf that is the value would be donated twice.
        return [_zeros(x.kind) if x.is_added else _copied(next(leaves)) for x in about]

    return initial


def require_same(tree: TreeTransformation, before: Any, after: Any) -> None:
    """Compares the state ``after`` an update with the one ``before``.

    Raises:
        StateGrowsError: The new state has added leaves.
        TypeError: The new state has another structure, or other shapes.
    """
    old: Any = jax.tree.structure(before)
    new: Any = jax.tree.structure(after)
    if old == new:
        _require_same_shapes(tree, before, after)
        return
    # Once it grows, the added leaves are there from the start.
    if not tree.grows and _paths(before) < _paths(after):
        raise StateGrowsError(tree.name)
    raise TypeError(
        f"optimizer {tree.name!r} keeps {old}, and its update returns {new}: a "
        "transformation returns a state of the structure that it was given"
    )


def _require_same_shapes(tree: TreeTransformation, before: Any, after: Any) -> None:
    old, new = tree_flatten_with_path(before)[0], jax.tree.leaves(after)
    for (path, leaf), made in zip(old, new, strict=True):
        if jnp.shape(leaf) != jnp.shape(made):
            raise TypeError(
                f"optimizer {tree.name!r} keeps {keystr(path)} of shape "
                f"{jnp.shape(leaf)}, and its update returns it as {jnp.shape(made)}: "
                "a transformation returns a state of the shapes that it was given"
            )


def require_unread(
    tree: TreeTransformation, program: TreeProgram, about: Sequence[StateLeaf]
) -> None:
    """Refuses an update that reads the leaves which its first call adds to the state,
    so that it is another program without them.

    Args:
        program: The update of a state that has the added leaves.
        about: The leaves of the state that it takes.

    Raises:
        TypeError: The update of a state without the added leaves is another program.
    """
    with tree.precision():
        at_first = _state_of(tree.initial, tree.values_at(None))
        function, arguments = _first_update(tree, at_first, None)

        def first(*given: Any) -> list[Any]:
            return [unwrapped(leaf) for leaf in jax.tree.leaves(function(*given))]

        wanted: Any = flat(first, arguments, selects=False)
    pairs = zip(program.inputs[2], about, strict=True)
    added = {var for var, leaf in pairs if leaf.is_added}
    inner: Any = program.closed.jaxpr
    read = [var for var in inner.invars if var not in added]
    # Variables are printed by their order, so the texts can be compared.
    if str(inner.replace(invars=read)) != str(wanted.jaxpr):
        raise TypeError(
            f"the first update of optimizer {tree.name!r} adds leaves to its state, "
            "and does something else without them: a transformation returns a state of "
            "the structure that it was given"
        )


def unwrapped(leaf: Any) -> Any:
    """Returns an array unchanged, and a key of ``jax.random`` as its integers."""
    leaf = jnp.asarray(leaf)
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _first_update(
    tree: TreeTransformation, state: StateOfTree, sizes: Sizes | None
) -> tuple[Callable[..., tuple[Any, Any]], list[Shape]]:
    """Returns the update of a state as ``init`` makes it, as a function of arrays, and
    the shapes of its arguments."""
    values, kinds = tree.values_at(sizes), [leaf.kind for leaf in state.leaves]
    gradients = tree.gradients_at(sizes)
    count = len(values)

    def update(*given: Any) -> tuple[Any, Any]:
        g, v, s = given[:count], given[count : 2 * count], given[2 * count :]
        arrays, further = s[: len(kinds)], s[len(kinds) :]
        return tree.applied(g, v, state.unflattened(arrays), further)

    return update, [*gradients, *values, *kinds, *tree.extras.kinds]


def _state_of(function: Callable[..., Any], arguments: Sequence[Shape]) -> StateOfTree:
    """Returns the shapes, dtypes and structure of the state that a function returns."""
    seen: list[Any] = []

    def run(*given: Any) -> list[Any]:
        leaves, treedef = tree_flatten_with_path(function(*given))
        seen[:] = [[(path, _implementation(x)) for path, x in leaves], treedef]
        return [unwrapped(leaf) for _, leaf in leaves]

    kinds = jax.eval_shape(run, *arguments)
    about, treedef = seen
    leaves = [
        StateLeaf(path, shaped(kind.shape, kind.dtype), random)
        for (path, random), kind in zip(about, kinds, strict=True)
    ]
    return StateOfTree(leaves, treedef)


def _paths(state: Any) -> set[Path]:
    return {path for path, _ in tree_flatten_with_path(state)[0]}


def _zeros(kind: Shape) -> Any:
    return jnp.zeros(kind.shape, kind.dtype)


def _copied(leaf: Any) -> Any:
    leaf = unwrapped(leaf)
    return jax.lax.convert_element_type(jnp.copy(leaf), leaf.dtype)


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _implementation(leaf: Any) -> str | None:
    leaf = jnp.asarray(leaf)
    return str(jax.random.key_impl(leaf)) if _is_key(leaf) else None


def _wrapped(leaf: Any, random: str | None) -> Any:
    if random is None:
        return leaf
    return jax.random.wrap_key_data(leaf, impl=random)
