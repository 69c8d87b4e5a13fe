"""`CallTable`: the traced and pickled calls of a coordinator.

A call is traced and pickled once; scheduling it again costs a look-up. Two calls are
the same if their function and arguments are. Plain arguments are compared by *value*,
handles (variables, per-worker iterators) by their number, and arrays by dtype and
shape, as each closure has their bytes. Other objects, and arrays in them, may change at
any time: they are pickled by each `schedule`, so that a closure sees them as they were
then. If they give the same bytes as before, the earlier pickle is used: a worker that
unpickled it again would trace the step again, as objects may compare by identity.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, OrderedDict, deque
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import jax
import numpy as np

from zstrat.program import (
    CarriedValues,
    Function,
    Resource,
    StepIterator,
    bytes_of_inputs,
    cut_inputs,
    digest,
    dump,
    dump_code,
    input_key,
    jax_settings,
    loses_bits,
    window_of,
)
from zstrat.program.trace import joined
from zstrat.variables import LOCAL, AbstractVariable, Variable, read_all, recorder

from ._placeholders import in_step
from ._values import Claim, DatasetHandle, PerWorker, RemoteValue, Result, StandIn
from .leases import Draw

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from zstrat.program import Plan
    from zstrat.variables import VariableHandle

CACHED_CALLS: Final = 1024
"""Argument lists that are remembered for each function."""

SAME_BYTES: Final = 16
"""Pickled argument lists that are kept for each function, here and on the workers, to
be used again for arguments with the same bytes."""

_recording: Final = recorder.get


class TracingStrategy(Protocol):
    """The part of a `CoordinatedStrategy` that tracing a step uses."""

    def scope(self) -> AbstractContextManager[object]: ...

    def require_known(self, plan: Plan) -> None: ...


class Code:
    """A pickled function or dataset, named by its digest.

    Args:
        classes: Classes of the program that are pickled with it, kept alive here.
    """

    __slots__ = ("classes", "code", "digest")

    def __init__(self, code: bytes, classes: Sequence[type] = ()) -> None:
        self.code, self.digest, self.classes = code, digest(code), classes

    @classmethod
    def of(cls, obj: object) -> Code:
        """Pickles a function or dataset.

        Raises:
            Exception: ``obj`` cannot be pickled.
        """
        classes: list[type] = []
        return cls(dump_code(obj, classes=classes), classes)


class PickledArguments:
    """Pickled ``(args, kwargs)`` with a number. When neither a closure nor the cache
    needs them, the number is retired, and the workers drop them."""

    __slots__ = ("__weakref__", "arrays", "code", "number")
    _numbers = itertools.count(1)

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.number = next(self._numbers)
        self.code, arrays = dump((args, dict(kwargs)))
        # Copies, as they are sent after schedule() has returned.
        self.arrays = tuple(array.copy() for array in arrays)

    @property
    def nbytes(self) -> int:
        """Size of the pickled arguments in bytes."""
        return len(self.code) + sum(array.nbytes for array in self.arrays)

    def retire_to(self, retired: deque[int]) -> None:
        """Appends the number of these arguments to ``retired`` when this object is
        collected."""
        # deque.append takes no lock: a finalizer may run while this thread holds any.
        weakref.finalize(self, retired.append, self.number).atexit = False


class ScheduledCall:
    """A function with arguments, for any number of closures.

    Holds its per-worker resources weakly: calls are cached, and must not keep alive
    what the user dropped. Each closure holds them.

    Args:
        resources: The resources among the arguments.
        captured: Resources that the trace used without getting them as arguments, as an
            object holds them.
        held: Resources that an object holds and an untraced step may use.
        draws: How many batches of leased datasets a step draws.

    ``nbytes`` is the memory of arguments that only one closure uses.
    """

    __slots__ = (
        "_claims",
        "arguments",
        "captured",
        "draws",
        "function",
        "nbytes",
        "resources",
        "result",
    )

    def __init__(
        self,
        result: Result,
        function: Code,
        arguments: PickledArguments | None,
        resources: Sequence[PerWorker],
        captured: Sequence[PerWorker] = (),
        held: Sequence[PerWorker] = (),
        draws: Sequence[Draw] = (),
    ) -> None:
        self.result, self.function, self.arguments = result, function, arguments
        self.draws = draws
        self.nbytes = 0
        needed = (*resources, *captured)
        self.resources = tuple(resource.resource for resource in needed)
        self._claims = tuple(weakref.ref(each.claim) for each in (*needed, *held))
        self.captured = self._claims[len(resources) :]
        """Weak references to the claims on captured resources; dead if the user dropped
        the resource."""

    def claims(self) -> tuple[Claim | None, ...]:
        """Returns the claims that a closure holds to keep its resources."""
        return tuple([claim() for claim in self._claims]) if self._claims else ()


class _KnownFunction:
    """A function that was scheduled before, with its pickled code and its cached calls.
    Holds the function weakly."""

    __slots__ = ("_held", "calls", "code", "pickled", "reference", "settings")

    def __init__(
        self,
        function: Function,
        strategy: TracingStrategy,
        forget: Callable[[Any], None],
    ) -> None:
        self.reference: weakref.ref[Function] = weakref.ref(function, forget)
        held: list[Resource] = []
        self.settings = jax_settings()
        self.code = Code(dump_code(function.within(strategy), held))
        self._held = tuple(weakref.ref(resource) for resource in held)
        self.calls: OrderedDict[Hashable, ScheduledCall] = OrderedDict()
        self.pickled: OrderedDict[bytes, PickledArguments] = OrderedDict()

    def remember(self, key: Hashable, call: ScheduledCall) -> None:
        """Caches a call, so that `CallTable.find` finds it."""
        self.calls[key] = call
        if len(self.calls) > CACHED_CALLS:
            self.calls.popitem(last=False)

    @property
    def held(self) -> list[PerWorker]:
        """The resources on workers that were pickled inside this function, without
        those that the user has dropped since: a worker that uses a dropped one raises
        an error."""
        resources = [reference() for reference in self._held]
        return [each for each in resources if isinstance(each, PerWorker)]

    def shares(self, arguments: PickledArguments) -> bool:
        """Returns whether these arguments are cached, so that other closures may use
        them."""
        return self.pickled.get(arguments.code) is arguments

    def same(self, arguments: PickledArguments) -> PickledArguments:
        """Returns cached arguments with the same bytes, or else adds ``arguments`` to
        the cache and returns them."""
        # Taken out and put back, as the most recent: the oldest one goes first.
        known = self.pickled.pop(arguments.code, arguments)
        self.pickled[arguments.code] = known
        if len(self.pickled) > SAME_BYTES:
            self.pickled.popitem(last=False)
        return known


class CallTable:
    """Traces and pickles calls of step functions, and caches them.

    Args:
        strategy: Each trace, here and on workers, runs in its scope, so that variables
            that a trace creates are placed by the strategy.
        retired: Gets the numbers of arguments that are no longer needed.
    """

    def __init__(self, strategy: TracingStrategy, retired: deque[int]) -> None:
        self._strategy, self._retired = strategy, retired
        self._known: dict[int, _KnownFunction] = {}

    def find(
        self,
        function: object,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> tuple[ScheduledCall, bytes] | None:
        """Looks a call up in the cache, in microseconds; returns the call with the
        bytes of its array inputs. None if the call is not cached, or if a step is being
        traced, which `make` refuses."""
        known = self._known.get(id(function))
        if (
            known is None
            or known.reference() is not function
            or known.settings != jax_settings()
            # `make` raises then: a step must not schedule steps.
            or _recording() is not None
        ):
            return None
        inputs: list[Any] = []
        try:
            call = known.calls.get(_key_of(args, kwargs, inputs))
        except _NoKeyError:
            return None
        if call is None or (inputs and any(map(loses_bits, inputs))):
            return None  # the trace warns of values that jax truncates
        # `make` says which iterator was dropped.
        if call.captured and any(claim() is None for claim in call.captured):
            return None
        return call, bytes_of_inputs(inputs) if inputs else b""

    def make(
        self,
        function: object,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> tuple[ScheduledCall, bytes]:
        """Checks, traces and pickles a call.

        Returns:
            The call, and the bytes of its array inputs; b"" if its arrays are pickled
            with the other arguments.

        Raises:
            TypeError: ``function`` is not a `zstrat.function`.
            ValueError: A `RemoteValue` is among the arguments, or the function updates
                variables of this process.
            RuntimeError: An iterator that the function captured was dropped, or a step
                is being traced.
            NotFoundError: The function uses variables of another session.
            ClosedError: A per-worker resource belongs to a coordinator whose cluster a
                newer strategy took over.
            Exception: Tracing or pickling failed.
        """
        if _recording() is not None:
            raise RuntimeError(in_step("coordinator.schedule"))
        function = _checked(function)
        if not isinstance(args, tuple | list | None):
            raise TypeError(
                "schedule: expected args= to be a tuple of arguments, as args=(x,); "
                f"got {type(args).__name__}"
            )
        positional, named = tuple(args or ()), dict(kwargs or {})
        resources = _resources((positional, named))
        for resource in resources:
            # Before tracing, which would wait for a worker to build it.
            resource.require_kept()
        traced = self._trace(function, positional, named)
        result = Result(function.name, traced.treedef)
        known = self._know(function)
        key, inputs = None, b""
        # Carried variables have other values the next time.
        if traced.carried:
            positional = (_values_of(traced.carried), *positional)
        elif function.eager or result.treedef is not None:
            # Not if the structure of the result is unknown: the next call is traced
            # then.
            key, inputs = _key_and_inputs(args, kwargs)
        if inputs:
            # Their bytes travel with each closure, so that calls with other values
            # share these arguments.
            positional, named = cut_inputs((positional, named), [0])
        arguments = self._pickled(function, known, positional, named)
        held = known.held if result.treedef is None else ()
        draws = traced.draws
        if result.treedef is None:  # an eager step draws one batch of each
            found = (*resources, *held)
            leased = {each.resource for each in found if each.is_leased}
            draws = [Draw(resource, 1) for resource in sorted(leased)]
        call = ScheduledCall(
            result, known.code, arguments, resources, traced.captured, held, draws
        )
        if key is not None:
            known.remember(key, call)
        elif arguments is not None and not known.shares(arguments):
            call.nbytes = arguments.nbytes
        return call, inputs

    @property
    def traces(self) -> int:
        """Number of traces in this process of functions that still exist. Callable from
        any thread."""
        # A copy: other threads schedule meanwhile.
        known = [each.reference() for each in list(self._known.values())]
        return sum(function.trace_count for function in known if function is not None)

    def forget(self) -> None:
        """Forgets all functions and their cached calls."""
        self._known.clear()

    def _trace(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _TracedCall:
        """Traces a call. Returns an empty result for an eager function, and for a call
        with a resource that no worker could build; a later call is traced once a worker
        has built it."""
        if function.eager:
            return _TracedCall()
        stand_ins: dict[int, object] = {}
        for resource in _per_worker((args, kwargs)):
            stand_ins[resource.resource] = stand_in = resource._stand_in()
            if stand_in is None:
                # All workers failed to build it; the closure raises the error.
                return _TracedCall()
        # A trace has placeholders for what is on the workers; all else is as the user
        # gave it.
        args, kwargs = jax.tree.map(
            lambda leaf: (
                stand_ins[leaf.resource] if isinstance(leaf, PerWorker) else leaf
            ),
            (args, kwargs),
            is_leaf=lambda leaf: isinstance(leaf, Resource),
        )
        # In a separate context, which ends in C: Ctrl-C cannot leave the caller in
        # this scope, or in the middle of a trace.
        plan = copy_context().run(self._plan, function, args, kwargs)
        plan.require_shared()
        self._strategy.require_known(plan)
        carried = [v for v in plan.variables if v.spec.ps == LOCAL]
        captured, treedef = _captured(plan), plan.out_structure.treedef
        draws = _draws(plan, args, kwargs)
        if draws and (exchanges := window_of(function)) is not None:
            exchanges.require_equal_draws(function.name)
        return _TracedCall(treedef, captured, carried, draws)

    def _plan(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan:
        with self._strategy.scope():
            return function.plan(args, kwargs)

    def _pickled(
        self,
        function: Function,
        known: _KnownFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> PickledArguments | None:
        if not args and not kwargs:
            return None
        pickled = arguments = PickledArguments(args, kwargs)
        # An eager step may change its arguments, so each closure has its own.
        arrays = np.ndarray | np.generic | jax.Array
        has_arrays = any(isinstance(leaf, arrays) for leaf in _leaves((args, kwargs)))
        if not function.eager and not has_arrays:
            arguments = known.same(pickled)
        if arguments is pickled:
            arguments.retire_to(self._retired)
        return arguments

    def _know(self, function: Function) -> _KnownFunction:
        number = id(function)
        known = self._known.get(number)
        if (
            known is None
            or known.reference() is not function
            or known.settings != jax_settings()
        ):
            table = self._known
            known = _KnownFunction(
                function, self._strategy, partial(_pop, table, number)
            )
            table[number] = known
        return known


class _TracedCall(NamedTuple):
    """The outcome of tracing a call: the treedef of its result (None: unknown), the
    resources that it captured, the variables of this process that it reads, and how
    many batches it draws from leased datasets."""

    treedef: Any = None
    captured: Sequence[PerWorker] = ()
    carried: Sequence[VariableHandle] = ()
    draws: Sequence[Draw] = ()


def _values_of(variables: Sequence[VariableHandle]) -> CarriedValues:
    values = tuple(np.asarray(value) for value in read_all(variables))
    return CarriedValues(tuple(v.spec.key for v in variables), values)


def _captured(plan: Plan) -> list[PerWorker]:
    """Returns the handles of iterators that the step reads without getting them as
    arguments."""
    handles = []
    for iterator in plan.captured:
        assert isinstance(iterator, StandIn), iterator.name
        if (handle := iterator.handle()) is None:
            raise RuntimeError(
                f"the step function {plan.function!r} reads an iterator of "
                f"{iterator.name} that an object held when the step was first "
                "scheduled, and that was dropped since: a step captures iterators "
                "once. Pass the iterator as an argument, args=(iterator,)"
            )
        handles.append(handle)
    return handles


def _draws(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Draw]:
    """Returns how many batches of each leased dataset a step draws."""
    # In the order of `Plan.draws`: a call has each stand-in once, however often it is
    # an argument.
    leaves, _ = joined.flatten((args, kwargs))
    given = {id(leaf): leaf for leaf in leaves if isinstance(leaf, StepIterator)}
    iterators = [*given.values(), *plan.captured]
    counts = Counter(plan.draws)
    drawn = [(iterators[number], counts[number]) for number in sorted(counts)]
    return [
        Draw(handle.resource, count)
        for iterator, count in drawn
        if isinstance(iterator, StandIn)
        and (handle := iterator.handle()) is not None
        and handle.is_leased
    ]


class _NoKeyError(Exception):
    """Raised when an argument cannot be compared by value."""


_PLAIN: Final = frozenset({type(None), bool, int, str, bytes})


def _key_and_inputs(
    args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[Hashable | None, bytes]:
    inputs: list[Any] = []
    try:
        key = _key_of(args, kwargs, inputs)
    except _NoKeyError:
        return None, b""
    return key, bytes_of_inputs(inputs)


def _key_of(
    args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, inputs: list[Any]
) -> Hashable:
    """Returns a key that equal calls share, and appends the call's array inputs to
    ``inputs``."""
    if not isinstance(args, tuple | list | None):
        raise _NoKeyError
    if not kwargs:
        return tuple([_key(arg, inputs) for arg in args]) if args else ()
    return _key(tuple(args or ()), inputs), _key(dict(kwargs), inputs)


def _key(value: Any, inputs: list[Any]) -> Hashable:
    kind = type(value)
    if isinstance(value, PerWorker):
        return kind, value.resource
    if kind in _PLAIN:
        return kind, value  # the type too, because 1 == 1.0 == True
    if kind is float:
        return kind, value.hex()  # distinguishes 0.0 from -0.0, and finds nan again
    if kind is tuple or kind is list:
        return kind, tuple([_key(item, inputs) for item in value])
    if kind is dict:
        items = value.items()
        return kind, tuple([(_name(name), _key(item, inputs)) for name, item in items])
    if isinstance(value, Variable):
        return kind, value.spec.key
    if isinstance(value, AbstractVariable):
        return kind, tuple([part.spec.key for part in value.components])
    if (key := input_key(value)) is not None:
        inputs.append(value)
        return key
    raise _NoKeyError


def _name(value: Any) -> Hashable:
    """Returns the cache key for a key of a dict argument.

    Raises:
        _NoKeyError: The dict's key is an array, or cannot be compared by value.
    """
    inputs: list[Any] = []
    key = _key(value, inputs)
    if inputs:
        raise _NoKeyError
    return key


def _checked(function: object) -> Function:
    if isinstance(function, Function):
        return function
    raise TypeError(
        "`ClusterCoordinator.schedule` only accepts a `zstrat.function`; got "
        f"{function!r:.200} of type {type(function).__name__}. Decorate it with "
        "@zs.function, or call zs.function(fn) once and schedule the result"
    )


def _leaves(tree: Any) -> list[Any]:
    kinds = (Resource, RemoteValue, DatasetHandle)
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, kinds))


def _per_worker(tree: Any) -> list[PerWorker]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, PerWorker)]


def _resources(tree: Any) -> list[PerWorker]:
    for leaf in _leaves(tree):
        if isinstance(leaf, RemoteValue):
            raise ValueError(
                "a RemoteValue is among the arguments; pass `value.fetch()`, or "
                "compute both in one function"
            )
        if isinstance(leaf, DatasetHandle):
            leaf.refuse()
    return list({leaf.resource: leaf for leaf in _per_worker(tree)}.values())


def _pop(table: dict[int, _KnownFunction], number: int, _: object) -> None:
    """Removes a function that was collected from the table. Not a method, which would
    keep the `CallTable` alive."""
    table.pop(number, None)
