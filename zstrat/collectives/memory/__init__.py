"""Collectives of ranks on one host, in memory that they share."""

from __future__ import annotations
