"""Runs cases in homes, and says of each how it went; a program of its own, for it needs
float64 or eight devices from its first line on.

    python optax_run.py --dtype float64 --home mirrored --cases all --to outcomes.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from optax_catalogue import every_case
from optax_homes import (
    Home,
    Member,
    home_of_rank,
    homes_of,
    member,
    values_of,
)
from optax_programs import QUICK
from optax_reference import Difference, couples, difference, trajectory

if TYPE_CHECKING:
    from optax_recipes import Case
    from optax_trajectory import Trajectory

RANKS = "two_ranks"


@dataclass(frozen=True)
class Outcome:
    """How a case went: ``equal``, ``wrong``, ``refused``, ``error``, or ``impossible``
    where plain optax does not run on this tree either; and what is to be read."""

    case: str
    home: str
    dtype: str
    kind: str
    words: str = ""

    def __str__(self) -> str:
        return f"{self.case} | {self.home} | {self.dtype} | {self.kind}: {self.words}"


class Runner:
    """The cases of one dtype, with plain optax's trajectories."""

    def __init__(self, cases: list[Case], dtype: str, known: dict[str, Trajectory]):
        self.dtype = dtype
        self.cases = {case.name: case for case in cases}
        self.plain = {
            name: known.get(name) or trajectory(case, dtype)
            for name, case in self.cases.items()
        }

    def outcomes(self, home: Home, is_quick: bool = False) -> list[Outcome]:
        """Of all cases; if ``is_quick``, of those that are for this kind of home."""
        skipped = is_quick and not home.is_in_process
        cases = {
            name: case
            for name, case in self.cases.items()
            if not (skipped and QUICK[name] == "here")
        }
        found = [
            Outcome(name, home.name, self.dtype, "impossible", self.plain[name].failed)
            for name in cases
            if self.plain[name].failed
        ]
        able = [case for name, case in cases.items() if not self.plain[name].failed]
        for first in range(0, len(able), home.batch):
            found += self._batch(home, able[first : first + home.batch])
        return found

    def _batch(self, home: Home, cases: list[Case]) -> list[Outcome]:
        """All in one step; one by one where something is raised, to know by whom."""
        made: list[tuple[Case, Member]] = []
        found: list[Outcome] = []
        for case in cases:
            try:
                with home.scope():
                    start = self.plain[case.name].start
                    known = home.knows_its_tree
                    made.append((case, member(case, start, knows_its_tree=known)))
            except Exception as error:  # becomes the outcome
                found.append(self._raised(case, home, error))
        try:
            return found + self._trained(home, made)
        except Exception as error:  # becomes the outcome, of the one that raises it
            if len(made) == 1:
                return [*found, self._raised(made[0][0], home, error)]
            cases = [case for case, _ in made]
            half = len(cases) // 2
            return (
                found
                + self._batch(home, cases[:half])
                + self._batch(home, cases[half:])
            )

    def _trained(self, home: Home, made: list[tuple[Case, Member]]) -> list[Outcome]:
        if not made:
            return []
        step = home.stepper([one for _, one in made])
        wrong: dict[str, Difference] = {}
        count = max(len(self.plain[case.name].moments) for case, _ in made)
        for number in range(count):
            moments = [self.plain[case.name].moments[number] for case, _ in made]
            step([(moment.gradients, moment.extra) for moment in moments])
            for (case, one), moment in zip(made, moments, strict=True):
                if case.name not in wrong and (home.is_in_process or number in SEEN):
                    found = difference(
                        moment.values, values_of(one), number, rounds=case.rounds
                    )
                    if found is not None:
                        wrong[case.name] = found
        return [
            self._ended(home, case, one, wrong.get(case.name)) for case, one in made
        ]

    def _ended(
        self, home: Home, case: Case, one: Member, wrong: Difference | None
    ) -> Outcome:
        words = str(wrong or self._difference_of_state(case, one) or "")
        kind = "wrong" if words else "equal"
        return Outcome(case.name, home.name, self.dtype, kind, words)

    def _difference_of_state(self, case: Case, one: Member) -> str:
        """What is wrong with `Optimizer.state` after the last step; nothing if none."""
        plain, state = self.plain[case.name], one.optimizer.state
        wanted, got = jax.tree.structure(plain.state), jax.tree.structure(state)
        if wanted != got:
            return f"the state: expected the structure {wanted}, got {got}"
        last = len(plain.moments) - 1
        found = difference(plain.state, state, last, rounds=case.rounds)
        return "" if found is None else f"the state: {found}"

    def _raised(self, case: Case, home: Home, error: Exception) -> Outcome:
        kind = "refused" if isinstance(error, ValueError) else "error"
        words = f"{type(error).__name__}: {error}"
        return Outcome(case.name, home.name, self.dtype, kind, words)


SEEN = (0, 1, 4, 7, 8, 12)
"""The steps after which values on parameter servers are read."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--home", required=True, nargs="+")
    parser.add_argument("--cases", default="all")
    parser.add_argument("--only", default="")
    parser.add_argument("--coupled", action="store_true", help="say which cases couple")
    parser.add_argument("--plain", help="where plain optax's trajectories are kept")
    parser.add_argument("--to", required=True)
    given = parser.parse_args()
    assert jax.config.jax_enable_x64 == (given.dtype == "float64")
    cases = every_case()
    if given.cases == "quick":
        cases = [case for case in cases if case.name in QUICK]
    cases = [case for case in cases if given.only in case.name]
    runner = Runner(cases, given.dtype, _known(given.plain))
    _keep(given.plain, runner.plain)
    with contextlib.ExitStack() as stack:
        names = [name for name in given.home if name != RANKS]
        homes = [home for name in names for home in homes_of(name, stack)]
        quick = given.cases == "quick"
        found = [each for home in homes for each in runner.outcomes(home, quick)]
    if RANKS in given.home:
        found += _of_ranks(runner)
    said = {"outcomes": [asdict(outcome) for outcome in found], "coupled": []}
    if given.coupled:
        able = [name for name, plain in runner.plain.items() if not plain.failed]
        said["coupled"] = [
            name
            for name in able
            if couples(runner.cases[name], given.dtype, runner.plain[name])
        ]
    Path(given.to).write_text(json.dumps(said))


def _of_ranks(runner: Runner) -> list[Outcome]:
    """Two ranks, threads of this process, each with devices of its own."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "strategy"))
    import ranks

    ranks.TIMEOUT = 3000.0
    told = ranks.ranks(
        2, lambda strategy, rank: runner.outcomes(home_of_rank(strategy, rank))
    )
    return [outcome for outcomes in told for outcome in outcomes]


def _known(path: str | None) -> dict[str, Trajectory]:
    if path is None or not Path(path).exists():
        return {}
    return dict(pickle.loads(Path(path).read_bytes()))


def _keep(path: str | None, plain: dict[str, Any]) -> None:
    if path is not None and not Path(path).exists():
        Path(path).write_bytes(pickle.dumps(plain))


if __name__ == "__main__":
    sys.exit(main())
