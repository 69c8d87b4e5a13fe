"""One connection between two tasks, without I/O: `Peer` and its parts."""

from __future__ import annotations
