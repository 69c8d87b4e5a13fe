"""What windows of local steps exchange with the servers: fragments, resident arrays,
overlapping programs.

A *window* is several local steps that one closure runs. The variables may be divided
into *fragments*, after Douillard et al., "Streaming DiLoCo" (2025): each fragment is
exchanged once in ``every`` steps, and at another offset than the other fragments, so
that the link carries a part of the model at a time. A *segment* is the steps of a
window between two exchanges. Round r of the outer optimizer is the exchange of fragment
``r % fragments``.

*Resident arrays* are arrays that a window keeps on its worker from one closure to the
next. To a trace they are variables that it reads and assigns; they have their own keys
and are on no parameter server. The worker supplies their values and keeps the new ones
(see `zstrat.worker`), also those of a checkpoint. If a worker has no array yet, the
value is zeros.

`OverlappedProgram` begins a window before the values on servers have arrived. The
program is divided in two. The *head* is everything that depends on no pulled value: it
runs while the request for these values is under way. The *tail* takes what the head has
computed, and the values.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from zstrat.program._compile import CompiledProgram, settled
from zstrat.program.trace._discover import retraced
from zstrat.variables import (
    RESIDENT,
    UnboundStorage,
    VariableSpec,
    VariableUpdate,
    handle,
)
from zstrat.wire import UpdateOp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.program.trace._capture import Capture
    from zstrat.program.trace._iterator import Element
    from zstrat.program.trace._plan import Plan, TracedBody
    from zstrat.program.trace._signature import CutCall
    from zstrat.variables import Optimizer, Variable, VariableHandle


COPY: Final = "/copy"
"""Name of the resident array that is a worker's copy of a variable."""

ROUND: Final = "/round"
"""Name of the resident array with the number of the round whose values a window has
read."""

SPEED: Final = "/speed"
"""Name of the resident array with the steps per second that this worker makes."""

STEPS: Final = "/steps"
"""Name of the resident array with the number of steps that the next window is to
make."""

SEGMENT: Final = "zstrat_segment"
"""The keyword argument with which a worker gives a window its `Segment`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a window that one closure runs: the steps before the exchange of
    fragment ``number``.

    ``restart``: the segment first reads the values of all fragments from the servers,
    because the worker has no copy yet, or has missed a round. ``every``: run only as
    many steps as if the window had so many steps; 0: all.
    """

    number: int = 0
    restart: bool = True
    every: int = 0


@dataclass(frozen=True, eq=False)
class Exchanges:
    """When the windows of a `LocalOptimizer` exchange which fragments; see its
    arguments.

    ``outer`` is the optimizer on the servers, ``inner`` that of the local steps.
    ``pace`` is a variable with the speed of the fastest worker; None: all workers make
    the same number of steps.
    """

    name: str
    outer: Optimizer
    inner: Optimizer
    every: int
    fragments: int
    overlap: int
    mix: float
    pace: Variable | None = None

    def steps_in(self, segment: Segment) -> int:
        """Returns how many local steps a segment makes."""
        count = steps_of(segment.number, self.every, self.fragments)
        if segment.every:
            # At least one after the copy has taken the result of the round before:
            # those before it are in no contribution.
            fewer = count * segment.every // self.every
            count = min(count, max(fewer, self.overlap + 1))
        return count

    def require_equal_draws(self, name: str) -> None:
        """Checks that all windows draw the same number of elements, which leased
        datasets need.

        Raises:
            ValueError: The numbers differ; says what to write. ``name``: of the window.
        """
        if self.pace is None and self.every % self.fragments == 0:
            return
        cause = f"every={self.every}, fragments={self.fragments}"
        remedy = "make every a multiple of fragments"
        if self.pace is not None:
            cause, remedy = "adapt=True", "leave out adapt=True"
        raise ValueError(
            f"{name} draws from a leased dataset, which leases the same number of "
            f"batches to each closure, but zs.LocalOptimizer({cause}) makes windows of "
            f"different numbers of steps: {remedy}, or use "
            "coordinator.create_per_worker_dataset"
        )

    @property
    def take_segments(self) -> bool:
        """Whether a worker has to say which segment of a window a closure runs."""
        return self.keep_copies or self.pace is not None

    @property
    def keep_copies(self) -> bool:
        """Whether a worker's copy of the variables is kept after its window."""
        return self.fragments > 1 or self.overlap > 0 or self.mix > 0


