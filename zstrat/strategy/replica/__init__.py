"""Runs the replicas of one process: as one program for all, or one after the other."""

from __future__ import annotations

from ._collective import AXIS as AXIS
from ._collective import Team as Team
from ._mapped import Spread as Spread
from ._mapped import mesh_of as mesh_of
from ._per_replica import local_results as local_results
from ._per_replica import select_replica as select_replica
