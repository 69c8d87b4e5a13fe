"""Rows of embedding tables in steps: which are wanted, read, and updated."""

from __future__ import annotations

from ._lookups import PlannedLookup as PlannedLookup
