"""Applies gradients to variables: optimizers, their state, and gradient calls."""

from __future__ import annotations
