"""`PlannedVariables`: variables of a step on the devices of this process.

A step takes them from the devices, and puts them back. Law: a step holds the turn
(`DevicePool`) from its first read of a variable to the new value; and during its turn
the variables are stored as it was traced for (`Outdated`).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, TypeVar

from zstrat.variables import DeviceStorage, JointPlace, JointState, read_all

from .trace._updates import device_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from threading import RLock

    from jax.sharding import Mesh, Sharding

    from zstrat.variables import (
        DevicePool,
        SlotRule,
        VariableHandle,
    )

    from .trace._iterator import Draws
    from .trace._plan import Plan


T = TypeVar("T")


class Outdated(Exception):
    """The variables are not stored as the program was traced for: another thread has
    given each replica a copy, or the processes have changed. Nothing was done; the
    caller finds the program again."""


class PlannedVariables:
    """The variables of one plan: those it reads, those it updates, and their slots."""

    def __init__(
        self,
        plan: Plan,
        moved: Sequence[VariableHandle],
        slots: Sequence[tuple[VariableHandle, SlotRule]],
    ) -> None:
        self._plan = plan
        self._moved = moved
        self._moves = bool(moved)
        self._moved_storages = [device_storage(variable) for variable in moved]
        self._slot_storages = [
            (device_storage(variable), rule, variable.name) for variable, rule in slots
        ]
        self._storages = [variable.storage for variable in plan.variables]
        self._read_storages = [
            x for x in self._storages if isinstance(x, DeviceStorage)
        ]
        self._here = [*self._read_storages, *self._moved_storages]
        pools = {id(storage.pool): storage.pool for storage in self._here}
        self._away = [
            variable
            for variable in plan.variables
            if not isinstance(variable.storage, DeviceStorage)
        ]
        # In one order in all steps: two that need the same pools cannot wait for each
        # other.
        self._pools: list[DevicePool] = [pools[key] for key in sorted(pools)]
        self.travels = any(pool.travels for pool in self._pools)
        """Whether values are kept on another device than steps run on, so that a failed
        step does not lose them."""
        self._parts: tuple[list[int], tuple[bool, ...]] = ([], ())
        self._counts = [len(moved), *[len(rule.kinds) for _, rule in slots]]
        self._places = self._joint_places()
        self._joint: JointState | None = None
        # The value of a read that is also updated is found in the joint state of the
        # step before.
        at = {id(storage): n for n, storage in enumerate(self._moved_storages)}
        self._reads = [
            (at.get(id(storage)), storage) for storage in self._read_storages
        ]

    def _joint_places(
        self,
    ) -> list[tuple[DeviceStorage, int, tuple[tuple[SlotRule, int, int], ...]]]:
        """Returns each updated storage with the indices of its arrays in the outputs.

        Empty if the updated variables are not kept as one joint state: values travel,
        or there are variables of several pools, or on other tasks.
        """
        storages = {id(storage): storage for storage in self._moved_storages}
        beside: dict[int, list[tuple[SlotRule, int, int]]] = {
            key: [] for key in storages
        }
        ends = list(itertools.accumulate(self._counts))
        for (storage, rule, _), first, end in zip(
            self._slot_storages, ends[:-1], ends[1:], strict=True
        ):
            if id(storage) in beside:
                beside[id(storage)].append((rule, first, end))
        are_all = sum(map(len, beside.values())) == len(self._slot_storages)
        is_one = len(self._pools) == 1 and len(storages) == len(self._moved_storages)
        if self._away or self.travels or not (is_one and are_all):
            return []
        return [
            (storage, n, tuple(beside[id(storage)]))
            for n, storage in enumerate(self._moved_storages)
        ]

    def with_others(
        self, plan: Plan, variables: Sequence[VariableHandle]
    ) -> PlannedVariables | None:
        """Replaces the variables; None if optimizers update some of them."""
        if self._slot_storages:
            return None
        others = {variable.spec.key: variable for variable in variables}
        keys = [key for specs, _ in plan.moves for key in [s.key for s in specs]]
        own = {variable.spec.key: variable for variable in self._moved}
        known = {**own, **others}
        moved = [known[key] for key in dict.fromkeys(keys)]
        return PlannedVariables(plan, moved, [])

    @property
    def fingerprint(self) -> Hashable:
        """Identifies how the variables are stored; programs depend on it."""
        where = tuple([pool.fingerprint() for pool in self._pools])
        return where, self._are_apart()

    def _are_apart(self) -> tuple[bool, ...]:
        """Returns for each variable whether each replica has a copy of its own.

        Looks again only if a variable of the strategy has switched to copies.
        """
        parted = [pool.parted for pool in self._pools]
        if self._parts[0] != parted:
            self._parts = parted, tuple([storage.is_apart for storage in self._here])
        return self._parts[1]

    @property
    def mesh(self) -> Mesh | None:
        """The devices of all processes, if the values are arrays over them.

        Raises:
            ValueError: They are over several meshes.
        """
        meshes = {pool.mesh for pool in self._pools} - {None}
        if len(meshes) > 1:
            raise ValueError(
                f"the step function {self._plan.function!r} uses variables of several "
                "strategies that each span all devices: create them in one scope"
            )
        return next(iter(meshes), None)

    def in_turn(self, act: Callable[[], T]) -> T:
        """Calls ``act`` while no other code computes next values of the variables.

        An exception inside counts as a failed step.
        """
        # Not a context manager: a Ctrl-C in its Python would leave a lock held. Nothing
        # is raised between the body of a `with` and the release of a lock of C's.
        pools = self._pools
        if len(pools) == 1:
            with pools[0].turn:
                return self._settled(act)
        return _holding([pool.turn for pool in pools], lambda: self._settled(act))

    def alone(self, act: Callable[[], T]) -> T:
        """Calls ``act`` while no other code reads the variables; inside of a turn."""
        pools = self._pools
        if len(pools) == 1:
            with pools[0].lock:
                return act()
        return _holding([pool.lock for pool in pools], act)

    def _settled(self, act: Callable[[], T]) -> T:
        try:
            for pool in self._pools:
                pool.settle()
            return act()
        except BaseException:  # to the caller
            # From now on steps look whether a value was lost (`require_kept`).
            for pool in self._pools:
                pool.has_failed = True
            raise

    def require_kept(self) -> None:
        """Refuses a step on values that a failed step has lost.

        Raises:
            DataLossError: A value is lost; names the variable and the remedies.
        """
        # Almost always: then nothing has to be looked at.
        if True not in [pool.has_failed for pool in self._pools]:
            return
        joint = None if self._joint is None else self._joint.taken()
        # No other code can have lost a state that is whole here.
        is_there = joint is not None and not any(x.is_deleted() for x in joint)
        there = {id(storage) for storage, _, _ in self._places} if is_there else ()
        for variable in (*self._plan.variables, *self._moved):
            storage = variable.storage
            if isinstance(storage, DeviceStorage) and id(storage) not in there:
                storage.require_kept(variable.name)

    def values(self) -> list[Any]:
        """Reads the plan's variables: those on devices as they are, others as arrays of
        numpy."""
        if not self._away:
            return [storage.value() for storage in self._read_storages]
        read = iter(read_all(self._away))
        return [
            storage.value() if isinstance(storage, DeviceStorage) else next(read)
            for storage in self._storages
        ]

    def are_here(self) -> list[bool]:
        """Returns for each of the plan's reads whether it is on devices here."""
        return [isinstance(storage, DeviceStorage) for storage in self._storages]

    @property
    def sharding(self) -> Sharding | None:
        """The sharding of values that all devices of a step have; None for one
        device."""
        shardings = [pool.sharding for pool in self._pools]
        return next((found for found in shardings if found is not None), None)

    def put_shardings(self) -> tuple[list[Any], list[Any]]:
        """Returns the shardings of the next values, and of each optimizer's slots."""
        slots = [storage.pool.sharding for storage, _, _ in self._slot_storages]
        return [storage.sharding for storage in self._moved_storages], slots

    def slots(self) -> list[Any]:
        """Returns the slots of each optimizer for each variable that it updates."""
        return [
            storage.slots_before(rule, name)
            for storage, rule, name in self._slot_storages
        ]

    def state(self) -> list[Any]:
        """Returns all `values`, then all leaves of `slots`, in a new list."""
        joint = None if self._joint is None else self._joint.taken()
        if joint is None:
            return [*self.values(), *itertools.chain.from_iterable(self.slots())]
        values = [
            storage.value() if at is None else joint[at] for at, storage in self._reads
        ]
        return values + joint[self._counts[0] :]

    def values_and_slots(self) -> list[list[Any]]:
        """Returns `values`, and the slots of each optimizer."""
        return cut_at(self.state(), [len(self._storages), *self._counts[1:]])

    def moved_reads(self) -> list[int]:
        """Returns the numbers of reads of updated variables, in the order of `put`."""
        numbers = {spec.key: n for n, spec in enumerate(self._plan.reads)}
        keys = [variable.spec.key for variable in self._moved]
        return [numbers[key] for key in keys if key in numbers]

    def put(self, arrays: list[Any], draws: Draws) -> None:
        """Stores the next values, and all leaves of the next slots, in the order of the
        plan; marks the elements as spent.

        The list then belongs to this object. The caller holds the lock, unless the
        values travel.
        """
        # Before the first attempt, so that a second one stores the same numbers.
        steps = [pool.steps + self._moves for pool in self._pools]
        try:
            self._put(arrays, steps)
            draws.is_spent = True
        except BaseException:  # to the caller; a Ctrl-C between two assignments
            self._put(arrays, steps)
            draws.is_spent = True
            raise

    def _put(self, arrays: list[Any], steps: Sequence[int]) -> None:
        """Stores the state; idempotent, for a second call after a Ctrl-C in the
        first."""
        if self._places:
            self._keep(arrays)
        else:
            values, *slots = cut_at(arrays, self._counts)
            for storage, value in zip(self._moved_storages, values, strict=True):
                storage.take_over(value)
            for (storage, rule, _), leaves in zip(
                self._slot_storages, slots, strict=True
            ):
                storage.take_over_slots(rule, leaves)
        for pool, number in zip(self._pools, steps, strict=True):
            pool.steps = number

    def _keep(self, arrays: list[Any]) -> None:
        joint = self._joint
        # One assignment for the whole step: a Ctrl-C comes before or after it.
        if joint is not None and joint.is_whole:
            joint.arrays = arrays
            return
        joint = JointState([*arrays])  # a new list: storages may drop it at once
        for storage, value, slots in self._places:
            storage.join(JointPlace(joint, value, slots))
        self._joint = joint


# A `with` for each lock, without a context manager of ours; see `in_turn`.
def _holding(locks: Sequence[RLock], act: Callable[[], T]) -> T:
    if not locks:
        return act()
    with locks[0]:
        return _holding(locks[1:], act)


def cut_at(leaves: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Cuts a list of leaves into lists of these lengths."""
    left = iter(leaves)
    return [list(itertools.islice(left, count)) for count in counts]
