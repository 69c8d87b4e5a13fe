"""Whether all that TensorFlow makes public around ``tf.distribute`` has its word here.

docs/tf_names.toml is what there is: classes and functions, members, arguments.
docs/names.toml says of each what zstrat has for it, in three ways:

- By itself: ``tf.distribute.X`` is ``zs.X``, and members and arguments are those of the
  same name. Nothing is written down for these; the code is looked at.
- ``[here]``: the place of one that is elsewhere.
- ``[[instead]]``: what to write instead of some ``names`` ``of`` a class or function:
  members (``eval``), arguments of a member (``join(timeout=)``), and of its call
  (``(constraint=)``); without names, all of it.

Law of the file: a word for what TensorFlow does not have, or for what zstrat has by the
same name, is as wrong as a word that is missing.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Names = Mapping[str, Any]

_ROOTS: Final = ("tf.distribute", "tf.compat.v1.distribute", "tf.train", "tf")
_RENAMED: Final = {"tf.compat.v1.distribute": "zs.compat.v1.distribute"}


@dataclass(frozen=True, slots=True)
class Fact:
    """One name: what it belongs to, and the member or argument that is meant."""

    owner: str
    name: str = ""


def wrong(inventory: Names, names: Names) -> list[str]:
    """What has no word, and words that are wrong; empty if all is well."""
    instead = set(_instead(names))
    facts = list(_facts(inventory))
    lines = [
        f"  {fact.owner} {fact.name}: {problem}"
        for fact in facts
        if not _is_covered(_first(fact, inventory), instead)
        and (problem := _missing(fact, names))
    ]
    lines += [
        f"  {name or 'all'} of {', '.join(owners)}: docs/names.toml says what to write "
        "instead, and TensorFlow does not have it"
        for owners, name in _groups(names)
        if not {Fact(owner, name) for owner in owners} & set(facts)
    ]
    lines += [
        f"  {fact.owner} {fact.name}: docs/names.toml says what to write instead of "
        f"it, and it is there, as {_place(fact.owner, names)}"
        for fact in instead & set(facts)
        if not _missing(fact, names)
    ]
    return sorted(lines)


def _groups(names: Names) -> Iterator[tuple[Sequence[str], str]]:
    """Each name of a group, with all that it may belong to."""
    for group in names.get("instead", ()):
        for name in group.get("names", [""]):
            yield group["of"], name


def _instead(names: Names) -> Iterator[Fact]:
    for owners, name in _groups(names):
        yield from (Fact(owner, name) for owner in owners)


def _is_covered(fact: Fact, instead: set[Fact]) -> bool:
    """Whether `instead` covers the fact, its owner, or the member that has it."""
    member = fact.name.partition("(")[0]
    above = {Fact(fact.owner), Fact(fact.owner, member)} if fact.name else set()
    return not instead.isdisjoint({fact, *above})


def _first(fact: Fact, inventory: Names) -> Fact:
    """The same fact, by the first of the paths that lead to its class."""
    return replace(fact, owner=inventory[fact.owner].get("same_as", fact.owner))


def _facts(inventory: Names) -> Iterator[Fact]:
    for owner, entry in inventory.items():
        yield Fact(owner)
        yield from (Fact(owner, f"({a}=)") for a in entry.get("arguments", ()))
        for member, arguments in entry.items():
            if member in ("arguments", "above", "same_as"):
                continue
            yield Fact(owner, member)
            if isinstance(arguments, list):
                yield from (Fact(owner, f"{member}({a}=)") for a in arguments)


def _missing(fact: Fact, names: Names) -> str:
    """Why the code has it not; empty if it has."""
    place = _place(fact.owner, names)
    member, _, argument = fact.name.rstrip("=)").partition("(")
    path = f"{place}.{member}" if member else place
    found = found_at(path)
    if found is None:
        return f"{path} is not there"
    if argument and argument not in _arguments(found):
        return f"{path} takes no {argument}"
    return ""


def _place(owner: str, names: Names) -> str:
    here: Names = names.get("here", {})
    if owner in here:
        return str(here[owner])
    root = next((root for root in _ROOTS if owner.startswith(f"{root}.")), "")
    rest = owner.removeprefix(root).removeprefix(".")
    return f"{_RENAMED.get(root, 'zs')}.{rest}"


def found_at(path: str) -> Any:
    """Returns what a path names, like ``zs.Strategy.run``; None: nothing."""
    found: Any = importlib.import_module("zstrat")
    for part in path.split(".")[1:]:
        inner = getattr(found, part, None)
        if inner is None and isinstance(found, ModuleType):
            try:
                inner = importlib.import_module(f"{found.__name__}.{part}")
            except ModuleNotFoundError:
                return None
        if inner is None:
            return _annotated(found, part)
        found = inner
    return found


def _annotated(owner: Any, name: str) -> Any:
    """What objects of the class have, and the class itself not."""
    classes = owner.__mro__ if isinstance(owner, type) else ()
    has = any(name in inspect.get_annotations(each) for each in classes)
    return owner if has else None


def _arguments(found: Any) -> Sequence[str]:
    try:
        return list(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return ()
