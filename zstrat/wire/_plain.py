"""What fields of messages of every kind may hold."""

from __future__ import annotations

import numpy as np

Arrays = tuple[np.ndarray, ...]


PlainTree = (
    None | bool | int | float | str | bytes | list["PlainTree"] | dict[str, "PlainTree"]
)
"""Free-form plain data: statistics, layouts of results, details of an error."""
