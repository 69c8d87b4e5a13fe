"""The signature of a trace: the arguments of a call, and the contexts around it.

Arguments are split into inputs of a program and the key of the program.

- Arrays and Python ints, floats and complexes are *inputs*: their values differ from
  call to call, their types are part of the key. Python numbers are weakly typed, as in
  jax.
- Booleans, strings and other hashable values are *static*: each value has a separate
  program, and the body may branch on it.
- A number in a `Plain` is static, too: ``strategy.run`` outside of a step passes Python
  numbers unchanged.
- Variables and optimizers are identified by their id in the session; the element types
  of iterators are found when elements are drawn.

This runs for every scheduled step, so it is one pass without allocation per type.

The worker sets `worker_context` around every step and dataset function. A step that
asks for it is traced again when the answer changes (at a second attempt, say), because
the answer is a Python value of the trace. The strategy context of the caller is part of
the key of every program (`StrategyFingerprint`), because `strategy.run` and others
depend on it.

`jax.jit`, `lax.scan` and the like cache the jaxpr of a Python function by the identity
of the function and the types of its arguments. A function that reads a variable closes
over a traced value, which is not in that key: in another trace of the step, or after an
update in the same one, the cached jaxpr would have the old value. A jax user context is
part of those keys, so each trace of a step, and each update in one, runs under its own
number (`fresh`). Replicas that run sequentially share one trace, or have none: they
have a second user context.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state
from jax.tree_util import keystr

from zstrat.variables import (
    AbstractVariable,
    Optimizer,
    Variable,
    is_weak,
    require_unmasked,
)

from . import _refusals, joined
from ._iterator import Element, StepIterator

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from .joined import TreeDef


# Both made when the module is imported: jax forbids it while other threads use jax.
_epoch: Final[Any] = jax.make_user_context(0)  # type: ignore[no-untyped-call]
_replica: Final[Any] = jax.make_user_context(None)  # type: ignore[no-untyped-call]
_numbers: Final = itertools.count(1)


def fresh() -> AbstractContextManager[None]:
    """Hides jax's cached inner traces inside of the block.

    Costs a retrace of every inner function, and outside of a trace a compilation of
    every operation: use it in traces only.
    """
    return cast("AbstractContextManager[None]", _epoch(next(_numbers)))


def apart(name: Hashable) -> AbstractContextManager[None]:
    """Hides jax's cached inner traces of other names inside of the block."""
    return cast("AbstractContextManager[None]", _epoch(name))


def as_replica(number: int, count: int) -> AbstractContextManager[None]:
    """Hides jax's cached inner traces of other replicas inside of the block: a function
    that jax has traced may have asked for the number of its replica."""
    return cast("AbstractContextManager[None]", _replica((number, count)))


def current_trace() -> object:
    """Returns an opaque object that identifies jax's innermost transformation, for
    comparison."""
    state: object = get_opaque_trace_state()  # type: ignore[no-untyped-call]
    return state


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The worker that runs a step or dataset function.

    ``worker_index`` is in ``[0, worker_count)``; ``worker_count`` is the number of
    workers when this one joined. ``attempt`` is 1 at the first run of a closure, and
    grows by one with each worker that was lost while it ran the closure.
    """

    worker_index: int
    worker_count: int
    attempt: int = 1


worker_context: Final[ContextVar[WorkerContext | None]] = ContextVar(
    "zstrat_worker_context", default=None
)
"""The worker that runs the present step or dataset function. Set by the worker. Law:
code that sets a context variable resets it."""

building: Final[ContextVar[bool]] = ContextVar("zstrat_building", default=False)
"""Whether a worker builds a dataset now. A call of a step function then runs its plain
body, which may return datasets."""

input_pipeline: Final[ContextVar[tuple[int, int] | None]] = ContextVar(
    "zstrat_input_pipeline", default=None
)
"""Index of the input pipeline for which a worker builds a dataset, and number of
pipelines; None: those of the worker's context."""

