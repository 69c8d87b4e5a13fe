"""Matches objects of the program with those of a checkpoint; decides without I/O.

The stored graph and the program's graph are walked together, by the names under which
objects are held. An object that appears later (an attribute set on a module, say) is
matched then, as long as something references the `Matching`.

Law of the file: a match is recorded by `Matching.accept` alone, after its values were
loaded; a walk that ends with an error changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.coordinator import PerWorkerIterator
from zstrat.errors import InvalidArgumentError, NotFoundError
from zstrat.program import LocalOptimizer
from zstrat.variables import AbstractVariable, HashTable, Module, Optimizer

from ._graph import SAVE_COUNTER, SavedIterator, escaped, graph_of, held, is_trackable
from ._snapshot_sources import RestoredWindows
from ._tensors import IDS, matched_slots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from zstrat.checkpoint import StoredTensor
    from zstrat.variables import VariableHandle

    from ._tensors import StoredNode


class Load(NamedTuple):
    """A stored tensor to be loaded for a variable: its value (``optimizer`` None), or
    the slot ``leaf`` of an optimizer. ``tensor`` None: reset the optimizer's slots of
    this variable to their initial values. If a tensor lacks some rows, these rows of a
    value stay as they are; those of a slot get their initial value. ``beside``: further
    tensors of a table, by name: the ids of its rows (`IDS`), and more."""

    variable: AbstractVariable
    optimizer: Optimizer | None
    leaf: str
    tensor: StoredTensor | None
    beside: Mapping[str, StoredTensor] | None = None


@dataclass(slots=True)
class MatchResult:
    """What one walk of the two graphs has found."""

    pairs: list[tuple[Any, int]] = field(default_factory=list)
    """Objects of the program, each with the index of its stored node."""
    missing: list[str] = field(default_factory=list)
    """Objects of the program that the checkpoint lacks, as text."""
    wrong: list[str] = field(default_factory=list)
    """Differences between objects of the program and of the checkpoint, as text."""
    left: dict[str, str] = field(default_factory=dict)
    """Slots in the checkpoint that the program's optimizer does not have: a text for
    each, by the tensor's name."""
    loads: list[Load] = field(default_factory=list)
    partly: list[tuple[Optimizer, AbstractVariable]] = field(default_factory=list)
    """Pairs of an optimizer and a variable for which the checkpoint lacks some
    slots."""
    places: list[tuple[SavedIterator, int, Mapping[str, Any]]] = field(
        default_factory=list
    )
    """Iterators, each with the index of its stored node and its position in its
    data."""
    windows: list[RestoredWindows] = field(default_factory=list)
    worker_places: dict[int, list[str]] = field(default_factory=dict)
    """For iterators on workers: the position in each input pipeline, by number of the
    iterator."""

    @property
    def is_new(self) -> bool:
        """Whether there is an object whose value is to be restored now."""
        return bool(self.pairs or self.places)

    @property
    def components(self) -> list[VariableHandle]:
        """The components of all variables of which something is loaded."""
        return [part for each in self.loads for part in each.variable.components]

    def add(self, other: MatchResult) -> None:
        """Adds the findings of a later walk. Positions of iterators in this process are
        not added, because the program drops such iterators at the end of a pass."""
        self.pairs += other.pairs
        self.missing += other.missing
        self.wrong += other.wrong
        self.left |= other.left
        self.loads += other.loads
        self.windows += other.windows
        self.worker_places |= other.worker_places

    def require_fit(self, path: str) -> None:
        """Refuses a checkpoint whose values do not fit the program's objects.

        Raises:
            InvalidArgumentError: An object has another shape or dtype, or two different
                stored values; names all such objects.
        """
        _require_none(self.wrong, path)

    def require_complete(self, path: str) -> None:
        """Refuses a checkpoint that lacks an object of the program, or has slots that
        the program lacks.

        Raises:
            InvalidArgumentError: The checkpoint has slots that an optimizer does not
                have.
            NotFoundError: Objects of the program are not in the checkpoint; names all
                of them.
        """
        _require_none([*self.left.values()], path, _LEAVES_OUT)
        if self.missing:
            raise NotFoundError(
                f"checkpoint {path} lacks what this program has, nothing was restored:"
                "\n" + "\n".join(self.missing) + "\nIf that is meant, these keep their "
                "values with restore(path, expect_partial=True)"
            )


