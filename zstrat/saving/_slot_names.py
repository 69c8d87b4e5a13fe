"""Which stored slot is which of an optimizer's, where its transformation was wrapped.

A slot's name is its path in the state of the optimizer: ``[0].mu``. The last key is a
field of the state of one transformation, and the keys before it say where that is in
the chain. Fields of one state stay together, so a state that has moved, as adam's does
in ``optax.chain(clip, adam)``, is found by its kind: the names of its fields.

Law of the file: nothing is guessed. States of one kind of which there are several are
matched only if they all have their old paths, or all moved into (or out of) one place.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    StatePaths = Mapping[frozenset[str], list[str]]
    """Where the states of each kind are, sorted."""

_KEY: Final = re.compile(
    r"""\.\w+|\[(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\]'"]*)\]"""
)
"""One key of a path as `jax.tree_util.keystr` writes it."""


def matched_slots(wanted: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Returns the stored slot for each slot that an optimizer keeps, as far as there is
    one."""
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
        last = keys[-1] if keys and "".join(keys) == name else name
        fields[name.removesuffix(last)].add(last)
    found: dict[frozenset[str], list[str]] = defaultdict(list)
    for path in sorted(fields):
        found[frozenset(fields[path])].append(path)
    return found


def _paired(here: list[str], there: list[str]) -> list[tuple[str, str]]:
    """Returns the paths of states of one kind, here and in the checkpoint."""
    if len(here) != len(there):
        return []
    pairs = list(zip(here, there, strict=True))
    if len(pairs) == 1 or _is_moved(pairs) or _is_moved([(b, a) for a, b in pairs]):
        return pairs
    return []


def _is_moved(pairs: list[tuple[str, str]]) -> bool:
    """Returns whether each path is the other one after a common prefix, or without
    one."""
    prefixes = {path.removesuffix(old) for path, old in pairs if path.endswith(old)}
    return len(prefixes) == 1 and all(path.endswith(old) for path, old in pairs)


def _names(states: StatePaths, without: Iterable[frozenset[str]]) -> set[str]:
    kinds = states.keys() - set(without)
    return {path + name for kind in kinds for path in states[kind] for name in kind}
