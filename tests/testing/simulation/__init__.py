"""A cluster in one process on virtual time: a seed says what happens to it."""

from __future__ import annotations

from ._mutations import MUTATIONS as MUTATIONS
from ._mutations import mutated as mutated
from ._rounds_model import DrawnRounds as DrawnRounds
from ._run import SeedVerdict as SeedVerdict
from ._run import run_scenario as run_scenario
from ._run import run_seed as run_seed
from ._scenario import Fault as Fault
from ._scenario import Scenario as Scenario
from ._scenario import scenario_of as scenario_of
from ._world import Meter as Meter
