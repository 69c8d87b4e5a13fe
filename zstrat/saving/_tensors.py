"""Pinned tensors as logical ones: one tensor for each variable, and one for each of its
slots.

However many servers store a variable, a checkpoint has one tensor for it. Slots with a
row for each row of the variable are joined in the same way, and so are the ids of the
rows of a hash table. A slot that an optimizer keeps once per component (a count of
steps) is stored once per component, with the component's range of rows. A component
that no gradient has reached has no slots: its rows are left out.

A slot's name is its path in the state of the optimizer: ``[0].mu``. The last key is a
field of the state of one transformation, and the keys before it say where that state is
in the chain. If a state has moved, as adam's state does in ``optax.chain(clip, adam)``,
all its fields have moved together, and it is found by its kind: the names of its
fields.

Law of matching slots: nothing is guessed. If there are several states of one kind, they
are matched only if all have their old paths, or all moved into (or out of) one position
of a chain.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zstrat.checkpoint import Manifest, StoredPiece, StoredTensor
from zstrat.errors import DataLossError
from zstrat.program import LocalOptimizer
from zstrat.variables import HashTable

from ._snapshot_sources import number_in_checkpoints

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ._graph import Graph, ObjectNode
    from ._snapshot_sources import SourceTensor

    StatePaths = Mapping[frozenset[str], list[str]]
    """By kind of state (the set of its field names): the sorted paths of the states of
    that kind."""


IDS: Final = ".ids"
"""The leaf name of the ids of a table's rows, used like the name of a slot."""

WAITING: Final = ".waiting"
"""The leaf name of the ids that have no row yet; `COUNTS` is the leaf with their
counts."""

COUNTS: Final = ".counts"
USES: Final = ".uses"
CLOCK: Final = ".clock"
TIMES: Final = ".times"
"""Leaf names: `USES`, the clock at the last gradient of each row; `CLOCK`, the clock,
which counts pushes and recorded times; `TIMES`, the recorded times with the clock at
each."""

GONE: Final = ".gone"
"""The leaf name of the ids that were removed since the base of a difference."""


class LogicalPiece(NamedTuple):
    """Rows ``[start, stop)`` of a logical tensor, under ``name`` in its file."""

    pinned: SourceTensor
    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Logical:
    """One tensor of a checkpoint before it is written; see `StoredTensor`. For a slot:
    ``optimizer`` is its optimizer, and ``leaf`` its path in the optimizer's state.
    Further arrays of a table (`IDS` and others) have a ``leaf`` and no optimizer."""

    variable: ObjectNode
    optimizer: ObjectNode | None
    leaf: str
    dtype: str
    shape: tuple[int, ...]
    by_rows: bool
    pieces: tuple[LogicalPiece, ...]

    @property
    def name(self) -> str:
        return _tensor_name(self.variable, self.optimizer, self.leaf)

    @property
    def nbytes(self) -> int:
        return sum(piece.pinned.info.nbytes for piece in self.pieces)

    def stored(self, where: Mapping[int, tuple[str, str, str]]) -> StoredTensor:
        """Returns the tensor in the form of the manifest. ``where``: by ``id`` of the
        pinned tensor, its file, its name in the file, and its digest."""
        pieces = tuple(
            StoredPiece(file, name, piece.start, piece.stop, digest)
            for piece in self.pieces
            for file, name, digest in (where[id(piece.pinned)],)
        )
        return StoredTensor(self.dtype, self.shape, pieces, self.by_rows)


def logical_tensors(graph: Graph, pinned: Sequence[SourceTensor]) -> list[Logical]:
    """Returns the tensors of a checkpoint of the graph; the values of variables come
    first."""
    at: dict[int, dict[int, dict[str, SourceTensor]]] = {}
    for each in pinned:
        key, number, leaf = each.entry[:3]
        at.setdefault(key, {}).setdefault(number, {})[leaf] = each
    found = [_logical(node, None, "", at) for node in graph.variables]
    tables = [x for x in graph.variables if isinstance(x.value, HashTable)]
    for node in tables:
        leaves = {
            leaf: None
            for component in node.value.components
            for leaf in at[component.spec.key][0]
            if leaf
        }
        found += [_logical(node, None, leaf, at) for leaf in leaves]
    for optimizer in [*graph.optimizers, *graph.local_optimizers]:
        for variable in graph.variables:
            slots = [
                at[component.spec.key].get(_number(optimizer), {})
                for component in variable.value.components
            ]
            # In order, each once; a component that no gradient has reached has none.
            leaves = dict.fromkeys(leaf for each in slots for leaf in each)
            found += [_logical(variable, optimizer, leaf, at) for leaf in leaves]
    return found


