"""What each rank of a collective does and when, as data: no I/O, no clock."""

from __future__ import annotations

from ._plans import progress_of as progress_of
