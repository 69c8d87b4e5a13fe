"""`WholeProgram`: a step as one program over the devices of all processes.

XLA reaches the other processes itself, so the program is not divided. Each process runs
the body on its own data: the body is mapped over the axis of processes of the common
mesh, and inside of it the replicas of one process over the other axis. Variables are
arrays over the whole mesh, equal on all devices; arguments are arrays with one part per
process.

Law of the file: all processes run the same step with arguments of the same shapes; a
Python number among them is the same in all processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zstrat.program._compile import own, settled
from zstrat.program._device_state import Outdated
from zstrat.program.trace import _refusals

from ._cross import PROCESS, within_mesh

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Mesh

    from zstrat.program.trace._discover import Staged
    from zstrat.program.trace._iterator import Draws
    from zstrat.program.trace._plan import Plan

# jax's stubs leave these untyped.
_spec: Final[Any] = PartitionSpec
_of_processes: Final[Any] = jax.make_array_from_process_local_data
_NUMBERS: Final = (int, float, complex)


class WholeProgram:
    """The program of one signature (types of arguments and elements) over all
    processes, compiled when it first runs."""

    def __init__(self, plan: Plan, staged: Staged, mesh: Mesh) -> None:
        self.plan = plan
        self._held = staged.held
        self._fingerprint = staged.fingerprint
        made: Any = NamedSharding  # untyped
        self._apart = made(mesh, _spec(PROCESS))
        self._everywhere = made(mesh, _spec())
        here = [n for n, yes in enumerate(self._held.are_here()) if yes]
        # In the order of the outputs, because jax pairs donated inputs by shape.
        self._moved = self._held.moved_reads()
        self._read = [n for n in here if n not in self._moved]
        self._away = [n for n in range(len(plan.reads)) if n not in here]
        self._jitted = self._compiled(staged, mesh)
        self._traced = False

    @property
    def is_current(self) -> bool:
        """Whether variables and processes are as when the program was traced."""
        return self._held.fingerprint == self._fingerprint

    def run(
        self, inputs: Sequence[Any], leaves: Sequence[Any], draws: Draws
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        """Runs the step on inputs and leaves of the elements of ``draws``.

        The elements are used up when new values are stored. Returns the arrays of the
        result, which may not be ready, and the operands of the plan's updates.

        Raises:
            DataLossError: An earlier step failed, and a value is lost.
            Outdated: The variables are no longer stored as when the program was traced.
        """
        held = self._held
        # Before the turn: the code that computes them may wait for the turn.
        given = [self._given(x) for x in (*inputs, *leaves)]
        results, operands = held.in_turn(lambda: self._run(given, draws))
        plan = self.plan
        own_operands = [
            [_mine(x, like) for x, like in zip(arrays, update.operands, strict=True)]
            for arrays, update in zip(operands, plan.updates, strict=True)
        ]
        own_results = [
            _mine(x, like) for x, like in zip(results, plan.out_specs, strict=True)
        ]
        return own_results, own_operands

    def _run(self, given: list[Any], draws: Draws) -> tuple[Any, Any]:
        held = self._held
        if not self.is_current:
            raise Outdated
        held.require_kept()
        values, *slots = held.values_and_slots()
        moved = [values[n] for n in self._moved]
        read = [values[n] for n in self._read]
        away = [values[n] for n in self._away]
        del values
        given += [self._given(x) for x in away]
        return held.alone(lambda: self._computed(moved, slots, read, given, draws))

    def _computed(
        self,
        moved: list[Any],
        slots: list[list[Any]],
        read: list[Any],
        given: list[Any],
        draws: Draws,
    ) -> tuple[Any, Any]:
        if self._traced:
            outputs = self._jitted(moved, slots, read, given)
        else:
            with _refusals.translated_errors(self.plan.function):
                outputs = self._jitted(moved, slots, read, given)
            self._traced = True
        results, values, beside, operands = outputs
        settled(outputs, results or values)
        self._held.put([*values, *jax.tree.leaves(beside)], draws)
        return results, operands

    def _joined(self, moved: Any, read: Any, away: Any) -> list[Any]:
        """Merges the values of updated variables, of other variables on devices, and of
        variables elsewhere into one list, in the order of the plan's reads."""
        numbers = *self._moved, *self._read, *self._away
        known = dict(zip(numbers, (*moved, *read, *away), strict=True))
        return [known[n] for n in range(len(numbers))]

    def _given(self, value: Any) -> Any:
        # A Python number stays weak, and is the same in all processes.
        if isinstance(value, _NUMBERS):
            return value
        array = np.asarray(value)
        # jax casts it as it does every array of numpy.
        seen: Any = jax.dtypes.canonicalize_dtype(array.dtype)
        # One row of an array over all processes.
        part = array.astype(seen, copy=False)[None]
        return _of_processes(self._apart, part)

    def _compiled(self, staged: Staged, mesh: Mesh) -> Any:
        # Not `staged` itself: no argument of the first call is kept alive.
        body, inputs, leaves = staged.body, len(staged.inputs), len(staged.leaves)
        away = len(self._away)
        numbers = [isinstance(x, _NUMBERS) for x in staged.inputs]
        numbers += [False] * (leaves + away)

        def mapped(moved: Any, slots: Any, read: Any, given: Any) -> Any:
            own_inputs = [
                x if plain else x[0] for x, plain in zip(given, numbers, strict=True)
            ]
            values = self._joined(moved, read, own_inputs[inputs + leaves :])
            results, *made = body(
                own_inputs[:inputs], own_inputs[inputs : inputs + leaves], values, slots
            )
            values, slots, operands = made
            known = {id(x) for x in jax.tree.leaves((moved, slots, read, own_inputs))}
            return (
                [_apart(own(x, known)) for x in results],
                [own(x, known) for x in values],
                jax.tree.map(lambda x: own(x, known), slots),
                [[_apart(own(x, known)) for x in arrays] for arrays in operands],
            )

        def program(moved: Any, slots: Any, read: Any, given: Any) -> Any:
            before = within_mesh.set(True)
            try:
                return jax.shard_map(
                    mapped,
                    mesh=mesh,
                    axis_names={PROCESS},
                    in_specs=(
                        _spec(),
                        _spec(),
                        _spec(),
                        [_spec() if plain else _spec(PROCESS) for plain in numbers],
                    ),
                    out_specs=(_spec(PROCESS), _spec(), _spec(), _spec(PROCESS)),
                    # Values and slots are equal in all processes, which jax cannot
                    # always prove.
                    check_vma=False,
                )(moved, slots, read, given)
            finally:
                within_mesh.reset(before)

        program.__name__ = program.__qualname__ = self.plan.function.rpartition(".")[2]
        shardings = self._apart, self._everywhere, self._everywhere, self._apart
        return jax.jit(program, donate_argnums=(0, 1), out_shardings=shardings)


def _apart(array: Any) -> Any:
    """Adds a first axis to an output, along which the outputs of all processes are
    concatenated."""
    return array if jnp.ndim(array) else array[None]


def _mine(array: jax.Array, like: Any) -> jax.Array:
    """Returns this process's part of an output over all processes."""
    part: jax.Array = array.addressable_shards[0].data
    return part if like.shape else part[0]
