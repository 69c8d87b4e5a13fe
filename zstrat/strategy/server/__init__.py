"""Strategies whose variables lie on parameter servers."""

from __future__ import annotations
