"""Collectives in memory that the ranks of one host share.

If a group has several hosts, the first rank of each host exchanges messages on behalf
of the host.
"""

from __future__ import annotations
