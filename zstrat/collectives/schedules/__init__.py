"""Schedules: the actions of each rank in a collective call, as data. No I/O, no
clock."""

from __future__ import annotations

from ._plans import progress_of as progress_of
