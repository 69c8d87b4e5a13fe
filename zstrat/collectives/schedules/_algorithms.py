"""The table of all algorithms, by the call that they carry out and by name."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from ._doubling import (
    dissemination_barrier,
    doubling_all_gather,
    doubling_all_reduce,
    halving_doubling_all_reduce,
)
from ._exchanges import (
    direct_all_gather,
    direct_all_reduce,
    direct_reduce_scatter,
    pairwise_all_to_all,
)
from ._ring import (
    chain_broadcast,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    scatter_broadcast,
)
from ._schedule import Schedule
from ._trees import double_tree_all_reduce, tree_all_reduce, tree_broadcast

if TYPE_CHECKING:
    from collections.abc import Mapping

Make = Callable[[int, int], Schedule]
"""Makes the schedule of a rank from the rank and the number of ranks."""


class Alike(enum.Enum):
    """Whether all ranks do the same at the same time, so that a measurement or
    simulation of one rank holds for all."""

    NEVER = "never"
    BY_TWOS = "by twos"
    """The ranks are alike only if their number is a power of two."""
    ALWAYS = "always"

    def holds(self, ranks: int) -> bool:
        """Returns whether the ranks are alike in a group of ``ranks`` ranks."""
        by_twos = self is Alike.BY_TWOS and ranks & (ranks - 1) == 0
        return self is Alike.ALWAYS or by_twos


class Algorithm(NamedTuple):
    """One algorithm for a kind of call.

    ``has_root``: the maker of its schedules takes a root after rank and size.
    ``is_compressible``: one rank alone finishes each block, so that all ranks get the
    same result from values that were rounded for the wire.
    """

    make: Callable[..., Schedule]
    alike: Alike = Alike.NEVER
    has_root: bool = False
    is_compressible: bool = True

    def rooted(self, root: int) -> Make:
        """Returns the maker of schedules, with this root if the algorithm has one."""
        if not self.has_root:
            return self.make
        return lambda rank, size: self.make(rank, size, root)


ALGORITHMS: Final[Mapping[str, Mapping[str, Algorithm]]] = MappingProxyType(
    {
        "all_reduce": {
            "ring": Algorithm(ring_all_reduce, Alike.ALWAYS),
            "halving_doubling": Algorithm(halving_doubling_all_reduce, Alike.BY_TWOS),
            "doubling": Algorithm(
                doubling_all_reduce, Alike.BY_TWOS, is_compressible=False
            ),
            "tree": Algorithm(tree_all_reduce),
            "double_tree": Algorithm(double_tree_all_reduce),
            "direct": Algorithm(direct_all_reduce, Alike.ALWAYS),
        },
        "reduce_scatter": {
            "ring": Algorithm(ring_reduce_scatter, Alike.ALWAYS),
            "direct": Algorithm(direct_reduce_scatter, Alike.ALWAYS),
        },
        "all_gather": {
            "ring": Algorithm(ring_all_gather, Alike.ALWAYS),
            "doubling": Algorithm(doubling_all_gather, Alike.ALWAYS),
            "direct": Algorithm(direct_all_gather, Alike.ALWAYS),
        },
        "broadcast": {
            "tree": Algorithm(tree_broadcast, has_root=True),
            "scatter": Algorithm(scatter_broadcast, has_root=True),
            "chain": Algorithm(chain_broadcast, has_root=True),
        },
        "all_to_all": {"pairwise": Algorithm(pairwise_all_to_all, Alike.ALWAYS)},
        "barrier": {"dissemination": Algorithm(dissemination_barrier, Alike.ALWAYS)},
    }
)


def algorithm_named(call: str, name: str) -> Algorithm:
    """Returns the algorithm that carries out ``call`` ("all_reduce", ...) by that name.

    Raises:
        ValueError: No algorithm has that name; the error lists those of ``call``.
    """
    named = ALGORITHMS.get(call)
    if named is None:
        raise ValueError(f"call {call!r}: expected one of {', '.join(ALGORITHMS)}")
    algorithm = named.get(name)
    if algorithm is None:
        raise ValueError(
            f"algorithm {name!r} for {call}: expected one of {', '.join(named)}"
        )
    return algorithm
