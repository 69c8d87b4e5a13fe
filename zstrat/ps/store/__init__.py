"""The variables of one server: values, versions, what was applied already."""

from __future__ import annotations
