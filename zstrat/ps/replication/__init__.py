"""Keeps a backup of a parameter server's store in another process."""

from __future__ import annotations

from ._log_link import WINDOW as WINDOW
from ._log_link import ReplicationLog as ReplicationLog
