"""Variables of which each device, or process, has a copy; and their strategies."""

from __future__ import annotations
