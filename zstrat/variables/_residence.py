"""Where the variables of one strategy live between steps, on this process's devices."""

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

    ``names`` are TF's names of the devices that keep the copies of the replicas, in
    their order, or of the one that keeps all of them. ``mesh`` are the devices of all
    processes, if values are arrays over them. ``steps`` is how many steps have put back
    new values. ``copies`` is how many replicas of this
    process may have a copy each, ``parted`` how many variables have begun to have them.
    ``travels``: values are kept elsewhere than steps run. ``has_failed``: a step did,
    so that values may be gone.

    Who makes next values of the present ones has the ``turn``, from the first look to
    the last value put back; a step over several parts of the CPU, until they have
    computed. Who reads takes the ``lock``, which a step holds only while the values are
    given away: what computes a step may read a variable, in another thread. The turn is
    taken before the lock, and nobody waits for a value while holding the lock.
    """

    travels: bool = False

    def __init__(
        self, names: Sequence[str], mesh: Mesh | None = None, copies: int = 1
    ) -> None:
        self.names = tuple(names)
        self.mesh = mesh
        self.copies = copies
        self.parted = 0
        self.steps = 0
        self.has_failed = False
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
