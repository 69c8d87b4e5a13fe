"""What a scheduled call is made of, and how the same one is found again.

A call is traced and pickled once; scheduling it again costs a look-up. Two calls are
the same if function and arguments are, where arguments are compared by *value* if they
are plain, by their number if they are handles (variables, per-worker iterators), by
dtype and shape if they are arrays, whose bytes each closure brings (`Input`), and never
if they can change otherwise (foreign objects, and arrays in these): those are pickled
at each schedule, so that a closure sees its arguments as they were then. Foreign
objects that give the bytes of before are the ones of before: a worker that unpickled
them anew would trace the step anew, as they may compare by identity.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict, deque
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import jax
import numpy as np

from zstrat.program import (
    CarriedValues,
    Function,
    Resource,
    bytes_of_inputs,
    cut_inputs,
    digest,
    dump,
    dump_code,
    input_key,
    jax_settings,
    loses_bits,
)
from zstrat.variables import LOCAL, AbstractVariable, Variable, read_all, recorder

from ._on_worker import in_step
from ._values import Claim, NoArgument, PerWorker, RemoteValue, Result, StandIn

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from zstrat.program import Plan
    from zstrat.variables import VariableHandle

CACHED_CALLS: Final = 1024
"""Different argument lists of one function that are remembered; the oldest goes."""

SAME_BYTES: Final = 16
"""Pickled argument lists of one function that are compared with new ones; they stay on
the workers as long."""

_recording: Final = recorder.get


class TracingStrategy(Protocol):
    """A `CoordinatedStrategy`, as far as tracing and shipping a step takes it."""

    def scope(self) -> AbstractContextManager[object]: ...

    def require_known(self, plan: Plan) -> None: ...


class Code:
    """A pickled function (or dataset), named by its digest.

    Args:
        classes: Of the program, that travel with it: workers refer to them.
    """

    __slots__ = ("classes", "code", "digest")

    def __init__(self, code: bytes, classes: Sequence[type] = ()) -> None:
        self.code, self.digest, self.classes = code, digest(code), classes

    @classmethod
    def of(cls, obj: object) -> Code:
        """
        Raises:
            Exception: It cannot be pickled.
        """
        classes: list[type] = []
        return cls(dump_code(obj, classes=classes), classes)


class PickledArguments:
    """Pickled ``(args, kwargs)`` with a number. When the last closure and the cache
    have let go of them, the number is retired, and the workers may forget it."""

    __slots__ = ("__weakref__", "arrays", "code", "number")
    _numbers = itertools.count(1)

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.number = next(self._numbers)
        self.code, arrays = dump((args, dict(kwargs)))
        # They are views of the user's memory, and are sent after schedule returned.
        self.arrays = tuple(array.copy() for array in arrays)

    @property
    def nbytes(self) -> int:
        """What they take in memory."""
        return len(self.code) + sum(array.nbytes for array in self.arrays)

    def retire_to(self, retired: deque[int]) -> None:
        # deque.append takes no lock: a finalizer may run while this thread holds any.
        weakref.finalize(self, retired.append, self.number).atexit = False


class ScheduledCall:
    """What a closure runs.

    Its per-worker resources are held weakly: a call is remembered, and must not keep
    alive what the user has dropped. Each closure holds them.

    Args:
        resources: Those among its arguments.
        captured: Those that it draws from besides, held by an object.
        held: Those that an object holds, of a step that was not traced: it may draw
            from them.

    ``nbytes`` is what each closure of it adds to what the queue holds: its arguments,
    if the next closure has others.
    """

    __slots__ = (
        "_claims",
        "arguments",
        "captured",
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
    ) -> None:
        self.result, self.function, self.arguments = result, function, arguments
        self.nbytes = 0
        needed = (*resources, *captured)
        self.resources = tuple(resource.resource for resource in needed)
        self._claims = tuple(weakref.ref(each.claim) for each in (*needed, *held))
        self.captured = self._claims[len(resources) :]
        """Claims on what it captured; one that is gone was dropped by the user."""

    def claims(self) -> tuple[Claim | None, ...]:
        """What a closure holds so that its resources stay."""
        return tuple([claim() for claim in self._claims]) if self._claims else ()


class _KnownFunction:
    """A function that was scheduled before. Does not keep it alive."""

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
        """`CallTable.find` is to find it."""
        self.calls[key] = call
        if len(self.calls) > CACHED_CALLS:
            self.calls.popitem(last=False)

    @property
    def held(self) -> list[PerWorker]:
        """The resources that it holds as it was shipped, but those that the user has
        dropped since: of these the worker tells whoever draws from one."""
        found = [reference() for reference in self._held]
        return [resource for resource in found if isinstance(resource, PerWorker)]

    def shares(self, arguments: PickledArguments) -> bool:
        """Whether other closures may have these very arguments."""
        return self.pickled.get(arguments.code) is arguments

    def same(self, arguments: PickledArguments) -> PickledArguments:
        """The arguments that gave the same bytes before, else these."""
        known = self.pickled.pop(arguments.code, arguments)
        self.pickled[arguments.code] = known
        if len(self.pickled) > SAME_BYTES:
            self.pickled.popitem(last=False)
        return known


class CallTable:
    """Makes calls and finds them again.

    Args:
        strategy: Its scope is entered around each trace, here and on the workers, so
            that what a trace creates lands where the strategy puts it.
        retired: Gets the numbers of arguments that nobody needs any more.
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
        """The same call of before and the bytes of these inputs, in microseconds; None
        if it must be made, or may not be, as a step is being traced."""
        known = self._known.get(id(function))
        if (
            known is None
            or known.reference() is not function
            or known.settings != jax_settings()
            or _recording() is not None
        ):
            return None
        inputs: list[Any] = []
        try:
            call = known.calls.get(_key_of(args, kwargs, inputs))
        except _NoKeyError:
            return None
        if call is None or (inputs and any(map(loses_bits, inputs))):
            return None  # of what jax cuts the trace tells
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
            The call, and the bytes of its inputs: none if its arrays are pickled.

        Raises:
            TypeError: ``function`` is no `zstrat.function`.
            ValueError: A `RemoteValue` is among the arguments, or the function updates
                variables that live in this process only.
            RuntimeError: An iterator that the function captured was dropped, or a step
                is being traced.
            NotFoundError: It uses variables of another session.
            ClosedError: A per-worker resource is of a coordinator that has lost the
                cluster to a newer one.
            Exception: What tracing or pickling raised.
        """
        if _recording() is not None:
            raise RuntimeError(in_step("coordinator.schedule"))
        function = _checked(function)
        if not isinstance(args, tuple | list | None):
            raise TypeError(
                f"args of schedule is a tuple of arguments, args=(x,); got a bare "
                f"{type(args).__name__}"
            )
        positional, named = tuple(args or ()), dict(kwargs or {})
        resources = _resources((positional, named))
        for resource in resources:
            resource.require_kept()
        traced = self._trace(function, positional, named)
        result = Result(function.name, traced.treedef)
        known = self._know(function)
        key, inputs = None, b""
        # What is carried is another value the next time.
        if traced.carried:
            positional = (_values_of(traced.carried), *positional)
        elif function.eager or result.treedef is not None:
            key, inputs = _key_and_inputs(args, kwargs)
        if inputs:
            positional, named = cut_inputs((positional, named), [0])
        arguments = self._pickled(function, known, positional, named)
        held = known.held if result.treedef is None else ()
        call = ScheduledCall(
            result, known.code, arguments, resources, traced.captured, held
        )
        if key is not None:
            known.remember(key, call)
        elif arguments is not None and not known.shares(arguments):
            call.nbytes = arguments.nbytes
        return call, inputs

    @property
    def traces(self) -> int:
        """Signatures that were traced here, of all functions that are still there.
        From any thread."""
        known = [each.reference() for each in list(self._known.values())]
        return sum(function.trace_count for function in known if function is not None)

    def forget(self) -> None:
        """Lets go of everything."""
        self._known.clear()

    def _trace(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _TracedCall:
        """What the trace says. Of an eager function, and of one whose resources failed,
        which is traced once a worker has built them, it is nothing."""
        if function.eager:
            return _TracedCall()
        stand_ins: dict[int, object] = {}
        for resource in _per_worker((args, kwargs)):
            stand_ins[resource.resource] = stand_in = resource._stand_in()
            if stand_in is None:
                # It failed on all that are there: the closure will say why.
                return _TracedCall()
        args, kwargs = jax.tree.map(
            lambda leaf: (
                stand_ins[leaf.resource] if isinstance(leaf, PerWorker) else leaf
            ),
            (args, kwargs),
            is_leaf=lambda leaf: isinstance(leaf, Resource),
        )
        # In a context of its own: it ends in C, where no Ctrl-C can strike on the way
        # out and leave the caller in this scope, or in the middle of a trace.
        plan = copy_context().run(self._plan, function, args, kwargs)
        plan.require_shared()
        self._strategy.require_known(plan)
        carried = [v for v in plan.variables if v.spec.ps == LOCAL]
        return _TracedCall(plan.out_structure.treedef, _captured(plan), carried)

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
        made = arguments = PickledArguments(args, kwargs)
        # An eager step may change its arguments, and is not traced.
        if not function.eager and not _has_arrays((args, kwargs)):
            arguments = known.same(made)
        if arguments is made:
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
    """What the trace of a call says: the treedef of its result, if it knows; the
    resources that it draws from and that are no arguments; and the variables of this
    process that it reads."""

    treedef: Any = None
    captured: Sequence[PerWorker] = ()
    carried: Sequence[VariableHandle] = ()


def _values_of(variables: Sequence[VariableHandle]) -> CarriedValues:
    values = tuple(np.asarray(value) for value in read_all(variables))
    return CarriedValues(tuple(v.spec.key for v in variables), values)


def _captured(plan: Plan) -> list[PerWorker]:
    """The handles of iterators that the step draws from and that are no arguments."""
    found = []
    for iterator in plan.captured:
        assert isinstance(iterator, StandIn), iterator.name
        if (handle := iterator.handle()) is None:
            raise RuntimeError(
                f"the step function {plan.function!r} draws from an iterator that an "
                f"object held when it was first scheduled (of {iterator.name}), and "
                "that was dropped since: what a step captures is taken once. Give it "
                "the iterator as an argument, args=(iterator,)"
            )
        found.append(handle)
    return found


class _NoKeyError(Exception):
    """An argument has no value that could be compared."""


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
    """What the same call has the same of; its inputs are appended to the list."""
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
        return kind, value.hex()  # tells 0.0 from -0.0, and finds nan again
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
    """The key of a dict, which is no input."""
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
        f"{function!r:.200} of type {type(function).__name__}: put @zs.function above "
        "its definition, or call zs.function(fn) once and schedule the result"
    )


def _leaves(tree: Any) -> list[Any]:
    kinds = (Resource, RemoteValue, NoArgument)
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, kinds))


def _has_arrays(tree: Any) -> bool:
    kinds = np.ndarray | np.generic | jax.Array
    return any(isinstance(leaf, kinds) for leaf in _leaves(tree))


def _per_worker(tree: Any) -> list[PerWorker]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, PerWorker)]


def _resources(tree: Any) -> list[PerWorker]:
    for leaf in _leaves(tree):
        if isinstance(leaf, RemoteValue):
            raise ValueError(
                "a RemoteValue is among the arguments: its result is not there yet and "
                "may never be; pass `value.fetch()`, or compute both in one function"
            )
        if isinstance(leaf, NoArgument):
            leaf.refuse()
    return list({leaf.resource: leaf for leaf in _per_worker(tree)}.values())


def _pop(table: dict[int, _KnownFunction], number: int, _: object) -> None:
    """Forgets a function that is gone; the table may not keep its `CallTable` alive."""
    table.pop(number, None)
