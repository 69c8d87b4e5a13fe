"""Steps with collectives of several processes: in stages, or as one program."""

from __future__ import annotations