def steps_of(segment: int, every: int, fragments: int) -> int:
    """Returns the number of steps of a segment; those of all segments add up to
    ``every``."""
    return (segment + 1) * every // fragments - segment * every // fragments


def fragments_of(sizes: Sequence[int], count: int) -> list[int]:
    """Distributes leaves of these sizes over ``count`` fragments of about equal size:
    the largest leaf first, each to the smallest fragment so far. Returns for each leaf
    the index of its fragment."""
    filled = [0] * count
    found = [0] * len(sizes)
    for leaf in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        found[leaf] = min(range(count), key=lambda n: (filled[n], n))
        # A leaf without elements counts, too, so that no fragment stays empty.
        filled[found[leaf]] += max(1, sizes[leaf])
    return found


class ResidentName(NamedTuple):
    """Identifies a resident array: ``what`` is kept, for the variable of which key (0:
    none), for the outer optimizer of which id."""

    what: str
    variable: int
    optimizer: int


# Asked for each array of each window.
@functools.lru_cache(1 << 14)
def resident_name(name: str) -> ResidentName:
    """Returns the identity of the resident array whose `VariableSpec` has this name."""
    # As `ResidentArrays._at` writes it; the rest is for people.
    what, variable, optimizer, _ = name.split(" ", 3)
    return ResidentName(what, int(variable), int(optimizer))


class _KeptByWorkers(UnboundStorage):
    """The storage of resident arrays in a window that is called in this process instead
    of scheduled; it refuses."""

    def refusal(self, variable: VariableHandle, what: str) -> RuntimeError:
        return RuntimeError(
            f"{variable.spec} is kept by each worker, but this window was called "
            "outside of one: schedule it, coordinator.schedule(window, args=...)"
        )


_NOWHERE: Final = _KeptByWorkers()


class ResidentArrays:
    """The resident arrays of one optimizer in one trace of a window.

    Args:
        optimizer: Id of the outer optimizer.
        name: Name of the optimizer, for messages.
    """

    def __init__(self, optimizer: int, name: str, outer: Capture) -> None:
        self._optimizer, self._name, self._outer = optimizer, name, outer

    def read(
        self, variable: VariableHandle, what: str, shape: Sequence[int], dtype: Any
    ) -> jax.Array:
        """Reads the array ``what`` that the worker keeps for a variable."""
        return self._outer.read(self._at(variable, what, shape, dtype))

    def round(self) -> jax.Array:
        """Reads the number of the round whose values the window has read, int32."""
        return self._outer.read(self._at(None, ROUND, (), "int32"))

    def speed(self) -> jax.Array:
        """Reads the steps per second of this worker, float32; 0 if not known."""
        return self._outer.read(self._at(None, SPEED, (), "float32"))

    def keep(
        self, variable: VariableHandle | None, what: str, array: jax.Array
    ) -> None:
        """Keeps an array ``what`` for the next closure. ``variable`` None: the array
        belongs to no variable."""
        to = self._at(variable, what, array.shape, array.dtype)
        self._outer.update(VariableUpdate(to, UpdateOp.ASSIGN, (array,), None))

    def _at(
        self,
        variable: VariableHandle | None,
        what: str,
        shape: Sequence[int],
        dtype: Any,
    ) -> VariableHandle:
        what = what.replace(" ", "_")
        place = 0 if variable is None else variable.spec.key
        # A digest: each trace has to find the same key, on whatever worker.
        words = f"{what} {place} {self._optimizer}"
        digest = hashlib.blake2b(words.encode(), digest_size=7).digest()
        key = -(1 << 60) - int.from_bytes(digest, "big")
        name = f"{words} {self._name}"
        if variable is not None:
            name = f"{name}/{variable.name}"
        return handle(
            VariableSpec(key, name, tuple(shape), str(dtype), RESIDENT), _NOWHERE
        )


_LOOPS: Final = frozenset({"scan", "while"})