def beside_name(variable: ObjectNode, leaf: str) -> str:
    """Returns the tensor's name of a variable's value, or of a further array (``leaf``)
    of a table."""
    return f"{variable.path}/{leaf}".removeprefix("/") if leaf else variable.path


def _tensor_name(variable: ObjectNode, optimizer: ObjectNode | None, leaf: str) -> str:
    if optimizer is None:
        return beside_name(variable, leaf)
    return f"{optimizer.path}/.slots/{variable.path}/{leaf}".removeprefix("/")


def _number(optimizer: ObjectNode) -> int:
    value = optimizer.value
    is_local = isinstance(value, LocalOptimizer)
    return number_in_checkpoints(value) if is_local else value.id


def _logical(
    variable: ObjectNode,
    optimizer: ObjectNode | None,
    leaf: str,
    at: Mapping[int, Mapping[int, Mapping[str, SourceTensor]]],
) -> Logical:
    name = _tensor_name(variable, optimizer, leaf)
    number = 0 if optimizer is None else _number(optimizer)
    # One piece a component, at the rows that it has in the whole.
    components = variable.value.components
    pieces, start = [], 0
    for index, component in enumerate(components):
        shape: Sequence[int] = component.shape
        if component.spec.buckets is not None:
            counts = {WAITING: WAITING, COUNTS: WAITING, GONE: GONE}.get(leaf, IDS)
            shape = at[component.spec.key][0][counts].entry.shape
        stop = start + (shape[0] if shape else 0)
        pinned = at[component.spec.key].get(number, {}).get(leaf)
        # No gradient has reached a component without this slot: its rows are left out.
        if pinned is not None:
            stored = name if len(components) == 1 else f"{name}/.part_{index}"
            pieces.append(LogicalPiece(pinned, stored, start, stop))
        start = stop
    first = pieces[0].pinned.entry
    # All components of a variable are cut alike, so the first one says it for all.
    apart = ("", WAITING, COUNTS, GONE)
    by_rows = first.rows or (optimizer is None and leaf in apart)
    whole = tuple(first.shape)
    if by_rows and whole:
        whole = (start, *whole[1:])
    return Logical(
        variable, optimizer, leaf, first.dtype, whole, by_rows, tuple(pieces)
    )


class StoredNode(NamedTuple):
    """An object in the graph of a checkpoint.

    ``children``: by name, indices in the list of all nodes. ``beside``: further tensors
    of a table, by leaf name (`IDS` and others). ``slots`` of an optimizer: by index of
    a variable and path in the state, the tensor. ``state`` of an iterator: its position
    in its data; of an optimizer: `Optimizer.state_classes`, which older checkpoints
    lack; of a `LocalOptimizer`: the number of its ``round``.
    """

    kind: str
    path: str
    children: Mapping[str, int]
    tensor: str
    slots: Mapping[int, Mapping[str, str]]
    state: Mapping[str, Any]
    beside: Mapping[str, str]


