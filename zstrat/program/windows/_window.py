"""The body of a window: several local steps as one closure, and their contribution.

A trace of the body has two parts. First the step alone is traced, without being run, to
find which elements it draws, which variables it reads and which it trains. Then all
steps are one ``lax.scan`` over the stacked elements, which carries the worker's copy of
the variables and the slots of the inner optimizer. Elements that differ in shape cannot
be stacked: then the steps are compiled one after the other, with a warning.

Theory of operation. θ is the worker's copy, Θ the value on the servers. A window
contributes Δ = Θ - θ to a round of the outer optimizer, which treats it as a gradient
(Douillard et al., "DiLoCo", 2023). With several fragments, or if θ is kept after its
window (``overlap``, ``mix``), θ is a resident array, which stays on the worker, and so
is the Θ from which Δ is computed, the *base*: always a value that a server had. A
segment then consists of: ``overlap`` steps; merging the fragment of the previous round,
θ ← mix θ + (1 - mix) Θ; the other steps; and the contribution of the next fragment.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import jax
import jax.numpy as jnp

from zstrat.program._function import Function
from zstrat.program.ship._carried import ScopedBody
from zstrat.program.trace import _refusals
from zstrat.program.trace._capture import MAX_DRAWS, Capture
from zstrat.program.trace._iterator import Element
from zstrat.program.trace._signature import printed_before, worker_context
from zstrat.program.trace._tracebacks import claimed
from zstrat.variables import ABSENT, IndexedSlices, recorder, user_stacklevel

from ._fragments import COPY, SEGMENT, STEPS, ResidentArrays, Segment, fragments_of
from ._window_recorder import NeedsElement, TableRows, WindowRecorder, window_of_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.program.trace._flow import SlotsKey
    from zstrat.program.trace._iterator import StepIterator
    from zstrat.program.trace._structure import Structure
    from zstrat.variables import GradientCall, SlotRule, Variable, VariableHandle

    from ._fragments import Exchanges
    from ._window_recorder import StepLookup

_OF_SCHEDULES: Final = frozenset(
    {
        "InjectHyperparamsState",
        "InjectStatefulHyperparamsState",
        "ScaleByScheduleState",
        "WrappedScheduleState",
    }
)
"""Classes of optax states whose count is the position in a schedule; the count of Adam
is the number of gradients in its moments."""

_BASE: Final = "/base"
"""Name of the resident arrays from which differences are computed."""
_ROUNDS_OF_EPOCH: Final = 8
"""Rounds per epoch of the speeds in ``pace``. The speed of a worker that is gone is
forgotten after one or two epochs."""
_PROGRAMS: Final = 8
"""About how many different numbers of steps per window workers use when they adapt to
their speed; each number is a separate program."""

Drawn = list[tuple["StepIterator", Any]]
"""The elements of one step, each with its iterator."""
Copies = dict[int, jax.Array]
"""By key of the variable: its value."""
Slots = dict["SlotsKey", list[Any]]


@final
class WindowBody:
    """The body of the step function that `LocalOptimizer.window` makes."""

    def __init__(self, exchanges: Exchanges, step: Callable[..., Any]) -> None:
        self.exchanges, self.step = exchanges, step
        name = getattr(step, "__qualname__", type(step).__qualname__)
        self.__name__ = self.__qualname__ = f"window of {name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = recorder.get()
        is_inside = window_of_step.get() is not None
        if SEGMENT not in kwargs and worker_context.get() is not None:
            # The worker has not recognized it: another step has called it.
            is_inside = is_inside or self.exchanges.take_segments
        if not isinstance(outer, Capture) or is_inside:
            raise RuntimeError(
                f"{self.__name__!r} is called in another step function, in a replica, "
                "or eagerly: a window is a closure by itself, so schedule it, "
                "coordinator.schedule(window, args=...)"
            )
        # A worker gives a segment only to windows that keep something from one closure
        # to the next; others are the same program each time.
        segment = kwargs.pop(SEGMENT, Segment())
        return _Window(self, outer, args, kwargs).run(segment)


def window_of(function: object) -> Exchanges | None:
    """Returns the exchanges of a window that needs a `Segment`; None if the function is
    not such a window."""
    body = function.body if isinstance(function, Function) else None
    # As a coordinator ships it, in the scope of its strategy.
    if isinstance(body, ScopedBody):
        body = body.step
    if isinstance(body, WindowBody) and body.exchanges.take_segments:
        return body.exchanges
    return None


@dataclass(frozen=True)
class _Step:
    """What the step of a window does, as the trial trace has shown."""

    call: GradientCall
    trained: list[VariableHandle]
    slots: dict[SlotsKey, tuple[VariableHandle, SlotRule]]
    reads: list[VariableHandle]
    """Variables that the step reads and does not train."""
    lookups: list[StepLookup]
    structure: Structure


class _Window:
    """One trace of the body of a window."""

    def __init__(
        self, body: WindowBody, outer: Capture, args: Any, kwargs: Any
    ) -> None:
        self._body, self.outer, self._args, self._kwargs = body, outer, args, kwargs
        self.exchanges = exchanges = body.exchanges
        self._resident = ResidentArrays(exchanges.outer.id, exchanges.name, outer)

    def run(self, segment: Segment) -> Any:
        """Traces all steps of a segment and its exchange; returns the result, each
        array with a first axis of steps."""
        exchanges = self.exchanges
        count, mix = exchanges.steps_in(segment), exchanges.mix
        # First: what the steps draw, read and train decides which inputs the program
        # has.
        step, drawn = self._tried()
        if count * len(drawn) > MAX_DRAWS:
            raise ValueError(
                f"{step.call.where}: a window of {count} steps draws "
                f"{count * len(drawn)} elements, and a program takes {MAX_DRAWS} at "
                "most: exchange more often (every=), or draw larger elements"
            )
        # All are drawn before anything is read: at the end of the data a window has no
        # effect.
        more = range(1, count)
        # The trial has drawn the elements of the first step.
        batches = [drawn, *[[(x, self.outer.draw(x)) for x, _ in drawn] for _ in more]]
        runs = _Steps(self, step, batches)
        # With copies that outlive the window, rows would be of different moments.
        keeps = exchanges.keep_copies
        rows = {} if keeps else self._pull_rows(step, runs, drawn, count)
        runs.known = self._read(step.reads, rows)
        fragments = self._fragments(step)
        leaves = fragments[segment.number]
        # The worker begins with the servers' values of all fragments.
        if segment.restart:
            base = self._read(step.trained, rows)
            copies = dict(base)
            slots = self._slots(step, copies)
        else:
            copies, base = self._kept(step, COPY), self._kept(step, _BASE)
            slots = self._slots(step, copies)
            # The steps of the overlap need nothing that is pulled, so they can run
            # while the pull is under way (`OverlappedProgram`).
            copies, slots = runs.run(copies, slots, exchanges.overlap)
            # The fragment that the window before has contributed: its round is closed
            # by now.
            for leaf in fragments[segment.number - 1]:
                for part in step.call.targets[leaf].components:
                    key = part.spec.key
                    base[key] = self.outer.read(part)
                    copies[key] = (
                        mix * copies[key] + (1 - mix) * base[key] if mix else base[key]
                    )
        copies, slots = runs.run(copies, slots, count - runs.done)
        self._contribute(step, base, copies, None if keeps else runs, leaves)
        self._keep_slots(step, slots)
        for part in step.trained if keeps else ():
            self._resident.keep(part, COPY, copies[part.spec.key])
            self._resident.keep(part, _BASE, base[part.spec.key])
        if exchanges.pace is not None:
            self._adapt(exchanges.pace)
        return step.structure.unflatten(runs.results(step.call.where))

    def _read(self, variables: Sequence[VariableHandle], rows: Copies) -> Copies:
        """Returns the values of variables: from ``rows`` if they are there, otherwise
        read from the servers."""
        return {
            v.spec.key: rows[v.spec.key] if v.spec.key in rows else self.outer.read(v)
            for v in variables
        }

    def _pull_rows(self, step: _Step, runs: _Steps, drawn: Drawn, count: int) -> Copies:
        """Looks up the rows for all steps at once, in those tables of which the steps
        need only looked-up rows; returns the values of these tables by key."""
        stacked = runs.stacked(0, count)
        # The ids of all steps can be computed at once only if their elements have one
        # shape.
        if not step.lookups or stacked is None:
            return {}
        elements = [Element(x) for _, x in drawn]

        def replay(
            number: Any, leaves: Sequence[Any], values: Copies, rows: Sequence[Any]
        ) -> tuple[WindowRecorder, Sequence[Any]]:
            given = zip(drawn, _elements(elements, leaves), strict=True)
            elements_of_step = [(iterator, x) for (iterator, _), x in given]
            inner = self.exchanges.inner.id
            recording = WindowRecorder(
                inner, self.outer, elements_of_step, values, rows=rows
            )
            return recording, recording.run(*self.step_and_arguments, number)[1]

        leaves = [leaf for x in elements for leaf in x.leaves]
        rules = [(key, rule) for (key, _), (_, rule) in step.slots.items()]
        variables = [*step.reads, *step.trained]
        tables = TableRows(replay, step.lookups, leaves, variables, rules)
        return tables.pulled(self.outer, *stacked)

    def _kept(self, step: _Step, what: str) -> Copies:
        """Reads the resident arrays ``what`` of all variables that are trained."""
        return {
            v.spec.key: self._resident.read(v, what, v.shape, v.spec.dtype)
            for v in step.trained
        }

    def _fragments(self, step: _Step) -> list[list[int]]:
        """Returns the indices of the leaves of each fragment.

        Raises:
            ValueError: The tree cannot be divided into so many fragments, or the outer
                optimizer cannot update fragments separately.
        """
        exchanges, call = self.exchanges, step.call
        if exchanges.fragments == 1:
            return [list(call.given)]
        if exchanges.fragments > len(call.given):
            raise ValueError(
                f"{call.where}: zs.LocalOptimizer(fragments={exchanges.fragments}) has "
                f"to cut a tree of {len(call.given)} variables: give "
                f"{len(call.given)} fragments at most"
            )
        sizes = [math.prod(call.targets[leaf].shape) for leaf in call.given]
        fragments: list[list[int]] = [[] for _ in range(exchanges.fragments)]
        places = fragments_of(sizes, exchanges.fragments)
        for leaf, place in zip(call.given, places, strict=True):
            fragments[place].append(leaf)
        # A round has the gradients of one fragment, so the outer optimizer must not
        # need those of others for a leaf.
        outer = exchanges.outer.rule(call, is_here=False).cut()
        if any(outer.gradients_for(leaves) - {*leaves} for leaves in fragments):
            raise ValueError(
                f"{call.where}: the outer optimizer of {exchanges.name!r} computes "
                "something from all gradients of its tree (a global norm, a common "
                "test), and a round has those of one fragment: use fragments=1, or do "
                "that in the inner optimizer"
            )
        return fragments

    def _adapt(self, pace: Variable) -> None:
        """Decides how many steps the next window makes: as many as this worker can make
        while the fastest one makes all (DyLU). ``pace`` has the largest speed of each
        of the last epochs; the entry of the next epoch is cleared."""
        resident, every = self._resident, self.exchanges.every
        speed, epoch = resident.speed(), resident.round() // _ROUNDS_OF_EPOCH
        speeds, size = jnp.asarray(pace.value()), pace.shape[0]
        others = jnp.maximum(speeds[epoch % size], speeds[(epoch - 1) % size])
        fastest = jnp.maximum(others, speed)
        share = jnp.where(speed > 0, speed / jnp.where(fastest > 0, fastest, 1.0), 1.0)
        # A tenth is noise, and the fastest worker makes all steps.
        share = jnp.where(share > 0.9, 1.0, share)
        steps = jnp.floor(every * share).astype(jnp.int32)
        # Few numbers, as each is another program.
        unit = -(-every // _PROGRAMS)
        steps = jnp.where(steps < unit, steps, steps // unit * unit)
        resident.keep(None, STEPS, jnp.maximum(steps, 1))
        now, later = jnp.reshape(epoch % size, 1), jnp.reshape((epoch + 2) % size, 1)
        # Many workers note their speed in one round; of a maximum the order does not
        # matter.
        pace.scatter_max(IndexedSlices(jnp.reshape(speed, 1), now))
        # Two epochs ahead, where no worker has written yet: what is there is of the
        # last turn of the ring.
        pace.scatter_update(IndexedSlices(jnp.zeros(1, speed.dtype), later))

    def _tried(self) -> tuple[_Step, Drawn]:
        """Traces the step alone, again and again, until the trace has all elements that
        the step draws."""
        drawn: Drawn = []
        while True:
            trial = WindowRecorder(self.exchanges.inner.id, self.outer, drawn)
            found: list[Structure] = []

            def tried(trial: WindowRecorder = trial, found: Any = found) -> Any:
                structure, arrays = trial.run(*self.step_and_arguments, 0)
                found.append(structure)
                return arrays

            try:
                # What the step prints appears when it is traced in the program.
                with printed_before():
                    jax.eval_shape(tried)
            except NeedsElement as need:
                # Drawn in the trace of the window: in that of the trial it would be
                # a value of a trace that has ended.
                drawn.append((need.iterator, self.outer.draw(need.iterator)))
                continue
            return self._step_of(trial, found[-1]), drawn

    def _step_of(self, trial: WindowRecorder, structure: Structure) -> _Step:
        call = trial.call
        if call is None:
            raise RuntimeError(
                f"{self._body.__name__!r} trains nothing: its step has to call "
                "apply_gradients of the zs.LocalOptimizer that made the window"
            )
        if call.extras.kinds or call.extras.static:
            raise ValueError(
                f"{call.where}: the inner optimizer of a window takes further "
                "arguments of its update, which a window does not pass on: leave them "
                "out, and use a transformation without them"
            )
        moves = trial.moves
        return _Step(
            # The arrays belong to the trace of the trial.
            call.with_arrays([None] * len(call.arrays)),
            [variable for variable, _ in moves.values.values()],
            {key: (variable, rule) for key, (variable, rule, _) in moves.slots.items()},
            [v for key, v in trial.reads.items() if key not in moves.values],
            trial.lookups,
            structure,
        )

    @property
    def name(self) -> str:
        return self._body.__name__

    @property
    def step_and_arguments(self) -> tuple[Callable[..., Any], Any, Any]:
        return self._body.step, self._args, self._kwargs

    def _slots(self, step: _Step, values: Copies) -> Slots:
        """Reads the resident slots of the inner optimizer; for a worker that has none
        yet, makes new ones. The counts of schedules are the steps since training began,
        whenever this worker has joined."""
        found: Slots = {}
        for key, (variable, rule) in step.slots.items():
            if not rule.names:
                found[key] = []
                continue
            # A worker that has just joined has none, nor has one whose values were
            # restored without the optimizer.
            has_some = self._resident.read(variable, _begun(rule), (), "bool")
            kept = [
                self._resident.read(variable, name, kind.shape, kind.dtype)
                for name, kind in zip(rule.names, rule.kinds, strict=True)
            ]
            value = values[variable.spec.key]

            def new(rule: SlotRule = rule, value: jax.Array = value) -> list[Any]:
                with rule.leaf.tree.precision():
                    slots = rule.leaf.init(value)
                pairs = zip(slots, rule.kinds, strict=True)
                return [jnp.asarray(slot, kind.dtype) for slot, kind in pairs]

            slots = list(jax.lax.cond(has_some, lambda kept=kept: kept, new))
            classes = self.exchanges.inner.state_classes
            for number, (name, kind) in enumerate(
                zip(rule.names, rule.kinds, strict=True)
            ):
                if name.endswith(".count") and classes.get(name) in _OF_SCHEDULES:
                    slots[number] = self._steps_before().astype(kind.dtype)
            found[key] = slots
        return found

    def _steps_before(self) -> jax.Array:
        """Returns how many steps a worker makes before this round, since training
        began."""
        exchanges = self.exchanges
        turn, number = jnp.divmod(self._resident.round(), exchanges.fragments)
        part = number * exchanges.every // exchanges.fragments
        return turn * exchanges.every + part

    def _keep_slots(self, step: _Step, slots: Slots) -> None:
        for key, (variable, rule) in step.slots.items():
            for name, array in zip(rule.names, slots[key], strict=True):
                self._resident.keep(variable, name, array)
            if rule.names:
                self._resident.keep(variable, _begun(rule), jnp.ones((), jnp.bool_))

    def _contribute(
        self,
        step: _Step,
        base: Copies,
        copies: Copies,
        runs: _Steps | None,
        leaves: Sequence[int],
    ) -> None:
        """Contributes the difference Δ of these leaves to the round.

        ``runs``: the steps since Δ was zero, if they all belong to this window: then a
        table contributes only the rows that these steps have touched. Otherwise None.
        """
        call = step.call
        deltas: list[Any] = [None] * len(call.targets)
        for leaf, target, sparse, _ in call.leaves():
            if leaf not in leaves:
                continue
            keys = [part.spec.key for part in target.components]
            parts = [base[key] - copies[key] for key in keys]
            delta: Any = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
            if sparse and runs is not None:
                # As many rows as ids, since a program has fixed shapes; see
                # `_distinct`.
                rows = _distinct(runs.rows(leaf), target.shape[0])
                values = delta.at[rows].get(mode="fill", fill_value=0)
                delta = IndexedSlices(values, rows, tuple(target.shape))
            deltas[leaf] = delta
        variables = [
            None if delta is None else target
            for target, delta in zip(call.targets, deltas, strict=True)
        ]
        treedef = call.structure.treedef
        # Errors of the outer optimizer name the user's call.
        with claimed(call.where):
            self.exchanges.outer.apply_gradients(
                treedef.unflatten(deltas), treedef.unflatten(variables)
            )


class _Steps:
    """The local steps that one closure traces (a window, or a segment of one), and
    their results; ``done`` is how many were traced so far.

    Args:
        batches: For each step, the elements that it draws.
    """

    def __init__(self, window: _Window, step: _Step, batches: list[Drawn]) -> None:
        self.done = 0
        self.known: Copies = {}
        """Values of variables that are not trained, by key."""
        self._window, self._step = window, step
        self._iterators = [iterator for iterator, _ in batches[0]]
        self._batches = [[Element(x) for _, x in drawn] for drawn in batches]
        self._results: list[list[jax.Array]] = []
        """For each call of `run` the arrays of the results, ``[steps, ...]``; for steps
        compiled one by one, ``[1, ...]`` each."""
        self._rows: list[list[jax.Array]] = []

    def run(self, copies: Copies, slots: Slots, count: int) -> tuple[Copies, Slots]:
        """Traces the next ``count`` steps; returns copies and slots after them."""
        if not count:
            return copies, slots
        first, self.done = self.done, self.done + count
        carry = copies, slots
        stacked = self.stacked(first, self.done)
        if stacked is not None:
            carry, outputs = jax.lax.scan(self._one, carry, stacked)
            self._took(outputs)
            return carry
        warnings.warn(
            f"the elements that {self._window.name!r} draws differ in shape, so its "
            "steps are compiled one by one and not as a loop: drop the remainder of a "
            "batch, or pad it",
            stacklevel=user_stacklevel(),
        )
        for number, drawn in enumerate(self._batches[first : self.done], first):
            leaves = [leaf for x in drawn for leaf in x.leaves]
            given = jnp.asarray(number), leaves
            carry, outputs = self._one(carry, given, drawn)
            self._took(jax.tree.map(lambda x: x[None], outputs))
        return carry

    def stacked(
        self, first: int, last: int
    ) -> tuple[jax.Array, list[jax.Array]] | None:
        """Returns the numbers of the steps from ``first`` to before ``last``, and the
        leaves of their elements, ``[steps, ...]``; None if the elements differ in
        shape."""
        batches = self._batches[first:last]
        if len({tuple([x.key for x in drawn]) for drawn in batches}) > 1:
            return None
        leaves = [[leaf for x in drawn for leaf in x.leaves] for drawn in batches]
        stacked = [jnp.stack(each) for each in zip(*leaves, strict=True)]
        return jnp.arange(first, last), stacked

    def results(self, where: str) -> list[jax.Array]:
        """Returns the arrays of the results, each ``[steps, ...]``."""
        columns = list(zip(*self._results, strict=True))
        for arrays in columns:
            shapes = {array.shape[1:] for array in arrays}
            if len(shapes) > 1:
                raise ValueError(
                    f"{where}: the steps of a window return arrays of different shapes "
                    f"({', '.join(map(str, sorted(shapes)))}), because their elements "
                    "differ: return arrays whose shape does not depend on them"
                )
        return [jnp.concatenate(arrays) for arrays in columns]

    def rows(self, leaf: int) -> jax.Array:
        """Returns the indices of the rows of a table (the trained leaf ``leaf``) that
        the steps have touched, with repetitions."""
        sparse = [n for n, _, is_sparse, _ in self._step.call.leaves() if is_sparse]
        place = sparse.index(leaf)
        return jnp.concatenate([rows[place].reshape(-1) for rows in self._rows])

    def _took(self, outputs: tuple[list[jax.Array], list[jax.Array]]) -> None:
        self._results.append(outputs[0])
        self._rows.append(outputs[1])

    def _one(
        self, carry: tuple[Copies, Slots], given: Any, drawn: Any = None
    ) -> tuple[tuple[Copies, Slots], tuple[list[jax.Array], list[jax.Array]]]:
        copies, slots = carry
        number, leaves = given
        elements = _elements(self._batches[0] if drawn is None else drawn, leaves)
        window, step = self._window, self._step
        recording = WindowRecorder(
            window.exchanges.inner.id,
            window.outer,
            list(zip(self._iterators, elements, strict=True)),
            {**self.known, **copies},
            slots,
        )
        structure, arrays = recording.run(*window.step_and_arguments, number)
        moves, name = recording.moves, window.name
        # What a scan carries has the same structure in each step.
        if recording.call is None or [*moves.values] != [
            v.spec.key for v in step.trained
        ]:
            raise _refusals.changed(name, "it updated other variables")
        if recording.drawn != len(elements):
            raise _refusals.changed(name, "it drew fewer elements")
        if structure != step.structure:
            difference = step.structure.difference(structure)
            raise _refusals.result_changed(name, *difference)
        rows = [own[0] for _, _, sparse, own in recording.call.leaves() if sparse]
        moved = {
            # The optimizer may compute in a wider dtype than the variable's, which a
            # carry must keep.
            key: value.astype(copies[key].dtype)
            for key, (_, value) in moves.values.items()
        }
        kept = {key: list(leaves) for key, (_, _, leaves) in moves.slots.items()}
        return (moved, kept), (arrays, rows)


def _elements(like: Sequence[Element], leaves: Sequence[Any]) -> list[Any]:
    """Rebuilds elements that have the structures of ``like`` from their leaves."""
    left = iter(leaves)
    return [x.treedef.unflatten([next(left) for _ in x.leaves]) for x in like]


def _begun(rule: SlotRule) -> str:
    """Returns the name of the resident flag which says that a worker has these slots.
    Slots of another optimizer, in a checkpoint, have another flag, so they are not
    used."""
    kinds = [(kind.shape, str(kind.dtype)) for kind in rule.kinds]
    words = repr((rule.names, kinds)).encode()
    return f"/begun-{hashlib.blake2b(words, digest_size=6).hexdigest()}"


def _distinct(rows: jax.Array, height: int) -> jax.Array:
    """Returns each index once, with `ABSENT` in place of repetitions and of padding."""
    ordered = jnp.sort(rows.astype(jnp.int32))
    is_first = jnp.concatenate([jnp.ones(1, jnp.bool_), ordered[1:] != ordered[:-1]])
    is_there = is_first & (ordered >= 0) & (ordered < height)
    return jnp.where(is_there, ordered, ABSENT)