class Matching:
    """The graph of a checkpoint, and which of its nodes were matched with objects of
    the program.

    Args:
        skip: Indices of nodes that are matched with no object.
        grows: Variables may have more rows than in the checkpoint.
    """

    def __init__(
        self,
        nodes: Sequence[StoredNode],
        tensors: Mapping[str, StoredTensor],
        skip: frozenset[int] = frozenset(),
        *,
        grows: bool = False,
    ) -> None:
        self._grows = grows
        self._left: list[str] = []
        self._nodes, self._tensors, self._skip = nodes, tensors, skip
        self._taken: dict[int, dict[int, Any]] = {}
        """By stored node: the objects that match it, by ``id``."""

    def find(
        self, value: Any, index: int, path: str = "", *, named: bool = True
    ) -> MatchResult:
        """Walks an object of the program together with a stored node; records nothing.

        Args:
            path: The path on which the program reaches the object, for messages.
            named: See `is_trackable`.
        """
        found = MatchResult()
        self._walk(value, index, path, found, set(), named)
        # After the whole walk: an optimizer may be reached before its variables.
        self._find_twice(found)
        self._find_slots(found)
        self._find_windows(found)
        return found

    def accept(self, found: MatchResult) -> list[Module]:
        """Records the findings of a walk as matched; returns the modules that were
        matched for the first time."""
        new = []
        for value, index in found.pairs:
            # Held, not only counted: an id is one object's as long as that lives.
            taken = self._taken.setdefault(index, {})
            if id(value) not in taken:
                taken[id(value)] = value
                if isinstance(value, Module):
                    new.append(value)
        # Without the iterator: it is dropped at the end of its pass, and the next one
        # is not to be set back to the place of the checkpoint.
        for _, index, _ in found.places:
            self._taken.setdefault(index, {})
        self._left += found.left
        return new

    def child_of(self, holder: Any, name: str) -> list[int]:
        """Returns the indices of the stored nodes with which an attribute of a matched
        object is matched."""
        return [
            index
            for node, values in self._taken.items()
            if id(holder) in values
            and (index := self._nodes[node].children.get(name)) is not None
        ]

    def unused(self) -> list[str]:
        """Returns the stored variables, optimizers and slots that were matched with no
        object."""
        nodes = [
            node.path
            for index, node in enumerate(self._nodes)
            if index not in self._taken
            and index not in self._skip
            and node.kind != "group"
        ]
        return nodes + self._left

    def _walk(
        self,
        value: Any,
        index: int,
        path: str,
        found: MatchResult,
        seen: set[tuple[int, int, bool]],
        named: bool,
    ) -> None:
        # Graphs may have circles, and one object may match several stored nodes.
        if (id(value), index, named) in seen:
            return
        seen.add((id(value), index, named))
        node = self._nodes[index]
        is_new = id(value) not in self._taken.get(index, {})
        if isinstance(value, AbstractVariable):
            if node.kind != "variable":
                found.missing.append(
                    f"  {words(value)} at {path}: not a variable there"
                )
                return
            if is_new:  # what was restored before may have been trained since
                self._match_value(value, node, path, found)
        elif isinstance(value, Optimizer) and node.kind != "optimizer":
            found.missing.append(f"  optimizer {value.name!r} at {path}")
            return
        elif isinstance(value, SavedIterator):
            if node.kind != "iterator":
                found.missing.append(f"  iterator at {path}")
            elif index not in self._taken:  # a later one begins its pass from the start
                self._match_iterator(value, index, path, found)
            return
        if is_new:
            found.pairs.append((value, index))
        # Below a module nobody asked by name for iterators to be saved.
        named = named and not isinstance(value, Module)
        for name, child in held(value).items():
            if not is_trackable(child, named=named):
                continue
            below = f"{path}/{escaped(name)}".removeprefix("/")
            if node.children.get(name) in self._skip:
                continue
            if name in node.children:
                self._walk(child, node.children[name], below, found, seen, named)
            # `write` stores no count of saves; that of the root keeps its value then.
            elif path or name != SAVE_COUNTER:
                found.missing += _leaves(child, below, named)

    def _match_value(
        self,
        variable: AbstractVariable,
        node: StoredNode,
        path: str,
        found: MatchResult,
    ) -> None:
        tensor = self._tensors[node.tensor]
        shape, dtype = variable.shape, variable.dtype.name
        if isinstance(variable, HashTable) or node.beside:
            self._match_table(variable, node, path, found)
        elif tensor.dtype != dtype or not self._fits(tensor, shape):
            more = tensor.dtype == dtype and _has_grown(tensor, shape)
            hint = "; its rows fit with restore(path, partial='rows')" if more else ""
            found.wrong.append(
                f"  {words(variable)} at {path}: the checkpoint has {tensor}{hint}"
            )
        elif not tensor.is_whole:
            found.wrong.append(f"  {words(variable)} at {path}: some rows are missing")
        else:
            found.loads.append(Load(variable, None, "", replace(tensor, shape=shape)))

    def _match_table(
        self,
        variable: AbstractVariable,
        node: StoredNode,
        path: str,
        found: MatchResult,
    ) -> None:
        tensor = self._tensors[node.tensor]
        at = f"  {words(variable)} at {path}: the checkpoint has {tensor}"
        if not isinstance(variable, HashTable):
            found.wrong.append(f"{at} with ids: restore it into a zs.HashTable")
        elif IDS not in node.beside:
            found.wrong.append(
                f"{at} without ids: restore it into a variable, and give its rows ids "
                "with table.assign(numpy.arange(rows), variable.numpy())"
            )
        elif (tensor.dtype, tensor.shape[1:]) != (
            variable.dtype.name,
            variable.shape[1:],
        ):
            found.wrong.append(at)
        else:
            beside = {leaf: self._tensors[n] for leaf, n in node.beside.items()}
            found.loads.append(Load(variable, None, "", tensor, beside))

    def _fits(self, tensor: StoredTensor, shape: tuple[int, ...]) -> bool:
        return tensor.shape == shape or (self._grows and _has_grown(tensor, shape))

    def _match_iterator(
        self, iterator: SavedIterator, index: int, path: str, found: MatchResult
    ) -> None:
        state = self._nodes[index].state
        try:
            why = iterator.misfit(state)
        except InvalidArgumentError as error:  # the place of another kind of iterator
            why = str(error)
        if why:
            found.wrong.append(f"  iterator at {path}: {why}")
        else:
            found.places.append((iterator, index, state))
            if isinstance(iterator, PerWorkerIterator):
                found.worker_places[iterator.resource] = iterator.states_of(state)

    def _find_twice(self, found: MatchResult) -> None:
        """Finds variables that the program reaches on two paths at which the checkpoint
        has two different variables, unless the stored values are known to be equal."""
        # Those that were taken before count, too: the second place may appear later.
        new = {id(value) for value, _ in found.pairs}
        slots = [self._nodes[at].slots for _, at in self._by_kind(found, Optimizer)]
        first: dict[int, int] = {}
        for variable, at in self._by_kind(found, AbstractVariable):
            before = first.setdefault(id(variable), at)
            if id(variable) not in new or at == before:
                continue
            node, other = self._nodes[at], self._nodes[before]
            pairs = [(node.tensor, other.tensor)]
            for stored in slots:
                one, two = stored.get(at, {}), stored.get(before, {})
                pairs += [(one[leaf], two[leaf]) for leaf in one.keys() & two]
            if not all(self._are_same(*pair) for pair in pairs):
                found.wrong.append(
                    f"  {words(variable)} is one here, and in the checkpoint there are "
                    f"two, at {other.path} and {node.path}, with different values (or "
                    "slots of an optimizer), or cut into other parts: make two here, "
                    "too, or leave one of the places out of the Checkpoint"
                )

    def _are_same(self, name: str, other: str) -> bool:
        """Returns whether two stored tensors are known to be equal, by the digests of
        their parts; False if they were divided at different rows."""
        one, two = self._tensors[name], self._tensors[other]
        return [(p.start, p.stop, p.digest) for p in one.pieces] == [
            (p.start, p.stop, p.digest) for p in two.pieces
        ]

    def _find_slots(self, found: MatchResult) -> None:
        """Finds the slots of each pair of an optimizer and a variable of which at least
        one was matched now."""
        variables = self._by_kind(found, AbstractVariable)
        optimizers = self._by_kind(found, Optimizer)
        new = {(id(value), index) for value, index in found.pairs}
        for optimizer, at in optimizers:
            stored, classes = self._nodes[at].slots, self._nodes[at].state
            for variable, index in variables:
                if {(id(optimizer), at), (id(variable), index)} & new:
                    leaves = stored.get(index, {})
                    self._match_slots(optimizer, variable, leaves, classes, found)

    def _find_windows(self, found: MatchResult) -> None:
        """Finds the arrays that workers keep for windows of local steps, for each
        `LocalOptimizer` that was matched now. Workers start without such arrays for
        variables that are matched later."""
        variables = self._by_kind(found, AbstractVariable)
        for value, at in found.pairs:
            if isinstance(value, LocalOptimizer):
                node = self._nodes[at]
                arrays = [
                    (variable, leaf, self._tensors[name])
                    for variable, index in variables
                    for leaf, name in node.slots.get(index, {}).items()
                ]
                number = int(node.state.get("round", 0))
                found.windows.append(RestoredWindows(value, number, arrays))

    def _by_kind(self, found: MatchResult, kind: type[Any]) -> list[tuple[Any, int]]:
        taken = ((v, at) for at, values in self._taken.items() for v in values.values())
        both = {(id(v), at): (v, at) for v, at in (*taken, *found.pairs)}
        return [(v, at) for v, at in both.values() if isinstance(v, kind)]

    def _match_slots(
        self,
        optimizer: Optimizer,
        variable: AbstractVariable,
        stored: Mapping[str, str],
        classes: Mapping[str, str],
        found: MatchResult,
    ) -> None:
        # Without slots it had no gradient when it was saved: so slots that it has now
        # are forgotten.
        if not stored:
            found.loads.append(Load(variable, optimizer, "", None))
            return
        # Which stored slot is which of ours, and which are another class's.
        what = f"optimizer {optimizer.name!r} beside {words(variable)}"
        rows = variable.shape[:1]
        is_table = isinstance(variable, HashTable)
        infos = optimizer.slots_beside(variable)
        kept = {info.leaf: (info.rows, info.shape) for info in infos or ()}
        same = {leaf: leaf for leaf in stored}
        names = same if infos is None else matched_slots(kept, stored)
        others = _slots_of_other_classes(names, optimizer.state_classes, classes)
        for leaf, kinds in others.items():
            found.left[stored[names[leaf]]] = f"  {what} keeps {leaf} in {kinds}"
        # Slots of another optimizer's class: none is taken, as without a tree nothing
        # says which of them would fit.
        if infos is None and others:
            found.loads.append(Load(variable, optimizer, "", None))
            return
        if infos is None:
            # Its tree is not known yet. What is stored is compared when it is.
            for leaf, name in stored.items():
                tensor = self._tensors[name]
                if tensor.by_rows and tensor.shape[:1] != rows and not is_table:
                    found.wrong.append(f"  {leaf} of {what}: {_UNKNOWN_BEGIN}")
                found.loads.append(Load(variable, optimizer, leaf, tensor))
            return
        # What only one side has. Words in order, so that messages can be compared.
        for leaf in sorted(stored.keys() - {*names.values()}):
            found.left[stored[leaf]] = f"  {what} keeps no {leaf}"
        names = {leaf: name for leaf, name in names.items() if leaf not in others}
        for leaf in sorted(kept.keys() - names.keys()):
            found.missing.append(f"  {leaf} of {what}")
        # What both have is loaded, if it fits. A server has to know a variable's other
        # slots where it gets only some of them, or of some rows.
        is_part = len(names) < len(kept)
        for leaf, name in sorted(names.items()):
            tensor = self._tensors[stored[name]]
            by_rows, shape = kept[leaf]
            if is_table and by_rows:  # as many rows as there are ids
                shape = (*tensor.shape[:1], *shape[1:])
            if not self._fits(tensor, shape):
                found.wrong.append(
                    f"  {leaf} of {what} has {list(shape)}: the checkpoint has {tensor}"
                )
            elif by_rows and rows and not tensor.by_rows:
                found.wrong.append(f"  {leaf} of {what}: stored without its rows")
            else:
                tensor = replace(tensor, shape=shape)
                is_part |= tensor.by_rows and not tensor.is_whole and not is_table
                found.loads.append(Load(variable, optimizer, leaf, tensor))
        if is_part:
            found.partly.append((optimizer, variable))


