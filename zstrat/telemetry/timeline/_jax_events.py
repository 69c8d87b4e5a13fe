"""What jax has noted of a worker, on the worker's clock, and how that travels.

In columns, as spans do, and with the names beside them: there are few, and most events
have the same ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class JaxEvent(NamedTuple):
    """``row`` is what it ran on: a thread, or a device. Seconds."""

    row: str
    name: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class JaxEvents:
    """Those of one worker; ``words`` says how far they may be wrong, or why there are
    none."""

    events: Sequence[JaxEvent]
    words: str


def jax_columns(jax: JaxEvents) -> list[np.ndarray]:
    """Numbers of rows and of names (uint32 [2, n]), begins and ends (float64 [2, n]),
    and what these are called, with the words, as JSON (uint8 [m])."""
    rows: dict[str, int] = {}
    names: dict[str, int] = {}
    numbers = [
        (rows.setdefault(each.row, len(rows)), names.setdefault(each.name, len(names)))
        for each in jax.events
    ]
    times = [(each.began, each.ended) for each in jax.events]
    text = json.dumps([list(rows), list(names), jax.words]).encode()
    return [
        np.array(numbers, np.uint32).reshape(-1, 2).T,
        np.array(times, np.float64).reshape(-1, 2).T,
        np.frombuffer(text, np.uint8),
    ]


def from_jax_columns(columns: Sequence[np.ndarray]) -> JaxEvents:
    """What `jax_columns` was given.

    Raises:
        ValueError: These are no such columns.
    """
    try:
        numbers, times, text = columns
        rows, names, words = json.loads(text.tobytes())
        events = [
            JaxEvent(str(rows[row]), str(names[name]), began, ended)
            for row, name, began, ended in zip(
                *numbers.tolist(), *times.tolist(), strict=True
            )
        ]
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(f"no columns of jax's events: {error}") from None
    return JaxEvents(events, str(words))
