"""The devices on which a strategy keeps its variables, and arrays that steps share.

The storages of a strategy's variables share its `DevicePool`. Law of pools: code that
computes the next value of a variable holds the pool's ``turn``; it also holds the
``lock`` while XLA owns the present value, and while it changes several fields. Law of
`JointState`: a storage that takes its arrays out removes them from the list and marks
the list as incomplete, so a list that is whole has the state of every storage.
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
        names: TF's names of the devices that keep the copies of the replicas, in the
            order of the replicas, or of the one device that keeps all copies.
        mesh: The devices of all processes, if values are arrays over them.
        copies: Number of replicas of this process; each may have its own copy of a
            variable.

    Code that computes next values from the present ones holds the ``turn``, from the
    first read to the last value put back; a step over several parts of the CPU holds
    the turn until these have computed. Readers take the ``lock``, which a step holds
    only while XLA owns the values: another thread may read a variable while the step
    computes. Take the turn before the lock, and never wait for a value while holding
    the lock.
    """

    travels: bool = False
    """Whether values are kept on another device than the one where steps run, so that
    each step moves them."""

    def __init__(
        self, names: Sequence[str], mesh: Mesh | None = None, copies: int = 1
    ) -> None:
        self.names = tuple(names)
        self.mesh = mesh
        self.copies = copies
        self.parted = 0
        """Number of variables that have switched to one copy per replica."""
        self.steps = 0
        """Number of steps that have stored new values."""
        self.has_failed = False
        """Whether a step failed, so that values may be lost."""
        # Re-entrant: a signal handler may read a variable while its thread holds them.
        self.turn = threading.RLock()
        self.lock = threading.RLock()

    @abc.abstractmethod
    def place(self, array: Any) -> jax.Array:
        """Copies an array to the devices that keep values."""

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
        """Returns a key of the devices and settings that the program of a step is
        compiled for.

        A program is used only under the fingerprint that it was traced under. Which
        variables have copies is not part of it.
        """

    def replicas(self) -> tuple[int, int]:
        """Returns the rank of this process's first replica, and the number of replicas
        in all processes together."""
        return 0, self.copies

    @abc.abstractmethod
    def settle(self) -> None:
        """Waits until values that other processes send have arrived.

        Called before values are used, without the lock.
        """

    def sent(self, trees: Any, shardings: Any) -> Any:
        """Returns pytrees of arrays of this pool on the devices where a step runs;
        moves the arrays if they are kept elsewhere.

        ``shardings`` says where to: a pytree that is a prefix of ``trees``.
        """
        del shardings
        return trees

    def returned(self, trees: Any) -> Any:
        """Moves the results of a step, pytrees of arrays, to the devices that keep
        values: the inverse of `sent`."""
        return trees


class JointState:
    """The values and slots of several variables in one list, in the order of a step's
    program.

    A step computes the next state of every variable that it updates, and the next call
    of the same program takes all of these arrays again. To return each variable its
    arrays between two calls would cost more than many steps do. So the list is kept:
    each storage knows the indices of its arrays (`JointPlace`), and takes the arrays
    out when other code needs them.

    A step that holds the locks of the pool replaces ``arrays``.
    ``is_whole``: no storage has taken its arrays out.
    """

    __slots__ = ("arrays", "is_whole")

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays
        self.is_whole = True

    def taken(self) -> list[Any] | None:
        """Returns a copy of the list of arrays; None if a storage has taken arrays
        out."""
        arrays = self.arrays[:]
        # Asked afterwards: a storage clears the flag before it takes anything out.
        return arrays if self.is_whole else None


class JointPlace(NamedTuple):
    """The indices of one storage's arrays in the list of a `JointState`: the index of
    the value, and for each optimizer the first and the end of its slots."""

    state: JointState
    value: int
    slots: tuple[tuple[SlotRule, int, int], ...]

    def leave(self) -> None:
        """Removes the arrays of this storage from the list, which is no longer
        whole."""
        state = self.state
        # Before the arrays go: see `JointState.taken`.
        state.is_whole = False
        state.arrays[self.value] = None
        for _, first, end in self.slots:
            state.arrays[first:end] = [None] * (end - first)
