"""A step in stages, compiled and run: program, collectives, program, ...

Theory of operation. Values and slots of variables that live on the devices go in as
they are. The last stage makes the next ones in their memory (they are donated, unless
they are kept elsewhere), so nothing has changed until all collectives are done: a step
that fails in one of them may be run again. Whatever a stage leaves for a later one
stays on the device; only the operands of collectives are looked at by the host, and let
go when they are done.

Law of the file: the memory of what a step gives up is used by its last stage alone.
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
    """A stage as jax runs it: of the values ``given_up``, whose memory it may use, and
    ``kept``. ``dead`` are values that nobody needs after it."""

    stage: Stage
    run: Any
    given_up: tuple[int, ...]
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
    found = []
    for number, stage in enumerate(cut):
        is_last = number == len(cut) - 1
        given_up = [n for n in moved if is_last and n in stage.takes]
        kept = [n for n in stage.takes if n not in set(given_up)]
        later = {n for other in cut[number + 1 :] for n in other.takes}
        later |= {n for x in cut[number + 1 :] for c in x.crossings for n in c.operands}
        here = {n for x in stage.crossings for n in (*x.operands, *x.results)}
        dead = ({*stage.takes, *stage.gives, *here} - later) if not is_last else set()
        found.append(
            Compiled(
                stage,
                _jitted(
                    stage,
                    f"{name}_{number}" if number else name,
                    given_up,
                    kept,
                    out_shardings if is_last else None,
                ),
                tuple(given_up),
                tuple(kept),
                tuple(sorted(n for n in dead if n >= inputs)),
                _calls(stage.crossings),
            )
        )
    return found


def _jitted(
    stage: Stage,
    name: str,
    given_up: list[int],
    kept: list[int],
    out_shardings: list[Any] | None,
) -> Any:
    def program(first: list[Any], second: list[Any]) -> list[Any]:
        known = dict(zip((*given_up, *kept), (*first, *second), strict=True))
        made = stage.run(*[known[n] for n in stage.takes])
        # What is handed on as it came would be the same memory twice.
        given = {id(value) for value in known.values()}
        return [own(array, given) for array in made]

    program.__name__ = program.__qualname__ = name
    if out_shardings is None:
        return jax.jit(program, donate_argnums=0)
    return jax.jit(program, donate_argnums=0, out_shardings=out_shardings)


def _calls(
    crossings: Sequence[Crossing],
) -> tuple[tuple[Channel, CrossKind, tuple[Crossing, ...]], ...]:
    """The crossings that can be done as one, together, in the order of the program."""
    groups: dict[tuple[Channel, CrossKind], list[Crossing]] = {}
    for each in crossings:
        groups.setdefault((each.channel, each.kind), []).append(each)
    return tuple([(*key, tuple(found)) for key, found in groups.items()])


def shared_inputs(cut: Sequence[Stage], inputs: int) -> list[int]:
    """Arguments that several stages take: they go to the device once."""
    taken = [n for stage in cut for n in stage.takes if n < inputs]
    return sorted({n for n in taken if taken.count(n) > 1})


# jax's stubs leave it untyped.
_wait: Final[Any] = jax.block_until_ready


class StagedProgram:
    """The programs of one signature, compiled when they first run."""

    def __init__(self, plan: Plan, staged: Staged) -> None:
        """Raises `Outdated`, or whatever the body raises while it is traced."""
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
        # In the order of what becomes of them, as jax pairs them by shape.
        moved = [given + n for n in self._held.moved_reads()]
        inputs = len(closed.in_avals)
        moved += range(inputs - len(jax.tree.leaves(self._slots)), inputs)
        if self._held.travels:
            moved = []  # on one of the devices it may be the memory that is kept
        name = plan.function.rpartition(".")[2]
        self._sharding = self._held.sharding
        self._given_there: Sharding | None = None
        self._stages = compiled(cut, name, moved, inputs, self._out_shardings())
        self._shared = shared_inputs(cut, given)
        results, values, beside, operands = self._shape
        self._results = len(results)
        self._operands = [len(each) for each in operands]
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
        """The same program for other variables, which ``plan`` has in place of its own;
        None: it has an optimizer, or is one of several processes."""
        held = self._held.with_others(plan, variables)
        if held is None or self._channels or held.fingerprint != self._fingerprint:
            return None
        made = copy.copy(self)
        made.plan, made._held = plan, held
        return made

    @property
    def is_current(self) -> bool:
        """Whether variables and processes are as it was traced for."""
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
        """Runs the step on inputs and the leaves of the elements of ``draws``, which
        are spent when new values are kept; the arrays of the result may not be ready
        yet. Returns the operands of the plan's updates, too.

        Raises:
            PeerLostError, CollectiveTimeoutError: In a collective; nothing has changed.
            DataLossError: An earlier step failed, and a value is gone.
            Outdated: See there.
        """
        given = [*inputs, *leaves]
        if self._sharding is not None:
            given = [self._brought(x) for x in given]
        if self._is_waited_for:
            # Before its turn: what computes them may be waiting for it, as a function
            # of jax's that reads a variable when it runs.
            for array in given:
                if isinstance(array, jax.Array):
                    array.block_until_ready()
        return self._held.in_turn(lambda: self._run(given, draws))

    def _run(
        self, given: list[Any], draws: Draws
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        held = self._held
        if not self.is_current:
            raise Outdated
        held.require_kept()
        last = self._stages[-1]
        store = self._before_last([*given, *held.state()])
        given_up = [store[number] for number in last.given_up]
        kept = [store[number] for number in last.kept]
        store.clear()
        made: list[list[Any]] = []
        if held.travels:
            self._compute(last, given_up, kept, made)
            settled(made[0], made[0])  # until then the old values stay
            held.alone(lambda: self._put(made[0], draws))
        else:
            try:
                held.alone(lambda: self._last(given_up, kept, made, draws))
            finally:  # of a Ctrl-C, too: no other program is to begin meanwhile
                if self._ends_here and made and made[0]:
                    self._ended_or_lost(made[0], draws)
        outputs = made[0]
        if not self._operands:
            return outputs[: self._results], []
        operands = cut_at(outputs[self._operands_from :], self._operands)
        return outputs[: self._results], operands

    def _last(
        self,
        given_up: list[Any],
        kept: list[Any],
        made: list[list[Any]],
        draws: Draws,
    ) -> None:
        """The last stage: what comes of it takes the place of what it is given."""
        try:
            self._compute(self._stages[-1], given_up, kept, made)
            # While the devices compute, what they were given is let go, too.
            given_up.clear()
            kept.clear()
            self._put(made[0], draws)
        except BaseException:  # to the caller
            if made and not draws.is_spent:
                self._put(made[0], draws)
            elif not made:
                _lose_what_is_gone(given_up)
            raise

    def _put(self, outputs: list[Any], draws: Draws) -> None:
        self._held.put(outputs[self._results : self._operands_from], draws)

    def _ended_or_lost(self, outputs: Sequence[jax.Array], draws: Draws) -> None:
        """Waits for what is kept already. If it fails, all of it is as lost as what it
        was made of, and the elements are for the next try."""
        try:
            _wait(outputs[0])  # the program ends with all that it returns
        except Exception:  # to the caller
            self._held.alone(lambda: _delete(outputs))
            draws.is_spent = False
            raise

    def _traced_body(self, staged: Staged) -> tuple[Any, Any]:
        try:
            with _refusals.in_our_words(self.plan.function):
                return jax.make_jaxpr(staged.body, return_shape=True)(
                    staged.inputs, staged.leaves, staged.values_like, staged.slots_like
                )
        except Exception as error:  # of the user's, or because of the other thread
            if self._held.fingerprint != self._fingerprint:
                raise Outdated from error
            raise

    def _before_last(self, given: list[Any]) -> dict[int, Any] | list[Any]:
        """What the last stage takes is in it, by number."""
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
        """An argument, on the devices of this step if it is bound to others."""
        if not isinstance(array, jax.Array):
            return array
        where = array.sharding
        # Mostly it is the one of the last batch.
        if where is self._given_there or not array.committed:
            return array
        assert self._sharding is not None
        if where.device_set == self._sharding.device_set:
            self._given_there = where
            return array
        return jax.device_put(array, self._sharding)

    def _out_shardings(self) -> list[Any] | None:
        """The shardings of the outputs of the last stage; None: they are where inputs
        are."""
        if self._sharding is None:
            return None
        results, _, slots, operands = self._shape
        values, beside = self._held.put_shardings()
        found: list[Any] = [None] * len(results)
        found += values
        for sharding, tree in zip(beside, slots, strict=True):
            found += [sharding] * len(jax.tree.leaves(tree))
        return found + [None] * len(jax.tree.leaves(operands))

    def _compute(
        self,
        part: Compiled,
        given_up: list[Any],
        kept: list[Any],
        made: list[list[Any]],
    ) -> None:
        """Adds the outputs to ``made``: from C, so that a Ctrl-C that comes while the
        stage is called finds them there."""
        if self._traced:
            made.extend(map(part.run, (given_up,), (kept,)))
            return
        with _refusals.in_our_words(self.plan.function):
            made.extend(map(part.run, (given_up,), (kept,)))
        self._traced = part is self._stages[-1]

    def _cross(self, part: Compiled, store: dict[int, Any]) -> None:
        """A stage before the last, and the collectives after it."""
        made: list[list[Any]] = []
        self._compute(part, [], [store[number] for number in part.kept], made)
        outputs = made.pop()
        settled(outputs, outputs)
        store.update(zip(part.stage.gives, outputs, strict=True))
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


def _lose_what_is_gone(given_up: Sequence[jax.Array]) -> None:
    """After a stage that was given these, and of which nothing is kept. If it has taken
    some of the memory, the values are lost together: they belong to one step."""
    try:
        # Waiting tells of a value that has lost its memory on some devices alone.
        _wait(given_up)
        is_whole = not any(x.is_deleted() for x in given_up)
    except Exception:  # of jax; they are deleted, which each step asks for
        is_whole = False
    if not is_whole:
        _delete(given_up)


def _require_same(
    kind: CrossKind, operands: Sequence[Any], results: Sequence[Any], channel: Channel
) -> None:
    """What comes back has the shape that the rest of the step is compiled for."""
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
