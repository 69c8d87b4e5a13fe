"""Datasets that are distributed over workers and replicas."""

from __future__ import annotations

from ._synchronized_pass import PassLength as PassLength
from ._synchronized_pass import SynchronizedPass as SynchronizedPass
