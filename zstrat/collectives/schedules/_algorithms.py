"""Every algorithm by the call that it carries out and by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from ._doubling import (
    dissemination_barrier,
    doubling_all_gather,
    doubling_all_reduce,
    halving_doubling_all_reduce,
)
from ._exchanges import (
    chain_broadcast,
    direct_all_gather,
    direct_all_reduce,
    direct_reduce_scatter,
    pairwise_all_to_all,
    scatter_broadcast,
)
from ._ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from ._schedule import Schedule
from ._trees import double_tree_all_reduce, tree_all_reduce, tree_broadcast

if TYPE_CHECKING:
    from collections.abc import Mapping

Make = Callable[[int, int], Schedule]
"""From rank and size to what the rank does."""


class Algorithm(NamedTuple):
    """One way to carry out a call.

    ``has_root``: its schedules take a root after rank and size. ``is_compressible``: a
    block is finished by one rank, so that all others have what it has made of values
    that were rounded for the wire.
    """

    make: Callable[..., Schedule]
    has_root: bool = False
    is_compressible: bool = True

    def rooted(self, root: int) -> Make:
        """With the root, if it has one."""
        return partial(_rooted, self.make, root) if self.has_root else self.make


ALGORITHMS: Final[Mapping[str, Mapping[str, Algorithm]]] = MappingProxyType(
    {
        "all_reduce": {
            "ring": Algorithm(ring_all_reduce),
            "halving_doubling": Algorithm(halving_doubling_all_reduce),
            "doubling": Algorithm(doubling_all_reduce, is_compressible=False),
            "tree": Algorithm(tree_all_reduce),
            "double_tree": Algorithm(double_tree_all_reduce),
            "direct": Algorithm(direct_all_reduce),
        },
        "reduce_scatter": {
            "ring": Algorithm(ring_reduce_scatter),
            "direct": Algorithm(direct_reduce_scatter),
        },
        "all_gather": {
            "ring": Algorithm(ring_all_gather),
            "doubling": Algorithm(doubling_all_gather),
            "direct": Algorithm(direct_all_gather),
        },
        "broadcast": {
            "tree": Algorithm(tree_broadcast, has_root=True),
            "scatter": Algorithm(scatter_broadcast, has_root=True),
            "chain": Algorithm(chain_broadcast, has_root=True),
        },
        "all_to_all": {"pairwise": Algorithm(pairwise_all_to_all)},
        "barrier": {"dissemination": Algorithm(dissemination_barrier)},
    }
)


def algorithm_named(call: str, name: str) -> Algorithm:
    """Returns the algorithm that carries out ``call`` ("all_reduce", ...) by that name.

    Raises:
        ValueError: No algorithm has that name; lists those of ``call``.
    """
    named = ALGORITHMS.get(call)
    if named is None:
        raise ValueError(f"call {call!r}: expected one of {', '.join(ALGORITHMS)}")
    found = named.get(name)
    if found is None:
        raise ValueError(
            f"algorithm {name!r} for {call}: expected one of {', '.join(named)}"
        )
    return found


def _rooted(make: Callable[..., Schedule], root: int, rank: int, size: int) -> Schedule:
    return make(rank, size, root)
