"""Where the variables of one strategy live between steps, and who may change them.

Law of the file: whoever makes a next value has the turn, and holds the lock, too, while
the present one is given away, or while several fields change.
"""

from __future__ import annotations

import abc
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import jax
    from jax.sharding import Mesh, Sharding


class Residence(abc.ABC):
    """Where the variables of one strategy live.

    Args:
        names: TF's names of the devices that keep the copies of the replicas, in their
            order, or of the one that keeps all of them.
        mesh: The devices of all processes, if values are arrays over them.
        copies: How many replicas of this process may have a copy each.

    Whoever makes next values of the present ones has the ``turn``, from the first look
    to the last value put back; a step over several parts of the CPU has it until they
    have computed. Whoever reads takes the ``lock``, which a step holds only while the
    values are given away: what computes a step may read a variable, in another thread.
    The turn is taken before the lock, and nobody waits for a value while holding the
    lock.
    """

    travels: bool = False
    """Whether values are kept on another device than that where steps run."""

    def __init__(
        self, names: Sequence[str], mesh: Mesh | None = None, copies: int = 1
    ) -> None:
        self.names = tuple(names)
        self.mesh = mesh
        self.copies = copies
        self.parted = 0
        """How many variables have begun to have a copy for each replica."""
        self.steps = 0
        """How many steps have put back new values."""
        self.has_failed = False
        """Whether a step failed, so that values may be gone."""
        self.turn = threading.RLock()
        self.lock = threading.RLock()

    @abc.abstractmethod
    def place(self, array: Any) -> jax.Array:
        """Puts a copy of an array where the values live."""

    @abc.abstractmethod
    def place_apart(self, copies: Any) -> jax.Array:
        """Puts a copy of an array ``[copies, ...]`` where the values live, a row on
        each device."""

    @property
    @abc.abstractmethod
    def sharding(self) -> Sharding | None:
        """That of values, None if they live on one device."""

    @property
    @abc.abstractmethod
    def sharding_apart(self) -> Sharding | None:
        """That of copies, None if they live on one device."""

    @abc.abstractmethod
    def mark(self) -> Hashable:
        """What a program of a step depends on, but for which variables have copies; it
        is not used under another one."""

    def replicas(self) -> tuple[int, int]:
        """Number of the first replica of this process, and how many all processes
        have."""
        return 0, self.copies

    @abc.abstractmethod
    def settle(self) -> None:
        """Called before values are used, without the lock: they may have to come from
        other processes first."""

    def sent(self, trees: Any, shardings: Any) -> Any:
        """Pytrees of arrays that are kept here, where a step runs; ``shardings`` is a
        prefix of them."""
        del shardings
        return trees

    def returned(self, trees: Any) -> Any:
        """The inverse, of what the step made."""
        return trees
