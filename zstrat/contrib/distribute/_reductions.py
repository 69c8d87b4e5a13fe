"""What a reduction of 1.12 may be asked for: its aggregations and its destinations."""

from __future__ import annotations

from typing import Any, Final

from zstrat.variables import VariableAggregation

FIRST: Final = VariableAggregation.ONLY_FIRST_TOWER


def require_aggregation(aggregation: Any) -> None:
    """Passes what 1.12 knows.

    Raises:
        AssertionError: Another one.
    """
    if aggregation not in (
        VariableAggregation.SUM,
        VariableAggregation.MEAN,
        FIRST,
    ):
        raise AssertionError(
            f"aggregation {aggregation!r}: expected VariableAggregation.SUM, MEAN or "
            "ONLY_FIRST_TOWER"
        )


def first_place(destinations: Any) -> Any:
    """Where a value is reduced that is wanted in several places.

    Raises:
        ValueError: There is none.
    """
    if isinstance(destinations, list | tuple):
        if not destinations:
            raise ValueError("destinations can not be empty: name a device")
        return destinations[0]
    return destinations
