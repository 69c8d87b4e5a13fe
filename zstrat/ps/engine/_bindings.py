"""The variables that an optimizer updates on this server, and the update rule of each,
found by tracing the optimizer's trees.

A transformation is shipped by a coordinator; the tree that it updates is sent as data
by the sender of gradients (`zstrat.optimizers.Binding`), and traced again here. Leaves
with the same update rule, as tables of different heights have, use the rule of one of
them, their *representative*, so that they share layouts of slots, programs and calls.

`Bindings.trace` runs on the thread of optimizers, all else on the thread of the store.
The caller of either holds the name of the optimizer, so no other request uses it
meanwhile.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.errors import AlreadyExistsError, BusyError, InvalidArgumentError

from ._slots import is_wide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zstrat.optimizers import LeafRule

    from ._slots import HeldVariable

MAX_TREES: Final = 64
"""The most trees of one optimizer."""

Kind = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedLeaf:
    """A leaf of a traced tree. ``operands``: shapes and dtypes of all operands of its
    tree; ``is_part``: each of its variables has some of the leaf's rows."""

    rule: LeafRule
    digest: bytes
    operands: tuple[Kind, ...]
    is_part: bool

    def is_moved_as(self, other: TracedLeaf) -> bool:
        """Returns whether this leaf and ``other`` update a variable in the same way."""
        own = (self.digest, self.rule.uses, self.operands)
        return own == (other.digest, other.rule.uses, other.operands)


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """The binding of one variable: its leaf, and the representative rule of all leaves
    that are updated alike."""

    leaf: TracedLeaf
    alike: LeafRule


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A traced binding, decoded from ``data``: the keys of all its variables, on any
    server, and the leaves of its variables on this server."""

    data: bytes
    digest: bytes
    keys: frozenset[int]
    leaves: dict[int, TracedLeaf]


class Bindings:
    """The trees of one optimizer, and the variables that they bind."""

    def __init__(self, name: str, transformation: Any) -> None:
        self._name, self._transformation = name, transformation
        self._trees: dict[bytes, Tree] = {}
        self._tree_of: dict[int, bytes] = {}
        """By key of a variable, the digest of the tree that binds it."""
        self._bound: dict[int, Bound] = {}
        self._alike: dict[bytes, LeafRule] = {}
        self.changes = 0
        """How often variables were bound or unbound."""

    def get(self, key: int) -> Bound | None:
        """Returns the binding of the variable with this key."""
        return self._bound.get(key)

    @property
    def encoded(self) -> list[tuple[bytes, list[int]]]:
        """The bytes of each tree, in order of arrival, with the keys of the variables
        on this server that the tree binds."""
        keys: dict[bytes, list[int]] = {digest: [] for digest in self._trees}
        for key, digest in self._tree_of.items():
            keys[digest].append(key)
        return [(self._trees[digest].data, bound) for digest, bound in keys.items()]

    def has(self, data: bytes, find: Callable[[int], HeldVariable | None]) -> bool:
        """Returns whether exactly this binding is known, and all its variables on this
        server are bound.

        Raises:
            BusyError: The binding is new, and the optimizer has `MAX_TREES` trees.
        """
        tree = self._trees.get(digest_of(data))
        if tree is None and len(self._trees) >= MAX_TREES:
            raise BusyError(
                f"optimizer {self._name!r} has {MAX_TREES} trees already: make one "
                "optimizer for each model, zs.Optimizer(transformation, params=params)"
            )
        if tree is None:
            return False
        # The tree names the variables of all servers.
        return all(key in self._bound or find(key) is None for key in tree.keys)

    def trace(self, data: bytes, find: Callable[[int], HeldVariable | None]) -> Tree:
        """Traces the transformation for the variables of a tree that are on this
        server.

        Cost: three traces of the transformation, and more for each leaf.

        Raises:
            InvalidArgumentError: The data is not a binding, does not fit the variables,
                or the transformation cannot be divided into updates of leaves here.
            AlreadyExistsError: A variable has another update rule already.
        """
        # Here, as it imports jax.
        from zstrat.optimizers import Binding

        binding = Binding.decoded(self._name, self._transformation, data)
        keys = [key for components in binding.keys for key in components]
        if len(set(keys)) != len(keys):
            raise InvalidArgumentError(
                f"the tree of optimizer {self._name!r} names a variable twice"
            )
        leaves: dict[int, TracedLeaf] = {}
        for rule, components in zip(binding.rules(), binding.keys, strict=True):
            # Parts of a leaf may be on several servers.
            here = [held for key in components if (held := find(key)) is not None]
            if here:
                _require_fit(rule, here, is_part=len(components) > 1)
                leaf = self._leaf(rule, here[0], is_part=len(components) > 1)
                leaves.update((held.entry.key, leaf) for held in here)
                for held in here:
                    self._require_same(held, leaf)
        return Tree(data, digest_of(data), frozenset(keys), leaves)

    def add(self, tree: Tree, here: Iterable[int]) -> None:
        """Binds those of the variables ``here`` that existed when the tree was traced.
        Variables that are bound already stay as they are."""
        # A push that was checked without this tree has to be checked again
        # (`AlikePushes`).
        self.changes += 1
        for key in here:
            leaf = tree.leaves[key]
            # The first rule with this digest stands for all of them, so they share
            # programs.
            alike = self._alike.setdefault(leaf.digest, leaf.rule)
            self._bound.setdefault(key, Bound(leaf, alike))
            self._tree_of.setdefault(key, tree.digest)
        # Without its leaves, which are in `_bound` as long as their variables are
        # there.
        self._trees[tree.digest] = replace(tree, leaves={})

    def forget(self, keys: Iterable[int]) -> None:
        """Drops the bindings of deleted variables; other variables may get their
        keys."""
        self.changes += 1
        for key in keys:
            self._bound.pop(key, None)
            self._tree_of.pop(key, None)

    def _leaf(self, rule: LeafRule, held: HeldVariable, *, is_part: bool) -> TracedLeaf:
        """Reads all properties of the rule that are needed later, now that tracing is
        allowed."""
        try:
            # Both are computed when they are first asked for, which must not be in a
            # push.
            digest, _ = rule.digest, rule.row_dependence
            kinds = rule.tree.cut().operand_kinds
        except Exception as error:  # goes to the caller, with what was tried
            raise InvalidArgumentError(
                f"optimizer {self._name!r} cannot be applied to variable "
                f"{held.entry.name!r}: {type(error).__name__}: {error}"
            ) from error
        operands = tuple([(tuple(kind.shape), np.dtype(kind.dtype)) for kind in kinds])
        return TracedLeaf(rule, digest, operands, is_part)

    def _require_same(self, held: HeldVariable, leaf: TracedLeaf) -> None:
        old = self._bound.get(held.entry.key)
        # Another tree may name a variable again that it moves in the same way.
        if old is None or old.leaf.is_moved_as(leaf):
            return
        raise AlreadyExistsError(
            f"optimizer {self._name!r} moves variable {held.entry.name!r} differently "
            "in this tree than in the one that it had before, and it has one tree: "
            "give it all its variables at once, zs.Optimizer(transformation, "
            "params=params), with gradients of the same dtypes and the same further "
            "arguments each time, and make one optimizer for each tree. State that is "
            "assigned before the first update is of a tree without further arguments: "
            "assign it after that"
        )


def digest_of(data: bytes) -> bytes:
    """Returns a digest of the bytes, by which an equal binding is recognized."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _require_fit(
    rule: LeafRule, here: Sequence[HeldVariable], *, is_part: bool
) -> None:
    """Refuses variables whose shape or dtype is not that of their leaf in the tree.

    Raises:
        InvalidArgumentError: A variable has another shape or dtype than its leaf.
    """
    want, rows = rule.kind, 0
    wide = is_wide(np.dtype(want.dtype))
    # Unless this process computes with 64 bits anyway.
    if wide and not rule.tree.wide and not _computes_wide():
        raise InvalidArgumentError(
            f"variable {here[0].entry.name!r} has 64 bits, and the tree of optimizer "
            f"{rule.tree.name!r} says that it is traced with 32"
        )
    for held in here:
        shape, dtype = held.cell.shape, held.cell.dtype
        fits = shape == tuple(want.shape)
        if held.table is not None:  # it has any number of rows
            fits = bool(want.shape) and shape[1:] == tuple(want.shape[1:])
        elif is_part:
            rows += shape[0] if shape else 0
            fits = bool(shape) and shape[1:] == tuple(want.shape[1:])
            # Other servers have the rest of its rows, so only too many can be noticed.
            fits = fits and bool(want.shape) and rows <= want.shape[0]
        if not fits or dtype != np.dtype(want.dtype):
            raise InvalidArgumentError(
                f"variable {held.entry.name!r} is {dtype.name}{list(shape)}, and the "
                f"tree of optimizer {rule.tree.name!r} says that it is "
                f"{'a part of ' if is_part else ''}{np.dtype(want.dtype).name}"
                f"{list(want.shape)}"
            )


def _computes_wide() -> bool:
    import jax

    return bool(jax.dtypes.canonicalize_dtype(np.float64) == np.float64)
