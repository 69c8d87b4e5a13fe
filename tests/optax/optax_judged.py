"""What an outcome is worth: right, refused with the words that a user needs, or a
complaint. And the list of `docs/` that is made of the outcomes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from optax_model import parameters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optax_recipes import Case

HEAD = """# Which optax transformations run where

All public transformations of optax {version}, found by introspection and compared with
plain optax on one model, step by step. Homes in this process (no scope, `OneDevice`,
`Mirrored`, `MultiWorkerMirrored`, `TPU`, `CentralStorage`) hold the whole tree and run
all of them; the columns are about parameter servers, for variables in one piece and for
variables that a partitioner has cut.

- *whole*: runs on the whole tree, as in plain optax.
- *leaf by leaf*: runs beside each variable.
- *values of the step*: what depends on several gradients, such as a global norm, is
  computed in the step and travels with the gradients.
- *refused*: raises an error as soon as the optimizer's tree is known.

Made by `make optimizers`; do not edit.

| transformation | in this process | whole variables | partitioned variables |
|---|---|---|---|
"""

_CURE = re.compile(
    r"\b(instead|write|use|give|keep|put|place|pass|apply|leave|move|"
    r"MirroredStrategy|in the step)\b"
)
_REASON = re.compile(
    r"(value_fn|grad_fn|obj_fn|function|shape|example|[Ll]ookahead|random|\bkey\b)"
)


_BEFORE_REASONS = (
    r"^\S+:\d+ \(in \w+\): ",
    r"^optimizer '\w+' ",
    r"^cannot be applied to its tree, .*?\}\): ",
    r"^looks at more than one row at a time, so it cannot update the parts of ",
    r"^mixes variables, but parameter servers update each variable by itself: ",
)
"""What refusals say in the same way; the list is about the rest."""


def complaints(cases: Iterable[Case], outcomes: list[dict[str, str]]) -> list[str]:
    """Of all outcomes, those that break the law; each names the program, the home, the
    dtype and what happened."""
    known = {case.name: case for case in cases}
    found = []
    for outcome in outcomes:
        why = _complaint(known[outcome["case"]], outcome)
        if why:
            place = f"{outcome['case']} | {outcome['home']} | {outcome['dtype']}"
            found.append(f"{place} | {why}: {outcome['words']}")
    return found


def _complaint(case: Case, outcome: dict[str, str]) -> str:
    match outcome["kind"]:
        case "equal":
            return ""
        case "impossible":
            needed = outcome["dtype"] == "float64"
            return "plain optax does not run it: the recipe is wrong" if needed else ""
        case "refused":
            return _refused(case, outcome["home"], outcome["words"])
    return outcome["kind"]


def _refused(case: Case, home: str, words: str) -> str:
    if case.anywhere and re.search(case.anywhere, words):
        return ""
    if not home.startswith("servers"):
        return "refused, and nothing is refused in this process"
    is_cut = home in ("servers, partitioned", "servers, some cut")
    if case.on_servers == "runs" or (case.on_servers == "runs whole" and not is_cut):
        return "refused, and a parameter server can run it"
    named = leaves_named(words)
    if len(named) < (1 if is_cut else 2) and not _REASON.search(words):
        return f"refused without two leaves that couple (found {named}), nor a reason"
    return "" if _CURE.search(words) else "refused without what to write instead"


def leaves_named(words: str) -> list[str]:
    """The leaves of the model that are named, as ``layer/bias`` or as a path of jax."""
    found = []
    for part, leaves in parameters("float64").items():
        for name in leaves:
            ways = f"{part}/{name}", f"['{part}']['{name}']", f"{part}.{name}"
            if any(way in words for way in ways):
                found.append(ways[0])
    return found


def table(
    cases: dict[str, list[Case]],
    outcomes: list[dict[str, str]],
    coupled: set[str],
    version: str,
) -> str:
    """The list, of the outcomes in float64; one line for each public name's case."""
    kinds = {
        (outcome["case"], outcome["home"]): outcome
        for outcome in outcomes
        if outcome["dtype"] == "float64"
    }
    lines = []
    for listed in cases.values():
        for case in listed:
            inside = kinds.get((case.name, "no scope, in a step"))
            servers = [
                _said(case, kinds.get((case.name, home)), coupled)
                for home in ("servers, whole", "servers, partitioned")
            ]
            cells = [f"`{case.name}`", _inside(inside), *servers]
            lines.append(f"| {' | '.join(cells)} |")
    return HEAD.format(version=version) + "\n".join(lines) + "\n"


def _inside(outcome: dict[str, str] | None) -> str:
    if outcome is None or outcome["kind"] == "equal":
        return "whole"
    return f"refused: {_first_words(outcome['words'])}"


def _said(case: Case, outcome: dict[str, str] | None, coupled: set[str]) -> str:
    if outcome is None:
        return "refused: its extra arguments are functions"
    if outcome["kind"] == "equal":
        return "values of the step" if case.name in coupled else "leaf by leaf"
    return f"refused: {_first_words(outcome['words'])}"


def _first_words(words: str) -> str:
    """A refusal's reason: without the class, the optimizer's name, and the cure."""
    said = words.split(": ", 1)[-1].replace("\n", " ").replace("|", "/")
    for known in _BEFORE_REASONS:
        said = re.sub(known, "", said)
    said = re.split(r"[.;] ", said, maxsplit=1)[0].rstrip(".")
    return said if len(said) <= 160 else said[:157] + "..."


def named_in(text: str) -> set[str]:
    """The public names whose cases are in a list that `table` made."""
    return set(re.findall(r"^\| `([\w.]+)", text, re.MULTILINE))


def grouped(complained: list[str], most: int = 40) -> str:
    """For an assertion: the first of them, and how many there are."""
    rest = len(complained) - most
    more = [f"... and {rest} more"] if rest > 0 else []
    return "\n".join([f"{len(complained)} differences:", *complained[:most], *more])