asked: Final[ContextVar[Callable[[], None] | None]] = ContextVar(
    "zstrat_worker_context_asked", default=None
)
"""Called when a trace asks for the worker's context, so that no other context uses the
plan."""

strategy_fingerprint: Final[ContextVar[StrategyFingerprint | None]] = ContextVar(
    "zstrat_strategy_fingerprint", default=None
)
"""The fingerprint of the innermost strategy context; None outside of all contexts. The
code that enters or leaves a context sets it."""

_default_fingerprint: StrategyFingerprint | None = None


@dataclass(frozen=True, slots=True)
class StrategyFingerprint:
    """The properties of a strategy that a body can observe; bodies with equal
    fingerprints can share a program.

    Programs reference the ``strategy`` weakly; ``side`` says where the code runs: in
    which replica or outside of the replicas, and in the update of which copy.
    """

    strategy: weakref.ref[object]
    side: Hashable


def set_default_fingerprint(fingerprint: StrategyFingerprint | None) -> None:
    """Sets the fingerprint for code that has entered no strategy context."""
    global _default_fingerprint
    _default_fingerprint = fingerprint


def current_fingerprint() -> StrategyFingerprint | None:
    """Returns the fingerprint of the present strategy context."""
    fingerprint = strategy_fingerprint.get()
    return _default_fingerprint if fingerprint is None else fingerprint


tracing_again: Final = ContextVar("zstrat tracing again", default=False)
"""Whether a body is traced a second time for the same program, so that its prints have
appeared already."""


@contextmanager
def printed_before() -> Iterator[None]:
    """Marks the code inside of the block as a second trace of a body."""
    before = tracing_again.set(True)
    try:
        yield
    finally:
        tracing_again.reset(before)


ABSTRACT: Final = WorkerContext(worker_index=0, worker_count=1)
"""The worker context while a coordinator traces a step only to learn its shapes."""


def get_worker_context() -> WorkerContext:
    """Returns the worker that runs this step or dataset function.

    While the coordinator traces a step to learn the shapes of its results, this is
    worker 0 of 1: a shape must not depend on it.

    Raises:
        RuntimeError: Called outside of a step function or a dataset function.
    """
    return _asked("get_worker_context")


def get_current_worker_index() -> int:
    """Returns the index of the worker that runs this step or dataset function, from 0.

    The same as ``get_worker_context().worker_index``; TF's name.

    Raises:
        RuntimeError: Called outside of a step function or a dataset function.
    """
    return _asked("get_current_worker_index").worker_index


def _asked(name: str) -> WorkerContext:
    context = worker_context.get()
    tell = asked.get()
    # A trace asks: its plan holds for this answer alone.
    if tell is not None:
        tell()
        return ABSTRACT if context is None else context
    if context is None:
        raise RuntimeError(
            f"{name}() is called outside of a worker: call it in the body of a "
            "zs.function or dataset function that a coordinator schedules"
        )
    return context


_NUMBERS: Final = frozenset((int, float, complex))
_Tracer: Final = jax.core.Tracer


class Plain:
    """A Python number that is static in a step: each value of it has a separate
    trace."""

    __slots__ = ("_key", "value")

    def __init__(self, value: complex) -> None:
        self.value = value
        # By its text: 0.0 equals -0.0, but they need two programs; nan must equal
        # itself.
        self._key = type(value), repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.value)


class CutCall(NamedTuple):
    """The arguments of one call, split into inputs and key.

    ``key`` consists of ``treedef``, a fingerprint per leaf, settings of jax, and the
    strategy context of the call. ``inputs`` are the leaves that a program takes,
    ``iterators`` the distinct iterators, both in order; ``leaves`` are all leaves.
    """

    key: Hashable
    treedef: TreeDef
    leaves: list[Any]
    inputs: list[Any]
    iterators: list[StepIterator]


