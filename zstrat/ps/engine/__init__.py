"""Optimizers and plain updates, carried out where the variables live."""

from __future__ import annotations
