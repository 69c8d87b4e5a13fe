"""Fragments of a tree, and the segments of a window between two exchanges.

After Douillard et al., "Streaming DiLoCo" (2025): each fragment is exchanged once in
``every`` steps, and at another offset than the others, so that the link carries a part
of the model at a time. Round r of the outer optimizer is the exchange of fragment
``r % fragments``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.variables import Optimizer, Variable

COPY: Final = "/copy"
"""What resident arrays are that are copies of variables."""

ROUND: Final = "/round"
"""The number of the round whose values a window has read."""

SPEED: Final = "/speed"
"""The steps per second that this worker makes."""

STEPS: Final = "/steps"
"""The number of steps that the next window is to make."""

SEGMENT: Final = "zstrat_segment"
"""The keyword with which a worker gives a window its `Segment`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a window that one closure runs: the steps before the exchange of
    fragment ``number``.

    ``restart``: it takes the values of all fragments first, as the worker has no copy
    yet, or has missed a round. ``every``: it makes only as many steps as if the window
    had so many; 0 for all.
    """

    number: int = 0
    restart: bool = True
    every: int = 0


@dataclass(frozen=True, eq=False)
class Exchanges:
    """When the windows of a `LocalOptimizer` exchange what; see its arguments.

    ``outer`` is the optimizer on the servers, ``inner`` that of the steps. ``pace``
    holds the speed of the fastest worker; None: all workers make the same steps.
    """

    name: str
    outer: Optimizer
    inner: Optimizer
    every: int
    fragments: int
    overlap: int
    mix: float
    pace: Variable | None = None

    def steps_in(self, segment: Segment) -> int:
        """Returns how many steps a segment makes."""
        count = steps_of(segment.number, self.every, self.fragments)
        if segment.every:
            # At least one after the copy has taken the result of the round before:
            # those before it are in no contribution.
            fewer = count * segment.every // self.every
            count = min(count, max(fewer, self.overlap + 1))
        return count

    def require_equal_draws(self, name: str) -> None:
        """Checks that windows draw the same number of elements, as leases need it.

        Raises:
            ValueError: They differ; says what to write. ``name``: of the window.
        """
        if self.pace is None and self.every % self.fragments == 0:
            return
        cause = f"every={self.every}, fragments={self.fragments}"
        remedy = "make every a multiple of fragments"
        if self.pace is not None:
            cause, remedy = "adapt=True", "leave out adapt=True"
        raise ValueError(
            f"{name} draws from a leased dataset, which leases the same number of "
            f"batches to each closure, but zs.LocalOptimizer({cause}) makes windows of "
            f"different numbers of steps: {remedy}, or use "
            "coordinator.create_per_worker_dataset"
        )

    @property
    def take_segments(self) -> bool:
        """Whether a worker has to say which segment a window is."""
        return self.keep_copies or self.pace is not None

    @property
    def keep_copies(self) -> bool:
        """Whether a worker's copy outlives its window."""
        return self.fragments > 1 or self.overlap > 0 or self.mix > 0


def steps_of(segment: int, every: int, fragments: int) -> int:
    """Returns the number of steps of a segment; those of all segments are ``every``."""
    return (segment + 1) * every // fragments - segment * every // fragments


def fragments_of(sizes: Sequence[int], count: int) -> list[int]:
    """Distributes leaves of these sizes over fragments of about equal size: the largest
    one first, each to the smallest fragment. Returns the fragment of each leaf."""
    filled = [0] * count
    found = [0] * len(sizes)
    for leaf in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        found[leaf] = min(range(count), key=lambda n: (filled[n], n))
        # A leaf without elements counts, too, so that no fragment stays empty.
        filled[found[leaf]] += max(1, sizes[leaf])
    return found
