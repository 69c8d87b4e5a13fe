"""Datasets that are shared out among workers and replicas."""

from __future__ import annotations

from ._epoch_sync import PassLength as PassLength
from ._epoch_sync import SynchronizedPass as SynchronizedPass
