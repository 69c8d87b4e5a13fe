"""The replicas of one process: one program of all of them, or one after the other."""

from __future__ import annotations
