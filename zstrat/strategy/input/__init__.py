"""Datasets that are shared out among workers and replicas."""

from __future__ import annotations

from ._epoch_sync import Length as Length
from ._epoch_sync import Paced as Paced
