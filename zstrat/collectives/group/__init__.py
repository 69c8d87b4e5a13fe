"""The members of a group: how they come together, call, and part."""

from __future__ import annotations
