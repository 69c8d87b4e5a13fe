"""Gradients on their way to variables: the handle of an optimizer, its state."""

from __future__ import annotations