@final
class OverlappedProgram(CompiledProgram):
    """The program of a window with ``overlap``.

    Args:
        closed: The whole program, from inputs, leaves of elements and values of reads
            to results and operands.
        late: The numbers of the inputs that are pulled.
    """

    __slots__ = ("_early", "_head", "_tail", "has_loop")

    def __init__(
        self, plan: Plan, body: TracedBody, closed: ClosedJaxpr, late: frozenset[int]
    ) -> None:
        super().__init__(plan, body)
        jaxpr: Any = closed.jaxpr
        # All that depends on a pulled value, directly or not.
        after = {jaxpr.invars[number] for number in late}
        first: list[Any] = []
        rest: list[Any] = []
        # One pass is enough, as equations come after what they use.
        for eqn in jaxpr.eqns:
            waits = any(not isinstance(x, Literal) and x in after for x in eqn.invars)
            (rest if waits else first).append(eqn)
            if waits:
                after.update(eqn.outvars)
        self.has_loop: Final = any(eqn.primitive.name in _LOOPS for eqn in first)
        """Whether the head contains steps, so that beginning early saves time."""
        early_results = {var for eqn in first for var in eqn.outvars}
        # What the tail needs of the head goes from one program to the other as
        # arguments.
        used = [*[x for eqn in rest for x in eqn.invars], *jaxpr.outvars]
        variables = dict.fromkeys(x for x in used if not isinstance(x, Literal))
        given = [x for x in variables if x in early_results]
        self._early = [n for n in range(len(jaxpr.invars)) if n not in late]
        early = [jaxpr.invars[number] for number in self._early]
        head = jaxpr.replace(invars=early, outvars=given, eqns=first)
        tail = jaxpr.replace(invars=[*given, *jaxpr.invars], eqns=rest)
        inputs = set(jaxpr.invars)
        is_input = [not isinstance(x, Literal) and x in inputs for x in jaxpr.outvars]
        run = jaxpr_as_fun(ClosedJaxpr(tail, closed.consts))

        def tailed(*values: Any) -> list[Any]:
            # Outputs share no memory with inputs.
            outputs = zip(run(*values), is_input, strict=True)
            return [jnp.copy(x) if is_given else x for x, is_given in outputs]

        self._head = jax.jit(jaxpr_as_fun(ClosedJaxpr(head, closed.consts)))
        self._tail = jax.jit(tailed)

    def begin(
        self, inputs: Sequence[Any], elements: Sequence[Any], values: Sequence[Any]
    ) -> list[jax.Array]:
        """Computes the head; does not use those of ``values`` that are pulled."""
        given = [*inputs, *elements, *values]
        return list(self._head(*[given[number] for number in self._early]))

    def finish(
        self,
        begun: Sequence[jax.Array],
        inputs: Sequence[Any],
        elements: Sequence[Any],
        values: Sequence[Any],
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        """Computes the tail from the results of the head; returns the arrays of the
        result, and the operands of each update."""
        outputs = list(self._tail(*begun, *inputs, *elements, *values))
        settled(outputs, outputs)
        count = len(self.plan.out_specs)
        left = iter(outputs[count:])
        operands = [[next(left) for _ in x.operands] for x in self.plan.updates]
        return outputs[:count], operands

    def __call__(
        self, inputs: list[Any], elements: list[Any], values: list[Any]
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        begun = self.begin(inputs, elements, values)
        return self.finish(begun, inputs, elements, values)


def program_of_window(
    plan: Plan, body: TracedBody, call: CutCall, elements: Sequence[Element]
) -> CompiledProgram:
    """Returns the program of a window; in two parts (`OverlappedProgram`) if some of
    its steps do not need pulled values."""
    closed = retraced(plan, body, call, elements)
    first = len(closed.in_avals) - len(plan.reads)
    late = {n for n, spec in enumerate(plan.reads, first) if spec.ps != RESIDENT}
    if closed.effects:  # whose order would change
        return CompiledProgram(plan, body)
    # Two programs cost more than one, so only if the head has steps to run meanwhile.
    program = OverlappedProgram(plan, body, closed, frozenset(late))
    return program if program.has_loop else CompiledProgram(plan, body)
