"""`StagedProgram`: a step in compiled stages: program, collectives, program, ...

Theory of operation. Values and slots of variables on devices are inputs as they are.
The last stage computes the next ones in the same memory (the inputs are donated, unless
they are kept on another device). So nothing has changed until all collectives are done,
and a step that fails in a collective can run again. Values for later stages stay on the
device; the host reads only the operands of collectives, and drops them afterwards.

Law of the file: only the last stage donates inputs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax

from zstrat.program._compile import is_waited_for, own, settled
from zstrat.program._device_state import Outdated, cut_at
from zstrat.program.trace import _refusals

from ._cross import CrossKind
from ._stages import stages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Sharding

    from zstrat.program.trace._discover import Staged
    from zstrat.program.trace._iterator import Draws
    from zstrat.program.trace._plan import Plan
    from zstrat.variables import VariableHandle

    from ._cross import Channel
    from ._stages import Crossing, Stage


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled stage. The numbers of its inputs are in ``donated`` if it reuses their
    memory, and in ``kept`` if not; ``dead`` are values that no later stage needs."""

    stage: Stage
    run: Any
    donated: tuple[int, ...]
    kept: tuple[int, ...]
    dead: tuple[int, ...]
    calls: tuple[tuple[Channel, CrossKind, tuple[Crossing, ...]], ...]


def compiled(
    cut: Sequence[Stage],
    name: str,
    moved: Sequence[int],
    inputs: int,
    out_shardings: list[Any] | None,
) -> list[Compiled]:
    compiled_stages = []
    for number, stage in enumerate(cut):
        is_last = number == len(cut) - 1
        donated = [n for n in moved if is_last and n in stage.takes]
        kept = [n for n in stage.takes if n not in set(donated)]
        # All that no later stage takes or sends is dropped as soon as the stage has
        # run.
        later = {n for other in cut[number + 1 :] for n in other.takes}
        later |= {n for x in cut[number + 1 :] for c in x.crossings for n in c.operands}
        here = {n for x in stage.crossings for n in (*x.operands, *x.results)}
        dead = ({*stage.takes, *stage.gives, *here} - later) if not is_last else set()
        compiled_stages.append(
            Compiled(
                stage,
                _jitted(
                    stage,
                    f"{name}_{number}" if number else name,
                    donated,
                    kept,
                    out_shardings if is_last else None,
                ),
                tuple(donated),
                tuple(kept),
                tuple(sorted(n for n in dead if n >= inputs)),
                _calls(stage.crossings),
            )
        )
    return compiled_stages


def _jitted(
    stage: Stage,
    name: str,
    donated: list[int],
    kept: list[int],
    out_shardings: list[Any] | None,
) -> Any:
    def program(first: list[Any], second: list[Any]) -> list[Any]:
        known = dict(zip((*donated, *kept), (*first, *second), strict=True))
        outputs = stage.run(*[known[n] for n in stage.takes])
        # An output that is an input would share its memory.
        given = {id(value) for value in known.values()}
        return [own(array, given) for array in outputs]

    program.__name__ = program.__qualname__ = name
    if out_shardings is None:
        return jax.jit(program, donate_argnums=0)
    return jax.jit(program, donate_argnums=0, out_shardings=out_shardings)


def _calls(
    crossings: Sequence[Crossing],
) -> tuple[tuple[Channel, CrossKind, tuple[Crossing, ...]], ...]:
    """Groups collectives that can be executed in one call, in the order of the
    program."""
    groups: dict[tuple[Channel, CrossKind], list[Crossing]] = {}
    for crossing in crossings:
        groups.setdefault((crossing.channel, crossing.kind), []).append(crossing)
    return tuple([(*key, tuple(group)) for key, group in groups.items()])


def shared_inputs(cut: Sequence[Stage], inputs: int) -> list[int]:
    """Returns the numbers of the arguments that several stages use, which are copied to
    the device only once."""
    taken = [n for stage in cut for n in stage.takes if n < inputs]
    return sorted({n for n in taken if taken.count(n) > 1})


# jax's stubs leave it untyped.
_wait: Final[Any] = jax.block_until_ready


