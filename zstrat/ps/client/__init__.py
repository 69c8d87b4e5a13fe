"""What is asked of a cluster's parameter servers: one client for all of them."""

from __future__ import annotations

from ._reading import READS as READS
