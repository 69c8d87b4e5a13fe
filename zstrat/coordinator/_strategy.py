"""What a coordinator needs of a strategy."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from zstrat.program import Plan

    from ._session import ClusterSession


class CoordinatedStrategy(abc.ABC):
    """A strategy whose steps a `ClusterCoordinator` schedules on workers.

    It is shipped with each of them: pickled, it arrives as what stands for it there.
    """

    @property
    @abc.abstractmethod
    def session(self) -> ClusterSession:
        """The cluster, connected."""

    @abc.abstractmethod
    def scope(self) -> AbstractContextManager[object]:
        """Entered around each trace of a scheduled function, here and on workers."""

    @abc.abstractmethod
    def require_known(self, plan: Plan) -> None:
        """Refuses a step that the parameter servers of this session cannot serve.

        Raises:
            NotFoundError: It uses variables or optimizers of another session.
        """
