"""Variables of which each device, or process, has a copy; and their strategies."""

from __future__ import annotations

from ._mirrored_store import MirroredVariables as MirroredVariables
