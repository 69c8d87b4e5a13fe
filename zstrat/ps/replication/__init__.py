"""A second copy of what a parameter server holds, in another process."""

from __future__ import annotations
