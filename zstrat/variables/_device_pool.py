"""The devices on which a strategy keeps its variables, and what steps leave there.

Storages on devices share the `DevicePool` of their strategy. Law of pools: code that
computes a next value holds the turn; it also holds the lock while XLA owns the present
value, and while it changes several fields. Law of `JointState`: a storage that takes
its arrays out removes them from the list, so a list that is whole has the state of
every storage.
"""

from __future__ import annotations

import abc
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import jax
    from jax.sharding import Mesh, Sharding

    from .gradients._slots import SlotRule


class DevicePool(abc.ABC):
    """The devices of this process on which one strategy keeps its variables.

    Args:
        names: TF's names of the devices that keep the copies of the replicas, in their
            order, or of the one device that keeps all of them.
        mesh: The devices of all processes, if values are arrays over them.
        copies: Number of replicas of this process that may have a copy each.

    Code that computes next values from the present ones holds the ``turn``, from the
    first read to the last value put back; a step over several parts of the CPU holds it
    until they have computed. Readers take the ``lock``, which a step holds only while
    XLA owns the values: another thread may read a variable while the step computes.
    Take the turn before the lock, and never wait for a value while holding the lock.
    """

    travels: bool = False
    """Whether values are kept on another device than the one where steps run."""

    def __init__(
        self, names: Sequence[str], mesh: Mesh | None = None, copies: int = 1
    ) -> None:
        self.names = tuple(names)
        self.mesh = mesh
        self.copies = copies
        self.parted = 0
        """Number of variables that have switched to one copy per replica."""
        self.steps = 0
        """Number of steps that have put back new values."""
        self.has_failed = False
        """Whether a step failed, so that values may be lost."""
        # Re-entrant: a signal handler may read a variable while its thread holds them.
        self.turn = threading.RLock()
        self.lock = threading.RLock()

    @abc.abstractmethod
    def place(self, array: Any) -> jax.Array:
        """Copies an array to where the values are kept."""

    @abc.abstractmethod
    def place_apart(self, copies: Any) -> jax.Array:
        """Copies an array ``[copies, ...]`` to the devices, one row on each."""

    @property
    @abc.abstractmethod
    def sharding(self) -> Sharding | None:
        """The sharding of values; None if they are on one device."""

    @property
    @abc.abstractmethod
    def sharding_apart(self) -> Sharding | None:
        """The sharding of per-replica copies; None if they are on one device."""

    @abc.abstractmethod
    def fingerprint(self) -> Hashable:
        """Identifies what the program of a step was compiled for.

        A program is used only under the fingerprint that it was traced under. Which
        variables have copies is not part of it.
        """

    def replicas(self) -> tuple[int, int]:
        """Returns the rank of this process's first replica, and the number of replicas
        in all processes."""
        return 0, self.copies

    @abc.abstractmethod
    def settle(self) -> None:
        """Waits until values that come from other processes are here.

        Called before values are used, without the lock.
        """

    def sent(self, trees: Any, shardings: Any) -> Any:
        """Moves pytrees of arrays of this pool to the devices where a step runs.

        ``shardings`` is a prefix of the trees.
        """
        del shardings
        return trees

    def returned(self, trees: Any) -> Any:
        """Brings pytrees that a step made to where values are kept: undoes `sent`."""
        return trees


class JointState:
    """Values and slots of several variables, in the order of a step's program.

    A step computes the next state of every variable that it updates, and the next call
    of the same program takes all of it again. To hand each variable its arrays between
    two calls would cost more than many steps do. So the list is kept as it is: each
    storage knows its index, and takes its arrays out when code asks the storage.

    A step that holds the turn and the lock of the pool replaces ``arrays``.
    ``is_whole``: no storage has taken its arrays out.
    """

    __slots__ = ("arrays", "is_whole")

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.is_whole = True

    def taken(self) -> list[Any] | None:
        """Returns a copy of the list; None if a storage has taken arrays out."""
        arrays = self.arrays[:]
        # Asked afterwards: a storage clears the flag before it takes anything out.
        return arrays if self.is_whole else None


class JointPlace(NamedTuple):
    """The indices of one storage's arrays in the list: of the value, and the first and
    the end of each optimizer's slots."""

    state: JointState
    value: int
    slots: tuple[tuple[SlotRule, int, int], ...]

    def leave(self) -> None:
        """Drops the arrays of a storage that has taken them out."""
        state = self.state
        # Before the arrays go: see `JointState.taken`.
        state.is_whole = False
        state.arrays[self.value] = None
        for _, first, end in self.slots:
            state.arrays[first:end] = [None] * (end - first)
