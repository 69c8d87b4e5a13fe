"""Strategies whose variables lie on parameter servers."""

from __future__ import annotations

from ._variable_plan import Numbers as Numbers
from ._variable_plan import Placement as Placement
from ._variable_plan import PlacementRule as PlacementRule
from ._variable_plan import draft as draft