def _slots_of_other_classes(
    names: Mapping[str, str], ours: Mapping[str, str], theirs: Mapping[str, str]
) -> dict[str, str]:
    """Returns the slots whose states are of another class in the checkpoint, and both
    classes as text. Adam and AdaBelief, for example, give their fields the same names.

    Args:
        names: The stored slot for each slot.
    """
    pairs = {leaf: (ours.get(leaf), theirs.get(old)) for leaf, old in names.items()}
    return {
        leaf: f"{one}, and the checkpoint in {other}"
        for leaf, (one, other) in sorted(pairs.items())
        if one and other and one != other
    }


def _has_grown(tensor: StoredTensor, shape: tuple[int, ...]) -> bool:
    """Returns whether a variable of this shape has more rows than the stored tensor,
    and rows of the same shape."""
    if not (tensor.by_rows and tensor.shape and shape):
        return False
    return tensor.shape[1:] == shape[1:] and tensor.shape[0] < shape[0]


_UNKNOWN_BEGIN: Final = (
    "the variable has more rows now, and how theirs begin is not known: make the "
    "optimizer with zs.Optimizer(transformation, params=params) before restoring"
)
_LEAVES_OUT: Final = (
    "It is another optimizer, or one in which several transformations keep the same "
    "fields. If that is meant, restore(path, expect_partial=True) leaves these out"
)


def _require_none(wrong: Sequence[str], path: str, *remedy: str) -> None:
    if wrong:
        raise InvalidArgumentError(
            f"checkpoint {path} does not fit this program, nothing was restored:\n"
            + "\n".join([*wrong, *remedy])
        )


def words(variable: AbstractVariable) -> str:
    """Returns the name that error messages use for a variable."""
    if isinstance(variable, HashTable):
        return str(variable.table)
    shape = list(variable.shape)
    return f"variable {variable.name!r} ({variable.dtype.name}{shape})"


def _leaves(value: Any, path: str, named: bool) -> list[str]:
    """Returns descriptions of the variables, optimizers and iterators below an object,
    as text."""
    found = []
    for node in graph_of(value, path).nodes:
        match node.value:
            case AbstractVariable():
                found.append(f"  {words(node.value)} at {node.path}")
            case Optimizer():
                found.append(f"  optimizer {node.value.name!r} at {node.path}")
            case each if named and isinstance(each, SavedIterator):
                found.append(f"  iterator at {node.path}")
    return found
