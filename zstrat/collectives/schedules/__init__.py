"""What each rank of a collective does and when, as data: no I/O, no clock."""

from __future__ import annotations
