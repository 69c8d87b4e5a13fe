"""The clusters of variables, held between two steps, and requests to their servers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from zstrat.coordinator import until_settled
from zstrat.strategy import ServerVariables
from zstrat.variables import StorageWithSlots

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Coroutine,
        Iterable,
    )

    from zstrat.coordinator import ClusterSession, SessionCut
    from zstrat.variables import VariableHandle

T = TypeVar("T")

Run: TypeAlias = "Callable[[Coroutine[Any, Any, Any], str], Awaitable[Any]]"
"""Runs a coroutine of a `PsClient` on the loop of its cluster, from any loop, as
`ClusterSession.run_async` does. Cancellation: cancels the coroutine."""


class ClusterMoment(NamedTuple):
    """The moment when values of a cluster were saved or loaded: between which steps,
    and after how many restores of its servers."""

    cluster: ClusterSession
    cut: SessionCut | None
    restores: int


def cluster_of(variable: VariableHandle) -> ClusterSession | None:
    """Returns the cluster that a variable lives on, None if it lives in this process.

    Raises:
        RuntimeError: It lives elsewhere: the handle came from another task.
    """
    storage = variable.storage
    if isinstance(storage, StorageWithSlots):
        return None
    if isinstance(storage, ServerVariables):
        return storage.session
    raise RuntimeError(
        f"{variable.spec} at {variable.device} cannot be saved or restored from here: "
        "this handle came from another task; checkpoints are written by the coordinator"
    )


def clusters_of(variables: Iterable[VariableHandle]) -> list[ClusterSession]:
    """Returns the clusters that store any of the variables, each once.

    Raises: As `cluster_of`.
    """
    found = {id(at): at for each in variables if (at := cluster_of(each)) is not None}
    return list(found.values())


@contextlib.asynccontextmanager
async def at_rest(
    clusters: Iterable[ClusterSession],
) -> AsyncIterator[list[ClusterMoment]]:
    """Holds all of the clusters between two steps; when that is, of each."""
    async with contextlib.AsyncExitStack() as resting:
        moments = []
        for cluster in clusters:
            restores = cluster.restores
            cut = await resting.enter_async_context(cluster.at_rest())
            moments.append(ClusterMoment(cluster, cut, restores))
        yield moments


async def steadily(
    variables: Iterable[VariableHandle], work: Callable[[], Awaitable[T]]
) -> T:
    """Carries out what may be done twice; again if it failed because a parameter server
    was lost that was filled again, or came back, meanwhile, or had its place taken.

    Raises:
        PSUnavailableError: One did not come back, or could not be filled.
    """
    return await until_settled(clusters_of(variables), work)
