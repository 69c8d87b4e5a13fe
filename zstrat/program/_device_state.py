"""`PlannedVariables`: variables of a step on the devices of this process.

A step takes the values from the devices, and stores the new ones there. Law: a step
holds the lock of the devices' memory (`DevicePool`) from its first read of a variable
until the new value is stored; and while it does, the variables are stored as they were
when the step was traced (otherwise it raises `Outdated`).
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
    """The variables are no longer stored as when the program was traced: another thread
    has given each replica a copy, or the set of processes has changed. Nothing was
    done; the caller looks up or traces the program again."""


class PlannedVariables:
    """The variables of one plan: those that a step reads, those that it updates, and
    their slots."""

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
        """Whether values are kept on another device than the one that steps run on, so
        that a failed step does not lose them."""
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
        """Returns each updated storage, with the indices of its value and slots in the
        outputs of the program.

        Empty if the updated variables cannot share one list of arrays (a *joint
        state*): because values are kept on another device, or variables belong to
        several pools (`DevicePool`) or to other tasks.
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
        """Makes the same object for other variables; returns None if optimizers update
        some of these variables."""
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
        """Returns for each variable whether each replica has a separate copy of it.

        Computes the answer again only if a variable of the strategy has switched to
        copies.
        """
        parted = [pool.parted for pool in self._pools]
        if self._parts[0] != parted:
            self._parts = parted, tuple([storage.is_apart for storage in self._here])
        return self._parts[1]

    @property
    def mesh(self) -> Mesh | None:
        """The mesh over the devices of all processes, if the values are arrays over
        them; else None.

        Raises:
            ValueError: The values are arrays over several meshes.
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

        An exception raised by ``act`` counts as a failed step.
        """
        # Not a context manager: a Ctrl-C in its Python would leave a lock held. Nothing
        # is raised between the body of a `with` and the release of a lock of C's.
        pools = self._pools
        if len(pools) == 1:
            with pools[0].turn:
                return self._settled(act)
        return _holding([pool.turn for pool in pools], lambda: self._settled(act))

    def alone(self, act: Callable[[], T]) -> T:
        """Calls ``act`` while no other code reads the variables. Call this inside of
        `in_turn`."""
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
        """Refuses a step if a failed step has lost one of its values.

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
        """Reads the plan's variables: values on devices as device arrays, others as
        numpy arrays."""
        if not self._away:
            return [storage.value() for storage in self._read_storages]
        read = iter(read_all(self._away))
        return [
            storage.value() if isinstance(storage, DeviceStorage) else next(read)
            for storage in self._storages
        ]

    def are_here(self) -> list[bool]:
        """Returns for each of the plan's reads whether the variable is on devices of
        this process."""
        return [isinstance(storage, DeviceStorage) for storage in self._storages]

    @property
    def sharding(self) -> Sharding | None:
        """The sharding of values that every device of a step has; None for one
        device."""
        shardings = [pool.sharding for pool in self._pools]
        return next((found for found in shardings if found is not None), None)

    def put_shardings(self) -> tuple[list[Any], list[Any]]:
        """Returns the shardings for `put`: those of the next values, and those of each
        optimizer's slots."""
        slots = [storage.pool.sharding for storage, _, _ in self._slot_storages]
        return [storage.sharding for storage in self._moved_storages], slots

    def slots(self) -> list[Any]:
        """Returns for each optimizer and each variable that it updates the slots."""
        return [
            storage.slots_before(rule, name)
            for storage, rule, name in self._slot_storages
        ]

    def state(self) -> list[Any]:
        """Returns the `values`, followed by all leaves of `slots`, in a new list."""
        joint = None if self._joint is None else self._joint.taken()
        if joint is None:
            return [*self.values(), *itertools.chain.from_iterable(self.slots())]
        values = [
            storage.value() if at is None else joint[at] for at, storage in self._reads
        ]
        return values + joint[self._counts[0] :]

    def values_and_slots(self) -> list[list[Any]]:
        """Returns the list of `values`, followed by a list of slots for each optimizer
        and variable."""
        return cut_at(self.state(), [len(self._storages), *self._counts[1:]])

    def moved_reads(self) -> list[int]:
        """Returns the indices, among the plan's reads, of the updated variables, in the
        order of `put`."""
        numbers = {spec.key: n for n, spec in enumerate(self._plan.reads)}
        keys = [variable.spec.key for variable in self._moved]
        return [numbers[key] for key in keys if key in numbers]

    def put(self, arrays: list[Any], draws: Draws) -> None:
        """Stores the next values and all leaves of the next slots, in the order of the
        plan, and marks the elements of ``draws`` as used up.

        The list ``arrays`` belongs to this object afterwards. The caller holds the
        lock, unless values are kept on another device.
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
        """Stores the next values and slots. Idempotent, because it is called again
        after a Ctrl-C during the first call."""
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
    """Splits a list into lists of these lengths."""
    left = iter(leaves)
    return [list(itertools.islice(left, count)) for count in counts]
