"""Variables that have a copy on each device or in each process, and their
strategies."""

from __future__ import annotations

from ._mirrored_store import MirroredVariables as MirroredVariables
