"""Functions and objects as bytes, between tasks of one program."""

from __future__ import annotations
