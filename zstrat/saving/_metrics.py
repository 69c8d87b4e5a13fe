"""Where the numbers of an evaluation go: a file of JSON lines, TensorBoard."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Mapping


class MetricsWriter(Protocol):
    """Takes the metrics of one evaluation after the other."""

    def write(
        self, step: int, values: Mapping[str, float], about: Mapping[str, Any]
    ) -> None:
        """Metrics at a step. ``about``: what else is known, as ``checkpoint``."""
        ...

    def close(self) -> None: ...


@final
class JsonLines:
    """Appends ``{"step": 1200, "loss": 0.25, "checkpoint": ..., "time": ...}``, one
    line an evaluation; a number that JSON does not have (NaN) becomes null.

    Raises:
        OSError: The file cannot be written; also in `write`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Line by line: whoever follows the file sees whole lines only.
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def write(
        self, step: int, values: Mapping[str, float], about: Mapping[str, Any]
    ) -> None:
        plain = {k: v if math.isfinite(v) else None for k, v in values.items()}
        line = json.dumps({"step": step, **plain, **about}, ensure_ascii=False)
        self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()


@final
class TensorBoardEvents:
    """Scalars for TensorBoard in a folder (``pip install zstrat[tensorboard]``).

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"TensorBoard events need tensorboardX ({error}): "
                "pip install 'zstrat[tensorboard]'"
            ) from error
        self._events = SummaryWriter(os.fspath(folder))

    def write(
        self, step: int, values: Mapping[str, float], about: Mapping[str, Any]
    ) -> None:
        del about
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        self._events.close()
