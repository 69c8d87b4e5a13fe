"""A coordinator without threads: all of it on the loop that runs, for simulations."""

from __future__ import annotations

from zstrat.coordinator._calls import Code as Code
from zstrat.coordinator._calls import ScheduledCall as ScheduledCall
from zstrat.coordinator._session_pause import cut_of as cut_of

from ._coordinator import LoopCoordinator as LoopCoordinator
