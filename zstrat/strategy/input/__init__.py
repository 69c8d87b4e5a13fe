"""Datasets that are shared out among workers and replicas."""

from __future__ import annotations

from ._replica_batches import PassLength as PassLength
from ._replica_batches import SynchronizedPass as SynchronizedPass
