"""Rows of embedding tables in steps: which rows a step requests, reads, and updates."""

from __future__ import annotations

from ._lookups import PlannedLookup as PlannedLookup
