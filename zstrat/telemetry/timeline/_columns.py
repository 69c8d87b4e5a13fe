"""Spans as they travel: a column for each of their parts, which is a quarter of the
bytes that a record for each would be, and no work for a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from zstrat.telemetry._phases import Phase, PhaseSpan

if TYPE_CHECKING:
    from collections.abc import Sequence


def columns_of(spans: Sequence[PhaseSpan]) -> tuple[list[str], list[np.ndarray]]:
    """The names of phases; and steps (int64 [n]), places among these names (uint8 [n]),
    begins and ends (float64 [2, n])."""
    names = list(Phase)
    place = {name: number for number, name in enumerate(names)}
    steps = np.array([span.step for span in spans], np.int64)
    phases = np.array([place[span.phase] for span in spans], np.uint8)
    times = np.array([(span.began, span.ended) for span in spans], np.float64)
    return [str(name) for name in names], [steps, phases, times.reshape(-1, 2).T]


def spans_of(names: Sequence[str], columns: Sequence[np.ndarray]) -> list[PhaseSpan]:
    """What `columns_of` was given.

    Raises:
        ValueError: These are no such columns.
    """
    try:
        steps, phases, times = columns
        begins, ends = times
        called = [Phase(name) for name in names]
        return [
            PhaseSpan(step, called[phase], began, ended)
            for step, phase, began, ended in zip(
                steps.tolist(),
                phases.tolist(),
                begins.tolist(),
                ends.tolist(),
                strict=True,
            )
        ]
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(f"no columns of spans: {error}") from None
