"""Chooses the algorithm for a call by a table of rules, which are measured or built in.

Law: the choice depends only on values that are equal on all ranks, the table among
them. Ranks with different tables would wait for hops that nobody sends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.config import MiB, read_toml

from ._algorithms import algorithm_named

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from zstrat.wire import PlainTree

_WORTH: Final = 1.05
"""Factor by which another algorithm has to be faster to be chosen from the next size
on: smaller differences are noise."""

_FIELDS: Final = ("call", "algorithm", "ranks", "bytes", "one_host")


class Rule(NamedTuple):
    """A rule of the table: ``algorithm`` carries out ``call`` in groups of at most
    ``ranks`` ranks, on arrays of at most ``nbytes`` bytes; None: of any size.
    ``one_host``: True: only if all ranks are on one host, False: only if they are not,
    None: in both cases."""

    call: str
    algorithm: str
    ranks: int | None = None
    nbytes: int | None = None
    one_host: bool | None = None

    def holds(self, call: str, nbytes: int, ranks: int, one_host: bool) -> bool:
        return (
            call == self.call
            and (self.ranks is None or ranks <= self.ranks)
            and (self.nbytes is None or nbytes <= self.nbytes)
            and (self.one_host is None or one_host == self.one_host)
        )


@dataclass(frozen=True, slots=True)
class Choices:
    """A table of algorithms. The first rule that applies to a call decides; if none
    applies, `DEFAULT_RULES` decide."""

    rules: tuple[Rule, ...] = ()

    def choose(self, call: str, nbytes: int, ranks: int, one_host: bool = False) -> str:
        """Returns the name of the algorithm for ``call`` ("all_reduce", ...).

        Raises:
            ValueError: There is no such call.
        """
        for rule in (*self.rules, *DEFAULT_RULES):
            if rule.holds(call, nbytes, ranks, one_host):
                return rule.algorithm
        calls = ", ".join(dict.fromkeys(rule.call for rule in DEFAULT_RULES))
        raise ValueError(f"call {call!r}: expected one of {calls}")

    def to_plain(self) -> dict[str, PlainTree]:
        """Returns the table as plain data, in the form that `choices_from` takes."""
        return {"rule": [_plain(rule) for rule in self.rules]} if self.rules else {}

    def to_toml(self) -> str:
        """Returns the text of a file that `read_choices` reads."""
        return "\n".join(map(_paragraph, self.rules))


# Where several algorithms are nearly as fast: the one with the fewest hops for small
# arrays, because a hop costs its ranks some 20 µs of work; for large ones the ring,
# because every line carries one stream only, and a rank holds no more than a few
# chunks. Beyond 64 ranks its steps are too many. Where the lines lie between was read
# from `benchmarks.line_cost.cost` with 20 µs of overhead.
DEFAULT_RULES: Final = (
    # Two ranks that give each other all they have are through after one step.
    Rule("all_reduce", "doubling", ranks=2, nbytes=MiB),
    Rule("all_reduce", "tree", nbytes=32 * 1024),
    # Ranks of one machine share its cores: what a hop costs counts more than its bytes.
    Rule("all_reduce", "tree", ranks=4, nbytes=MiB, one_host=True),
    Rule("all_reduce", "direct", ranks=8, nbytes=256 * 1024),
    Rule("all_reduce", "ring", ranks=8),
    Rule("all_reduce", "double_tree", nbytes=MiB),
    Rule("all_reduce", "ring", ranks=64),
    Rule("all_reduce", "halving_doubling"),
    Rule("reduce_scatter", "direct", nbytes=256 * 1024),
    Rule("reduce_scatter", "ring", ranks=64),
    Rule("reduce_scatter", "direct"),
    Rule("all_gather", "direct", ranks=8, nbytes=256 * 1024),
    Rule("all_gather", "ring", ranks=8),
    Rule("all_gather", "doubling", nbytes=MiB),
    Rule("all_gather", "ring", ranks=64),
    Rule("all_gather", "doubling"),
    Rule("broadcast", "tree", nbytes=64 * 1024),
    Rule("broadcast", "chain", ranks=8),
    Rule("broadcast", "scatter", nbytes=16 * MiB),
    Rule("broadcast", "chain"),
    Rule("all_to_all", "pairwise"),
    Rule("barrier", "dissemination"),
)


def choices_from(plain: Mapping[str, object]) -> Choices:
    """Returns the table with the rules in plain data of a TOML file: ``[[rule]]`` with
    the fields of `Rule` (``bytes`` for nbytes).

    Raises:
        ValueError: The data are not such rules; the error says where.
    """
    entries = plain.get("rule", [])
    unknown = sorted(set(plain) - {"rule"})
    if unknown or not isinstance(entries, list):
        raise ValueError(
            f"a table of algorithms has nothing but [[rule]] entries, not "
            f"{', '.join(unknown) or repr(entries)}"
        )
    return Choices(tuple(_rule(at, entry) for at, entry in enumerate(entries, 1)))


def read_choices(path: str | os.PathLike[str]) -> Choices:
    """Reads a table of algorithms from a TOML file.

    Raises:
        ValueError: The file is missing, or has no such table; the error names the file.
    """
    plain = read_toml(path)
    try:
        return choices_from(plain)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class Measurement(NamedTuple):
    """The measured duration of one call with one algorithm."""

    call: str
    algorithm: str
    ranks: int
    nbytes: int
    one_host: bool
    seconds: float


def fitted(measurements: Iterable[Measurement]) -> Choices:
    """Returns the table that chooses, for each size, the algorithm with the lowest
    median duration.

    Between two measured sizes of arrays (or of groups) the choice changes at their
    geometric mean; above the last size the algorithm that was fastest there continues.
    The table is empty if nothing was measured.
    """
    rules: list[Rule] = []
    rows = sorted(measurements, key=lambda m: (m.call, m.one_host, m.ranks, m.nbytes))
    for (call, one_host), of_call in groupby(rows, lambda m: (m.call, m.one_host)):
        groups = [(r, list(ms)) for r, ms in groupby(of_call, lambda m: m.ranks)]
        ends = _between([ranks for ranks, _ in groups])
        for (_, measurements), end in zip(groups, ends, strict=True):
            for nbytes, algorithm in _winners(measurements):
                rules.append(Rule(call, algorithm, end, nbytes, one_host))
    return Choices(tuple(rules))


def _winners(rows: Sequence[Measurement]) -> Iterator[tuple[int | None, str]]:
    """Yields, for one group size, the fastest algorithm with the largest array size for
    which it is chosen (None: no limit). ``rows`` are sorted by size."""
    sizes: list[int] = []
    best: list[str] = []
    for nbytes, same in groupby(rows, lambda m: m.nbytes):
        times: dict[str, list[float]] = {}
        for row in same:
            times.setdefault(row.algorithm, []).append(row.seconds)
        middle = {name: median(found) for name, found in times.items()}
        fastest = min(middle, key=middle.__getitem__)
        if best and middle.get(best[-1], math.inf) <= _WORTH * middle[fastest]:
            fastest = best[-1]
        sizes.append(nbytes)
        best.append(fastest)
    ends = _between(sizes)
    for at, (end, name) in enumerate(zip(ends, best, strict=True)):
        if at + 1 == len(best) or best[at + 1] != name:
            yield end, name


def _between(sizes: Sequence[int]) -> list[int | None]:
    """Returns for each measured size the bound up to which its result is used: the
    geometric mean with the next size; None for the last."""
    return [*(math.isqrt(less * more) for less, more in pairwise(sizes)), None]


def _rule(at: int, entry: object) -> Rule:
    if not isinstance(entry, Mapping):
        raise ValueError(f"rule {at}: expected fields {', '.join(_FIELDS)}")
    for name, value in entry.items():
        good = {"call": str, "algorithm": str, "one_host": bool}.get(name, int)
        # By type: in Python a bool is an int, too.
        if name not in _FIELDS or type(value) is not good:
            raise ValueError(
                f"rule {at}: {name} = {value!r}: expected texts call and algorithm, "
                "whole numbers ranks and bytes, true or false for one_host"
            )
        if isinstance(value, int) and value < 0:
            raise ValueError(f"rule {at}: {name} = {value}: expected 0 or more")
    call, algorithm = entry.get("call"), entry.get("algorithm")
    if call is None or algorithm is None:
        raise ValueError(f"rule {at}: expected call and algorithm at least")
    try:
        algorithm_named(call, algorithm)
    except ValueError as error:
        raise ValueError(f"rule {at}: {error}") from None
    return Rule(
        *(call, algorithm, entry.get("ranks"), entry.get("bytes")),
        one_host=entry.get("one_host"),
    )


def _plain(rule: Rule) -> dict[str, PlainTree]:
    named = zip(_FIELDS, rule, strict=True)
    return {name: value for name, value in named if value is not None}


def _paragraph(rule: Rule) -> str:
    # JSON writes names, whole numbers, true and false as TOML does.
    lines = [f"{name} = {json.dumps(value)}" for name, value in _plain(rule).items()]
    return "\n".join(("[[rule]]", *lines, ""))