_NO_ARGUMENTS: Final = jax.tree.structure(((), {}))
_bare_calls: Final[dict[Hashable, CutCall]] = {}

_SETTINGS: Final = ("jax_enable_x64", "jax_default_prng_impl")
"""Settings of jax that programs depend on: types, and random numbers. (jax keeps
settings per thread; reading more of them would slow down each call.)"""

_settings: Final = operator.attrgetter(*_SETTINGS)


def cut(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CutCall:
    """Splits the arguments of a call into inputs and key.

    Raises:
        TypeError: An argument is neither a pytree of arrays nor hashable, or is traced
            by jax.
        ValueError: An argument is a masked array.
    """
    fingerprint = current_fingerprint()
    settings = _settings(jax.config)
    # Nothing to flatten and to compare, and the same object each time.
    if not args and not kwargs and fingerprint is None:
        return _bare(settings)
    # A value per replica is one leaf, as it is one array of the program.
    leaves, treedef = joined.flatten((args, kwargs))
    inputs: list[Any] = []
    iterators: list[StepIterator] = []
    fingerprints: list[Any] = []
    for leaf in leaves:
        kind = type(leaf)
        # By exact type first, which is fastest: this runs at each call of a step.
        if kind is np.ndarray:
            fingerprints.append((leaf.shape, leaf.dtype))
            inputs.append(leaf)
        elif kind in _NUMBERS:
            fingerprints.append(kind)
            inputs.append(leaf)
        elif isinstance(leaf, jax.Array):
            if isinstance(leaf, _Tracer):
                raise _traced(leaf, args, kwargs)
            # Weak types promote differently, so they need another program.
            fingerprints.append((leaf.shape, leaf.dtype, is_weak(leaf)))
            inputs.append(leaf)
        elif isinstance(leaf, np.ndarray):  # a matrix, a mapped file: jax accepts them
            array = leaves[len(fingerprints)] = _plain(leaf, args, kwargs)
            fingerprints.append((array.shape, array.dtype))
            inputs.append(array)
        elif isinstance(leaf, np.generic):
            fingerprints.append((leaf.shape, leaf.dtype))
            inputs.append(leaf)
        elif isinstance(leaf, StepIterator):
            fingerprints.append(_iterator_fingerprint(leaf, iterators))
        elif isinstance(leaf, Variable):
            # Each variable has a program of its own, unless `_alike` finds that they
            # can share.
            fingerprints.append(leaf.spec)
        elif isinstance(leaf, AbstractVariable):
            fingerprints.append((kind, *[part.spec for part in leaf.components]))
        elif isinstance(leaf, Optimizer):
            fingerprints.append((Optimizer, leaf.id))
        else:
            fingerprints.append((kind, leaf))
    key = (treedef, tuple(fingerprints), settings, fingerprint)
    # Here, where the argument can still be named.
    try:
        hash(key)
    except TypeError:
        _refuse_unhashable(args, kwargs)
        raise
    return CutCall(key, treedef, leaves, inputs, iterators)


def _bare(settings: Hashable) -> CutCall:
    """Returns the `CutCall` of a call without arguments, the same object each time."""
    call = _bare_calls.get(settings)
    if call is None:
        key = (_NO_ARGUMENTS, (), settings, None)
        call = _bare_calls[settings] = CutCall(key, _NO_ARGUMENTS, [], [], [])
    return call


_UNKNOWN_TO_JAX: Final = (np.void, np.longdouble, np.clongdouble)
"""dtypes that jax does not have: records, and floats of more than 64 bits."""


def require_traceable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses hashable objects that cannot be arguments of a step. Called once per
    trace.

    Raises:
        TypeError: An argument is such an object; names it.
    """
    for place, leaf in places(args, kwargs):
        if isinstance(leaf, Iterator) and not isinstance(leaf, StepIterator):
            raise TypeError(
                f"{place} is an iterator ({type(leaf).__name__}) that a step cannot "
                "draw from here: one of a per-worker dataset is for "
                "coordinator.schedule(step, args=(iterator,)); for a step of this "
                "process write zs.StepIterator(iterator)"
            )
        if isinstance(leaf, np.ndarray | np.generic) and (
            leaf.dtype.kind in "OSUmM" or issubclass(leaf.dtype.type, _UNKNOWN_TO_JAX)
        ):
            raise TypeError(
                f"{place} is an array of dtype {leaf.dtype}, which jax cannot compute "
                "with: a step takes arrays of numbers or booleans"
            )
        if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.isnative:
            native = leaf.dtype.newbyteorder("=")
            raise TypeError(
                f"{place} is an array of dtype {leaf.dtype.str}, whose byte order is "
                "not that of this machine, and jax does not accept it: write "
                f".astype({native.name!r})"
            )


def describe(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], elements: Sequence[Element]
) -> dict[str, str]:
    """Describes the types in the key of a program, by path of the argument, for
    messages."""
    words = {place: _words(leaf) for place, leaf in places(args, kwargs)}
    words |= zip(_SETTINGS, map(str, _settings(jax.config)), strict=True)
    for number, element in enumerate(elements):
        paths, _ = joined.flatten_with_path(element.treedef.unflatten(element.leaves))
        for path, leaf in paths:
            words[f"element {number}{keystr(path)}"] = _words(leaf)
    return words


def plain_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, type]:
    """Returns the types of static Python numbers among the arguments, by path."""
    return {
        place: type(leaf.value)
        for place, leaf in places(args, kwargs)
        if isinstance(leaf, Plain)
    }


def _iterator_fingerprint(
    leaf: StepIterator, iterators: list[StepIterator]
) -> Hashable:
    # If two arguments are one iterator, the program draws twice from that: it is in the
    # key.
    for ordinal, known in enumerate(iterators):
        if known is leaf:
            return (StepIterator, ordinal)
    iterators.append(leaf)
    spec = Element(leaf.element_spec).key if leaf.is_abstract else None
    return (StepIterator, len(iterators) - 1, spec)


def _plain(
    leaf: np.ndarray, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> np.ndarray:
    """Converts an array of a subclass of numpy's to a plain one.

    Raises:
        ValueError: The array has a mask; names the argument.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        place = next(place for place, other in places(args, kwargs) if other is leaf)
        require_unmasked(leaf, place)
    return np.asarray(leaf)


def _traced(
    leaf: jax.Array, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TypeError:
    place = next(place for place, other in places(args, kwargs) if other is leaf)
    return _refusals.step_inside(
        f"{place} is being traced by jax: a step function is called"
    )


def _refuse_unhashable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for place, leaf in places(args, kwargs):
        try:
            hash(leaf)
        except TypeError:
            if isinstance(leaf, np.ndarray | jax.Array):
                continue
            raise TypeError(
                f"{place} is a {type(leaf).__name__}, which is neither an array nor "
                "hashable: pass arrays, numbers, strings and pytrees of them, or "
                "register the class as a pytree (jax.tree_util.register_dataclass)"
            ) from None


def places(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the leaves of arguments, each with its path for messages."""
    leaves = []
    for root, tree in (("args", args), ("kwargs", dict(kwargs))):
        for path, leaf in joined.flatten_with_path(tree)[0]:
            leaves.append((f"{root}{keystr(path)}", leaf))
    return leaves


def _words(leaf: Any) -> str:
    if isinstance(leaf, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
        return f"{leaf.dtype}{list(leaf.shape)}"
    if isinstance(leaf, StepIterator):
        return "an iterator"
    if isinstance(leaf, Variable):
        return str(leaf.spec)
    if isinstance(leaf, AbstractVariable):
        return str(leaf.table)
    if type(leaf) in _NUMBERS:
        return f"a Python {type(leaf).__name__}"
    if isinstance(leaf, Plain):
        return f"{leaf!r:.60}"
    return f"{type(leaf).__name__} {leaf!r:.60}"
