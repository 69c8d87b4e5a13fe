"""Snapshots of values that are written to files, and loading of values from files."""

from __future__ import annotations
