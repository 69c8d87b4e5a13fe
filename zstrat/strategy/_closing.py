"""Strategies that hold a connection: ``with`` closes it at its end."""

from __future__ import annotations

import abc
from typing import Self


class Closing(abc.ABC):
    """What has an end."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends it; a second time it does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
