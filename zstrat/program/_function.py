"""``zs.function``: Python that is traced once and then runs as a compiled program.

A step that is a method has separate programs for each object, so the object keeps the
bound `Function`, in one private entry of its ``__dict__``. The key there is the unbound
function, not its name: a subclass and its parent may have a ``step`` each.

Law of the file: a copy of the object (shallow, deep or pickled) starts without bound
functions.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, overload

from zstrat.variables import is_staging, recorder

from ._execute import run_here
from ._programs import CompiledPrograms
from .ship import _code
from .ship._carried import ScopedBody, jax_settings
from .trace import _refusals
from .trace._signature import building, cut
from .trace._tracebacks import hide_frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ship._carried import Scoping
    from .trace._plan import Plan

_ENTRY: Final = "_zstrat_bound_functions"
_lock: Final = threading.Lock()

in_python_step: Final[ContextVar[bool]] = ContextVar(
    "zstrat_python_step", default=False
)
"""Whether the body of a step runs in Python now, because it branches on the end of its
data."""


class BoundFunctions:
    """The bound step functions that the object ``owner`` keeps."""

    __slots__ = ("_bound", "owner")

    def __init__(self, owner: object = None) -> None:
        self.owner = owner
        self._bound: dict[Function, Function] = {}

    def of(self, unbound: Function, instance: object) -> Function:
        """Returns the function bound to the instance; the same object at each call."""
        bound = self._bound.get(unbound)
        if bound is None:
            body = unbound.body.__get__(instance)
            new = type(unbound)(body, eager=unbound.eager)
            # Two threads that bind it at once get the same function.
            bound = self._bound.setdefault(unbound, new)
        return bound

    def __reduce__(self) -> Any:
        return BoundFunctions, ()


def bound_functions(instance: object, name: str) -> BoundFunctions:
    """Returns the bound functions of an instance; adds an empty collection if it has
    none.

    Raises:
        TypeError: The instance is a class, or has no ``__dict__``.
    """
    if isinstance(instance, type):
        raise TypeError(
            f"the step function {name!r} is a class method, but a zs.function can be "
            "bound only to objects. Make it a function outside of the class, or a "
            "static method (@staticmethod above @zs.function), and name the class in "
            "its body"
        )
    try:
        kept = vars(instance)
    except TypeError:
        raise TypeError(
            f"the step function {name!r} is a method of {type(instance).__name__}, "
            "whose objects have __slots__ and cannot keep their programs: add "
            "'__dict__' to __slots__, or make it a function outside of the class"
        ) from None
    functions = kept.get(_ENTRY)
    if functions is None or functions.owner is not instance:
        with _lock:
            functions = kept.get(_ENTRY)
            # A shallow copy has the entry of the original.
            if functions is None or functions.owner is not instance:
                functions = kept[_ENTRY] = BoundFunctions(instance)
    bound: BoundFunctions = functions
    return bound


class Function:
    """A step function; `function` makes it.

    - Inside another step it is inlined.
    - Scheduled by a coordinator it runs on a worker.
    - As a dataset function, or in one, it runs its plain body.
    - Called elsewhere it runs in this process: it reads values from each variable's
      storage, computes, and sends the updates; the result's arrays are ``jax.Array``.

    The body captures globals and closure variables when it is first traced or shipped,
    as with ``tf.function``: later changes of a captured Python value have no effect.
    `Variable` objects are shared, not copied.
    """

    # A decorator around it (functools.wraps) copies its __dict__, and could not be
    # shipped with programs in it.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_shipped",
        "body",
        "eager",
        "name",
        "programs",
    )

    def __init__(self, fn: Callable[..., Any], *, eager: bool = False) -> None:
        self.body: Callable[..., Any] = _checked(fn)
        self.eager = eager
        self.name: str = _name(fn)
        self._init_caches()

    def _init_caches(self) -> None:
        # Without the attributes of a callable object, which would replace ours.
        functools.update_wrapper(self, self.body, updated=())
        self.programs = CompiledPrograms(self.name, self.body)
        self._shipped: tuple[bytes, bytes] | None = None
        self._is_python = False
        """Whether the body branches on the end of its data, so that it runs in Python
        instead of as a program."""

    @property
    def trace_count(self) -> int:
        """Number of signatures that were traced in this process.

        The body runs once for each signature; twice if it first reads a variable inside
        of a function that jax traces by itself (`lax.scan`, an inner `jax.jit`).
        """
        return self.programs.trace_count

    @property
    def code(self) -> bytes:
        """The pickled function, as it is shipped; the same bytes each time.

        Raises:
            TypeError: The function captures something that cannot be pickled; says
                what.
        """
        return self._code_and_digest()[0]

    @property
    def digest(self) -> bytes:
        """A digest of `code`, 16 bytes. Raises as `code` does."""
        return self._code_and_digest()[1]

    def plan(self, args: tuple[Any, ...] = (), kwargs: Any = None) -> Plan:
        """Returns the plan of a call with these arguments.

        Traces the function if their signature is new. Elements that the trace draws
        from real iterators are given back.

        Raises:
            ValueError: The function is eager: it has no plan.
            TypeError, RuntimeError: The body cannot be captured.
            Exception: Whatever the body raises while it is traced.

        Warns:
            DowncastWarning: A downcast by jax changes an argument.
        """
        if self.eager:
            raise ValueError(
                f"{self.name!r} is an eager step function, which is not traced and has "
                "no plan: leave out eager=True"
            )
        kwargs = {} if kwargs is None else kwargs
        call = cut(args, kwargs)
        program, draws = self.programs.find(call, args, kwargs)
        draws.unread()
        if program.plan.watch is not None:
            program.plan.watch(call.inputs)
        return program.plan

    def within(self, strategy: Scoping) -> Function:
        """Returns this step with a body that enters the scope of ``strategy``, under
        this thread's settings of jax. Coordinators ship that step to workers."""
        body = ScopedBody(self.body, strategy, jax_settings())
        scoped = _blank()
        scoped.__setstate__({"body": body, "eager": self.eager, "name": self.name})
        functools.update_wrapper(scoped, self.body, updated=())  # for messages
        return scoped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In a trace it is inlined; a dataset function may return datasets, which no
        # program does.
        if recorder.get() is not None or building.get():
            return self.body(*args, **kwargs)
        if is_staging():
            raise _refusals.step_inside(f"the step function {self.name!r} is called")
        try:
            # Remembered, as another trace would only find the same loop.
            if not self._is_python:
                try:
                    return run_here(self, args, kwargs)
                except _refusals.LoopsOverData as found:  # it has done nothing yet
                    self._turn_to_python(found)
            return self._in_python(args, kwargs)
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    def _in_python(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = in_python_step.set(True)
        try:
            return self.body(*args, **kwargs)
        finally:
            in_python_step.reset(before)

    def _turn_to_python(self, error: _refusals.LoopsOverData) -> None:
        """Makes the step run in Python from now on, without tracing, and warns."""
        self._is_python = True
        warnings.warn(
            f"the step function {self.name!r} runs in Python, operation by operation, "
            f"because it branches on where {error.name} ends (at {error.where}), and a "
            "traced step cannot. Each strategy.run and each zs.function in it is still "
            "compiled; to compile the whole body of the loop, make it a zs.function "
            "and call that in the loop",
            UserWarning,
            stacklevel=3,
        )

    def __get__(self, instance: object, owner: type | None = None) -> Function:
        """Returns the `Function` bound to an instance, which keeps it."""
        if instance is None:
            return self
        return bound_functions(instance, self.name).of(self, instance)

    def __reduce__(self) -> Any:
        # The state comes after the object, as a body may refer to its own function.
        state = {"body": self.body, "eager": self.eager, "name": self.name}
        return _blank, (), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.body, self.eager = state["body"], state["eager"]
        self.name = state["name"]
        self._init_caches()

    def __repr__(self) -> str:
        kind = "eager, " if self.eager else ""
        return f"<zs.function {self.name} ({kind}{self.trace_count} traces)>"

    def _code_and_digest(self) -> tuple[bytes, bytes]:
        # Pickled once: the digest is the name of the code on all workers.
        if self._shipped is None:
            code = _code.dump_code(self)
            self._shipped = (code, _code.digest(code))
        return self._shipped


@overload
def function(fn: Callable[..., Any], *, eager: bool = False) -> Function: ...
@overload
def function(
    fn: None = None, *, eager: bool = False
) -> Callable[[Callable[..., Any]], Function]: ...
def function(
    fn: Callable[..., Any] | None = None, *, eager: bool = False
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Makes a step function. Use it as a decorator, with or without arguments.

    jax traces the body when it is first called with arguments of new types, so Python
    code in it runs then and not at each step. In the body,

    - variables are read (``v.value()``, arithmetic) and updated (``assign``,
      ``scatter_...``, ``optimizer.apply_gradients``) at its top level, not under
      ``jax.grad`` or ``lax.cond``;
    - rows of tables are looked up there, too (``zs.embedding_lookup``,
      ``v.sparse_read``), before the step updates the table; ids may be computed from
      anything. Ids that depend on values that the step reads, or on rows, cost one more
      request to the parameter servers for each such level; all other rows arrive with
      the other reads;
    - ``next(iterator)`` draws an element of a dataset, as often as Python calls it; at
      the end of the data the step raises OutOfRangeError. A loop over a dataset or
      iterator, and `Optional.has_value`, branch on the end of the data, which is
      unknown during a trace: such a step runs in Python where it is called, with a
      warning, and each ``strategy.run`` in it as one program; workers refuse such a
      step, unless it is ``eager``;
    - arrays and Python ints, floats and complexes among the arguments are traced;
      booleans, strings and other hashable values are static, and each value is traced
      by itself;
    - variables among the arguments, also in lists and dicts, share one trace if they
      have equal shape, dtype, strategy and components, and if equal positions have
      equal variables (``f(v, v)`` is another pattern than ``f(v, w)``). Each variable
      is traced by itself in a body that applies an optimizer or looks up rows, that
      reads the name or device of a variable, or that refers to it in another way, too
      (as a global, say), and if several processes compute together. An object that
      holds variables is static;
    - the result may be any pytree of arrays, Python numbers, strings and None.

    A step that looks up, or updates, a row outside of the table raises IndexError. If
    the variables are on the devices of this process (`MirroredStrategy`, say), the
    lookup gives nan instead, and the update is skipped.

    Args:
        eager: Do not trace: run the Python body itself on the worker, with values, for
            debugging with print and pdb. Results are the same, but it is slow: each
            read is a round trip. Updates are sent together, before the next read and at
            the end of the body; if the body raises, those not yet sent are dropped.
            Updates of a lost worker stay: the second run of the step must make the same
            updates at the same points, or it fails with `RetryDiffersError`.

    Raises:
        TypeError: ``fn`` is not a function, or is a coroutine or generator function.
    """
    if fn is None:
        return functools.partial(Function, eager=eager)
    return fn if isinstance(fn, Function) else Function(fn, eager=eager)


def _blank() -> Function:
    return object.__new__(Function)


def _name(fn: Callable[..., Any]) -> str:
    name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
    return name.replace("<locals>.", "")


def _checked(fn: Callable[..., Any]) -> Any:
    if not callable(fn):
        raise TypeError(f"zs.function takes a Python function, got {fn!r:.100}")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        kind = "generator" if inspect.isgeneratorfunction(fn) else "coroutine"
        raise TypeError(
            f"zs.function takes a plain function; {_name(fn)!r} is a {kind} function. "
            "A step is traced by jax and cannot wait or yield"
        )
    return fn