class StagedProgram:
    """The stages of the program of one signature (types of arguments and elements),
    compiled when they first run."""

    def __init__(self, plan: Plan, staged: Staged) -> None:
        """Traces the body and divides it into stages.

        Raises:
            Outdated: The variables are no longer stored as when ``staged`` was made.
            Exception: Whatever the body raises while it is traced.
        """
        self.plan = plan
        self._held = staged.held
        self._fingerprint = staged.fingerprint
        self._slots = staged.slots_like
        closed, shape = self._traced_body(staged)
        self._shape: list[Any] = list(shape)
        cut, self._constants = stages(closed)
        channels = {x.channel for stage in cut for x in stage.crossings}
        self._channels = {channel: channel.fingerprint for channel in channels}
        given = len(staged.inputs) + len(staged.leaves)
        # In the order of the outputs, because jax pairs donated inputs by shape.
        moved = [given + n for n in self._held.moved_reads()]
        inputs = len(closed.in_avals)
        moved += range(inputs - len(jax.tree.leaves(self._slots)), inputs)
        if self._held.travels:
            moved = []  # on one of the devices it may be the memory of the storage
        name = plan.function.rpartition(".")[2]
        self._sharding = self._held.sharding
        self._given_there: Sharding | None = None
        self._stages = compiled(cut, name, moved, inputs, self._out_shardings())
        self._shared = shared_inputs(cut, given)
        results, values, beside, operands = self._shape
        self._results = len(results)
        self._operands = [len(arrays) for arrays in operands]
        self._operands_from = len(jax.tree.leaves((results, values, beside)))
        self._is_whole = len(cut) == 1 and not self._constants
        sharding = self._sharding
        self._ends_here = sharding is not None and is_waited_for(sharding)
        self._is_waited_for = len(cut) > 1 or self._ends_here
        _wait(self._constants)
        self._traced = False

    def with_others(
        self, plan: Plan, variables: Sequence[VariableHandle]
    ) -> StagedProgram | None:
        """Makes this program for the variables of another plan; None if the program has
        an optimizer, or is one of several processes."""
        held = self._held.with_others(plan, variables)
        if held is None or self._channels or held.fingerprint != self._fingerprint:
            return None
        copied = copy.copy(self)
        copied.plan, copied._held = plan, held
        return copied

    @property
    def is_current(self) -> bool:
        """Whether variables and processes are as when the program was traced."""
        return self._held.fingerprint == self._fingerprint and (
            not self._channels
            or all(
                channel.fingerprint == fingerprint
                for channel, fingerprint in self._channels.items()
            )
        )

    def run(
        self, inputs: Sequence[Any], leaves: Sequence[Any], draws: Draws
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        """Runs the step on inputs and leaves of the elements of ``draws``.

        The elements are used up when new values are stored. Returns the arrays of the
        result, which may not be ready, and the operands of the plan's updates.

        Raises:
            PeerLostError, CollectiveTimeoutError: In a collective; nothing has changed.
            DataLossError: An earlier step failed, and a value is lost.
            Outdated: The variables are no longer stored as when the program was traced.
        """
        given = [*inputs, *leaves]
        if self._sharding is not None:
            given = [self._brought(x) for x in given]
        if self._is_waited_for:
            # Before the turn: the code that computes them may wait for the turn, as a
            # jax callback does that reads a variable.
            for array in given:
                if isinstance(array, jax.Array):
                    array.block_until_ready()
        return self._held.in_turn(lambda: self._run(given, draws))

    def _run(
        self, given: list[Any], draws: Draws
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        held = self._held
        # Asked again: another thread may have given each replica a copy before the turn
        # came.
        if not self.is_current:
            raise Outdated
        held.require_kept()
        last = self._stages[-1]
        store = self._before_last([*given, *held.state()])
        donated = [store[number] for number in last.donated]
        kept = [store[number] for number in last.kept]
        # Only the two lists hold them now, and give them up to the devices.
        store.clear()
        last_outputs: list[list[Any]] = []
        if held.travels:
            self._compute(last, donated, kept, last_outputs)
            settled(last_outputs[0], last_outputs[0])  # until then the old values stay
            held.alone(lambda: self._put(last_outputs[0], draws))
        else:
            try:
                held.alone(lambda: self._last(donated, kept, last_outputs, draws))
            finally:  # also after Ctrl-C: no other program may start meanwhile
                if self._ends_here and last_outputs and last_outputs[0]:
                    self._ended_or_lost(last_outputs[0], draws)
        outputs = last_outputs[0]
        if not self._operands:
            return outputs[: self._results], []
        operands = cut_at(outputs[self._operands_from :], self._operands)
        return outputs[: self._results], operands

    def _last(
        self,
        donated: list[Any],
        kept: list[Any],
        outputs: list[list[Any]],
        draws: Draws,
    ) -> None:
        """Runs the last stage, and stores its outputs as the new values of the
        variables."""
        try:
            self._compute(self._stages[-1], donated, kept, outputs)
            # Drop the inputs while the devices compute.
            donated.clear()
            kept.clear()
            self._put(outputs[0], draws)
        except BaseException:  # to the caller
            # Interrupted after the program has started: the old values are gone, so the
            # new ones are stored.
            if outputs and not draws.is_spent:
                self._put(outputs[0], draws)
            elif not outputs:
                _lose_what_is_gone(donated)
            raise

    def _put(self, outputs: list[Any], draws: Draws) -> None:
        self._held.put(outputs[self._results : self._operands_from], draws)

    def _ended_or_lost(self, outputs: Sequence[jax.Array], draws: Draws) -> None:
        """Waits for outputs that are stored already. If the program fails, these values
        are lost, and the elements can be drawn again."""
        try:
            _wait(outputs[0])  # all outputs are ready at once
        except Exception:  # to the caller
            self._held.alone(lambda: _delete(outputs))
            draws.is_spent = False
            raise

    def _traced_body(self, staged: Staged) -> tuple[Any, Any]:
        try:
            with _refusals.translated_errors(self.plan.function):
                return jax.make_jaxpr(staged.body, return_shape=True)(
                    staged.inputs, staged.leaves, staged.values_like, staged.slots_like
                )
        except Exception as error:  # of the body, or because of another thread
            if self._held.fingerprint != self._fingerprint:
                raise Outdated from error
            raise

    def _before_last(self, given: list[Any]) -> dict[int, Any] | list[Any]:
        """Runs all stages but the last, and their collectives; returns the inputs of
        the last one, by number."""
        if self._is_whole:
            return given
        store = dict(enumerate(given))
        given.clear()
        store.update(self._constants)
        for number in self._shared:
            store[number] = jax.device_put(store[number])
        for part in self._stages[:-1]:
            self._cross(part, store)
        return store

    def _brought(self, array: Any) -> Any:
        """Copies an argument to the devices of the step if it is committed to other
        devices."""
        if not isinstance(array, jax.Array):
            return array
        where = array.sharding
        # Usually it is the sharding of the last batch.
        if where is self._given_there or not array.committed:
            return array
        assert self._sharding is not None
        if where.device_set == self._sharding.device_set:
            self._given_there = where
            return array
        return jax.device_put(array, self._sharding)

    def _out_shardings(self) -> list[Any] | None:
        """Returns the shardings of the last stage's outputs; None: jax's default."""
        if self._sharding is None:
            return None
        results, _, slots, operands = self._shape
        values, beside = self._held.put_shardings()
        shardings: list[Any] = [None] * len(results)
        shardings += values
        for sharding, tree in zip(beside, slots, strict=True):
            shardings += [sharding] * len(jax.tree.leaves(tree))
        return shardings + [None] * len(jax.tree.leaves(operands))

    def _compute(
        self,
        part: Compiled,
        donated: list[Any],
        kept: list[Any],
        outputs: list[list[Any]],
    ) -> None:
        """Runs a stage, and appends its outputs to ``outputs``; the append happens in
        C, so that the outputs are there if a Ctrl-C comes during the call."""
        if self._traced:
            outputs.extend(map(part.run, (donated,), (kept,)))
            return
        with _refusals.translated_errors(self.plan.function):
            outputs.extend(map(part.run, (donated,), (kept,)))
        self._traced = part is self._stages[-1]

    def _cross(self, part: Compiled, store: dict[int, Any]) -> None:
        """Runs a stage before the last one, and the collectives after that stage."""
        made: list[list[Any]] = []
        self._compute(part, [], [store[number] for number in part.kept], made)
        outputs = made.pop()
        settled(outputs, outputs)
        store.update(zip(part.stage.gives, outputs, strict=True))
        # The store alone holds them, so they are freed below.
        del outputs
        for channel, kind, crossings in part.calls:
            operands = [store[n] for x in crossings for n in x.operands]
            results = [n for x in crossings for n in x.results]
            reduced = channel.carry_out(kind, operands)
            _require_same(kind, operands, reduced, channel)
            store.update(zip(results, reduced, strict=True))
        for number in part.dead:
            del store[number]


def _delete(arrays: Sequence[jax.Array]) -> None:
    for array in arrays:
        array.delete()


def _lose_what_is_gone(donated: Sequence[jax.Array]) -> None:
    """Deletes the donated inputs of a failed stage if it has reused the memory of some
    of them: the values belong to one step, so they are lost together."""
    try:
        # Waiting finds a value that has lost its memory on some devices only.
        _wait(donated)
        is_whole = not any(x.is_deleted() for x in donated)
    except Exception:  # of jax; deleted values are reported by the next step
        is_whole = False
    if not is_whole:
        _delete(donated)


def _require_same(
    kind: CrossKind, operands: Sequence[Any], results: Sequence[Any], channel: Channel
) -> None:
    """Refuses results of a collective with other shapes or dtypes than those for which
    the rest of the step is compiled."""
    for operand, result in zip(operands, results, strict=True):
        shape = operand.shape
        if kind is CrossKind.GATHER:
            shape = (shape[0] * channel.size, *shape[1:])
        if tuple(result.shape) != tuple(shape):
            raise ValueError(
                f"rank {channel.rank} gave {operand.shape[0]} rows to a gather, and "
                f"all {channel.size} ranks together {result.shape[0]}: in a step each "
                "gives equally many. Pad them (zs.RaggedIds), or use batches of one "
                "size with drop_remainder=True"
            )
