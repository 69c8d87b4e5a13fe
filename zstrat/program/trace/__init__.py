"""What a step function does with variables and iterators, found by tracing it."""

from __future__ import annotations
