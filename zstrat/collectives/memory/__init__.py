"""Collectives in memory that ranks of one host share; first ranks speak for hosts."""

from __future__ import annotations
