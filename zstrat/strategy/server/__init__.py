"""Strategies whose variables are stored on parameter servers."""

from __future__ import annotations

from ._variable_placement import Numbers as Numbers
from ._variable_placement import PlacementRule as PlacementRule
from ._variable_placement import VariablePlacement as VariablePlacement
from ._variable_placement import draft as draft
