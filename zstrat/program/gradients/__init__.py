"""``zs.grad`` and its kin: gradients with respect to variables, tables and all."""

from __future__ import annotations

from ._lookup_discovery import is_live as is_live
