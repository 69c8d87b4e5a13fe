"""Sends requests to the parameter servers of a cluster: one client for all of them."""

from __future__ import annotations

from ._reading import READS as READS
