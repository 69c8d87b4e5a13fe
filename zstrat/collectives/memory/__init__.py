"""Collectives in memory that the ranks of one host share.

Where a group has several hosts, the first rank of each exchanges messages for it.
"""

from __future__ import annotations
