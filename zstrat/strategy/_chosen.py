"""A group that carries a strategy's collectives out as its options say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

from ._options import CommunicationImplementation

if TYPE_CHECKING:
    from zstrat.collectives import Group

    from ._options import CommunicationOptions

_ALGORITHMS: Final = {
    CommunicationImplementation.RING: "ring",
    CommunicationImplementation.TREE: "double_tree",
}
"""Of an all-reduce, between hosts. What is not here is chosen by size."""


@final
class ChosenGroup:
    """The collective of a strategy (`zstrat.program._cross.Collective`)."""

    def __init__(self, group: Group, options: CommunicationOptions) -> None:
        self._group = group
        self._options = options
        self._algorithm = _ALGORITHMS.get(options.implementation)
        self._timeout = options.timeout_seconds
        self._packs = options.bytes_per_pack or None

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def generation(self) -> int:
        return self._group.generation

    def all_reduce(self, tree: Any, op: str = "sum") -> Any:
        return self._group.all_reduce(
            tree,
            op,
            algorithm=self._algorithm,
            timeout=self._timeout,
            bytes_per_pack=self._packs,
        )

    def all_gather(self, tree: Any, axis: int = 0) -> Any:
        return self._group.all_gather(tree, axis, timeout=self._timeout)

    def broadcast(self, tree: Any, root: int = 0) -> Any:
        return self._group.broadcast(tree, root, timeout=self._timeout)

    def under(self, options: CommunicationOptions) -> ChosenGroup:
        return ChosenGroup(self._group, self._options.merge(options))

    def reform(self, *, timeout: float | None = None) -> None:
        self._group.reform(timeout=timeout)

    def close(self) -> None:
        self._group.close()
