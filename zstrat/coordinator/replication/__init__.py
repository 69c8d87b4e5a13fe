"""Stores with a second copy: who has which, and what follows if one is lost."""

from __future__ import annotations

from ._replication import Replication as Replication
from ._wish import check_replicas as check_replicas