def plain_graph(
    graph: Graph,
    logicals: Sequence[Logical],
    states: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Returns the graph in JSON form; `stored_graph` is the inverse. ``states``:
    `StoredNode.state` of iterators and optimizers, by their paths."""
    number = {id(node): index for index, node in enumerate(graph.nodes)}
    slots: dict[int, dict[str, dict[str, str]]] = {}
    beside: dict[int, dict[str, str]] = {}
    for logical in logicals:
        if logical.optimizer is None and logical.leaf:
            own_place = number[id(logical.variable)]
            beside.setdefault(own_place, {})[logical.leaf] = logical.name
        if logical.optimizer is not None:
            own = slots.setdefault(number[id(logical.optimizer)], {})
            # A text, as JSON has no other keys.
            leaves = own.setdefault(str(number[id(logical.variable)]), {})
            leaves[logical.leaf] = logical.name
    nodes = []
    for index, node in enumerate(graph.nodes):
        plain: dict[str, Any] = {"kind": node.kind, "path": node.path}
        if node.children:
            plain["children"] = {k: number[id(c)] for k, c in node.children.items()}
        if node.kind == "variable":
            plain["tensor"] = node.path
        if index in beside:
            plain["beside"] = beside[index]
        if states.get(node.path) or node.kind == "iterator":
            plain["state"] = states[node.path]
        if index in slots:
            plain["slots"] = slots[index]
        nodes.append(plain)
    return {"nodes": nodes}


def stored_graph(manifest: Manifest, file: str) -> list[StoredNode]:
    """Returns the graph of a checkpoint; the root is its first node.

    Raises:
        DataLossError: The manifest refers to nodes or tensors that do not exist.
    """
    # Its digest is right, but a later version, or another program, may have written it.
    match manifest.objects:
        case {"nodes": [_, *_] as listed}:
            return [_stored_node(each, len(listed), manifest, file) for each in listed]
    raise DataLossError(file, "", "it has tensors, and not the objects they belong to")


def _stored_node(plain: Any, count: int, manifest: Manifest, file: str) -> StoredNode:
    match plain:
        case {"kind": str(kind), "path": str(path)}:
            children, tensor = plain.get("children", {}), plain.get("tensor", "")
            try:
                slots = {int(k): dict(v) for k, v in plain.get("slots", {}).items()}
                state = dict(plain.get("state", {}))
                beside = dict(plain.get("beside", {}))
                node = StoredNode(
                    kind, path, dict(children), tensor, slots, state, beside
                )
            except (TypeError, ValueError, AttributeError):
                pass
            else:
                # Nobody who walks the graph has to check an index or a name again.
                places = {*node.children.values(), *slots}
                names = {n for leaves in slots.values() for n in leaves.values()}
                names |= {tensor} if kind == "variable" else set()
                names |= {*node.beside.values()}
                if places <= set(range(count)) and names <= set(manifest.tensors):
                    return node
    raise DataLossError(file, "", f"damaged object: {plain!r:.80}")


_KEY: Final = re.compile(
    r"""\.\w+|\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]'"]*)\]"""
)
"""One key of a path as `jax.tree_util.keystr` writes it."""


def matched_slots(wanted: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Returns the stored slot for each slot that an optimizer has, as far as one can be
    found."""
    here, there = _by_kind(wanted), _by_kind(stored)
    kinds = here.keys() & there.keys()
    found = {
        path + name: old + name
        for kind in kinds
        for path, old in _paired(here[kind], there[kind])
        for name in kind
    }
    # A state with more fields, or fewer, than it had.
    others = _names(here, kinds) & _names(there, kinds)
    return found | {name: name for name in others}


def _by_kind(names: Iterable[str]) -> StatePaths:
    fields: dict[str, set[str]] = defaultdict(set)
    for name in names:
        keys = _KEY.findall(name)
        # A name that is not made of keys is a field by itself, of no state.
        last = keys[-1] if keys and "".join(keys) == name else name
        fields[name.removesuffix(last)].add(last)
    found: dict[frozenset[str], list[str]] = defaultdict(list)
    for path in sorted(fields):
        found[frozenset(fields[path])].append(path)
    return found


def _paired(here: list[str], there: list[str]) -> list[tuple[str, str]]:
    """Pairs the paths of states of one kind in the program with those in the
    checkpoint; [] if the pairs are not certain."""
    if len(here) != len(there):
        return []
    # Both are sorted: states that moved into one place kept their order there.
    pairs = list(zip(here, there, strict=True))
    if len(pairs) == 1 or _is_moved(pairs) or _is_moved([(b, a) for a, b in pairs]):
        return pairs
    return []


def _is_moved(pairs: list[tuple[str, str]]) -> bool:
    """Returns whether in every pair the first path is a prefix followed by the second
    path; the prefix, which may be empty, must be the same for all pairs."""
    prefixes = {path.removesuffix(old) for path, old in pairs if path.endswith(old)}
    return len(prefixes) == 1 and all(path.endswith(old) for path, old in pairs)


def _names(states: StatePaths, without: Iterable[frozenset[str]]) -> set[str]:
    kinds = states.keys() - set(without)
    return {path + name for kind in kinds for path in states[kind] for name in kind}
