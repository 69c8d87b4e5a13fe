"""The door to cloudpickle: Python objects as bytes, between tasks of one program.

What travels how:

- functions and classes of the user's own modules (those outside of Python's library and
  of site-packages) by value, so that workers need no copy of the program; everything
  installed by reference, and what an installed package made around a function of the
  user's over that package's globals;
- jax arrays as numpy arrays, made jax arrays again where they arrive; weakly typed
  scalars as Python's, which are weak too;
- a `Resource` as its number, which the receiver resolves to its own object;
- large numpy arrays of *data* beside the pickle, without a copy (protocol 5). *Code*
  (`dump_code`, and any callable) travels in one piece.

Threats. Whoever can make a task load such bytes can run code there, so a task takes
them from its coordinator alone; that is decided before anything here is called. The
bytecode of functions means nothing to another minor version of Python, so the bytes say
which one made them.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import hashlib
import io
import pickle
import sys
import threading
import types
import warnings
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np

from zstrat.errors import ProtocolError, VersionMismatchError
from zstrat.program.trace._where import is_installed
from zstrat.variables import is_machinery

from ._classes import (
    arriving_at,
    functions_of,
    is_sentinel,
    known,
    reduced_class,
    reduced_enum,
    reduced_instance,
)
from ._functions import (
    early,
    empty,
    is_cached,
    is_dispatching,
    reduced_dispatch,
    remade,
    remaining,
    whole,
)
from ._pickle_diagnostics import find_value, unpicklable
from ._pytrees import Registration, register
from ._references import ModuleAttribute, attribute
from ._trial import difference
from ._wrappers import reduced, reduced_vjp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BESIDE: Final = 64 * 1024
"""Smaller arrays stay in the pickle: a frame of its own costs more than the copy."""

LARGE: Final = 16 * 2**20
"""A captured array of this size is warned about: it is shipped to every worker, and
compiled into the program as a constant."""

_MAGIC: Final = b"zs1"
_VERSION: Final = bytes(sys.version_info[:2])
_CIRCLES: Final = 8
"""How often a class may be met again before it is made: by what its body holds."""

# cloudpickle's registry of modules is global; dumps of two threads would mix theirs.
_lock: Final = threading.RLock()
_tried: Final[weakref.WeakSet[type]] = weakref.WeakSet()


class Resource:
    """Base of handles whose object lives on the receiving task under a number."""

    resource: int


_NAMED: Final = (type, jax.custom_jvp, jax.custom_vjp, type(jax.jit(len)))
_STAYS: Final = (jax.Array, np.ndarray, Resource)
"""What a trial does not copy."""


def dump(obj: object) -> tuple[bytes, tuple[np.ndarray, ...]]:
    """Pickles data (arguments) or code.

    Returns the bytes and the large arrays beside them, as 1-d uint8 views of the
    original memory: none if ``obj`` is callable.

    Raises:
        TypeError: A part cannot be pickled; names the path to it.
    """
    if callable(obj):
        return dump_code(obj), ()
    beside: list[np.ndarray] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < BESIDE:
            return True
        beside.append(np.frombuffer(raw, np.uint8))
        return False

    return _dumped(obj, keep)[0], tuple(beside)


def dump_code(obj: object) -> bytes:
    """Pickles a function, or another object that travels in one piece.

    Warns if it captures an array of more than 16 MiB.

    Raises:
        TypeError: A part cannot be pickled; names the path to it.
    """
    code, large = _dumped(obj, None)
    for array in large:
        path = find_value(obj, array) or "an array"
        warnings.warn(
            f"{_name(obj)} captures {path}: {array.nbytes / 2**20:.0f} MiB "
            f"({array.dtype}{list(array.shape)}) that are shipped to every worker and "
            "become a constant of the compiled program. Make it a zs.Variable, or let "
            "the dataset function load it on the worker",
            stacklevel=2,
        )
    return code


def load(
    code: bytes | memoryview,
    arrays: Sequence[np.ndarray] = (),
    resolve: Callable[[int], object] | None = None,
) -> Any:
    """Inverse of `dump`. Arrays that came beside are used without a copy, read-only.

    Args:
        resolve: Gives the object of a `Resource` by its number.

    Raises:
        VersionMismatchError: Another minor version of Python made the bytes.
        ProtocolError: The bytes were not made by `dump`.
        Exception: Whatever unpickling raises (a module that is not installed here).
    """
    head = bytes(code[:5])
    if len(head) < 5 or head[:3] != _MAGIC:
        raise ProtocolError(f"these {len(code)} bytes are no shipped code: {head!r}")
    if head[3:] != _VERSION:
        raise VersionMismatchError(
            f"code from Python {head[3]}.{head[4]} cannot run on Python "
            f"{_VERSION[0]}.{_VERSION[1]} ({sys.executable}): run the program and all "
            "workers on the same minor version"
        )
    stream = io.BytesIO(memoryview(code)[5:])
    loaded, registrations = _Unpickler(stream, arrays, resolve).load()
    for registration in registrations:
        register(registration)
    return loaded


def digest(code: bytes) -> bytes:
    """16 bytes that name the code."""
    return hashlib.blake2b(code, digest_size=16).digest()


def _dumped(
    obj: object, keep: Callable[[pickle.PickleBuffer], bool] | None
) -> tuple[bytes, list[Any]]:
    """The bytes, and the large arrays among what was pickled."""
    ways = _Ways()
    with _lock:
        while True:
            try:
                with _Pickler.session(keep, ways) as (pickler, stream):
                    # In this order: pickling the object finds the registrations.
                    pickler.dump((obj, pickler.registrations))
                if keep is None or not pickler.made <= set(_tried):
                    _try(obj, ways)
            except _Refused as error:
                _find_way(obj, ways, error)
                continue
            return _MAGIC + _VERSION + stream.getvalue(), pickler.large


def _try(obj: object, ways: _Ways) -> None:
    """Loads the object here as a worker would, in classes made for that.

    Raises:
        _Refused: It does not arrive, or not whole.
    """
    kept: list[Any] = []
    with _Pickler.session(None, ways, kept) as (pickler, stream):
        pickler.dump((obj, pickler.registrations, pickler.instances))
    stream.seek(0)
    try:
        with arriving_at(known.trusting(list(_tried))):
            _, registrations, arrived = _Trial(stream, kept, ways).load()
            for registration in registrations:
                register(registration)
    except Exception as error:  # user code runs in it: `_find_way` says where
        raise _NotLoaded from error
    if found := difference(pickler.instances, arrived):
        raise _Refused(*found)
    _tried.update(pickler.made)


def _find_way(obj: object, ways: _Ways, error: _Refused) -> None:
    """Notes another way for what was refused.

    Raises:
        TypeError: There is none; names the path to it.
    """
    if error.args:
        raise TypeError(_not_whole(obj, *error.args))
    if isinstance(error.__cause__, _Circle) and ways.late.isdisjoint(
        error.__cause__.args
    ):
        ways.late.update(error.__cause__.args)
        return
    modules = [m for m in tuple(sys.modules.values()) if _is_file_of_users(m)]
    path, chain = unpicklable(obj, functools.partial(_arrives, ways=ways))
    for part in (chain[-1], type(chain[-1]), *reversed(chain[:-1])):
        if id(part) not in ways.by_name and (found := attribute(part, modules)):
            ways.by_name[id(part)] = (part, found)
            return
    cause = error.__cause__
    verb = "arrive" if isinstance(error, _NotLoaded) else "be pickled"
    raise TypeError(_words(obj, path, chain[-1], f"{verb} ({cause})")) from cause


@dataclasses.dataclass
class _Ways:
    """How the exceptions among the parts travel."""

    by_name: dict[int, tuple[Any, ModuleAttribute]] = dataclasses.field(
        default_factory=dict
    )
    """What workers import instead, by its id."""
    late: set[type] = dataclasses.field(default_factory=set)
    """Classes whose attributes are set when they are made, as they refer to them."""


class _Circle(TypeError):
    """The body of a class holds what refers to the class."""

    def __str__(self) -> str:
        return f"the body of {self.args[0].__qualname__} holds what refers to it"


class _Refused(Exception):
    """Something does not travel; the cause says why, or the arguments what is lost."""


class _NotLoaded(_Refused):
    """It was pickled, and the bytes give no object."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no stubs
    """cloudpickle with the rules of the module's docstring."""

    def __init__(
        self,
        stream: io.BytesIO,
        keep: Callable[[pickle.PickleBuffer], bool] | None,
        ways: _Ways,
        kept: list[Any] | None,
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=keep)
        self.registrations: list[Registration] = []
        self.large: list[Any] = []
        self.made: set[type] = set()
        self.instances: list[Any] = []
        self.modules = ExitStack()
        self._known: set[str] = set()
        self._ways, self._kept = ways, kept
        self._empty: dict[int, Any] = {}
        self._entered: Counter[type] = Counter()

    @staticmethod
    @contextmanager
    def session(
        keep: Callable[[pickle.PickleBuffer], bool] | None,
        ways: _Ways,
        kept: list[Any] | None = None,
    ) -> Iterator[tuple[_Pickler, io.BytesIO]]:
        """
        Args:
            kept: Gets the arrays and handles of a trial, which do not travel.
        """
        stream = io.BytesIO()
        pickler = _Pickler(stream, keep, ways, kept)
        with pickler.modules:
            try:
                yield pickler, stream
            except Exception as error:  # user code runs in __reduce__: see `_words`
                raise _Refused from error

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) in self._ways.by_name:
            return "reference", *self._ways.by_name[id(obj)][1]
        if self._kept is not None and isinstance(obj, _STAYS):
            if not isinstance(obj, np.ndarray) or not obj.dtype.hasobject:
                self._kept.append(obj)
                return "kept", len(self._kept) - 1
        return ("resource", obj.resource) if isinstance(obj, Resource) else None

    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case types.FunctionType():
                return self._function(obj)
            case type():
                return self._class(obj)
            case jax.custom_vjp():
                return _by_other_name(obj) or reduced_vjp(obj)
            case types.ModuleType():
                self._by_value(obj)
            case jax.core.Tracer():
                raise TypeError(f"it is traced by jax ({obj})")
            case jax.Array():
                return self._array(obj)
            case np.ndarray() if obj.nbytes > LARGE:
                self.large.append(obj)
            case _:
                return self._instance(obj)
        return super().reducer_override(obj)

    def _function(self, fn: types.FunctionType) -> Any:
        self._by_value(sys.modules.get(fn.__module__ or ""))
        if is_dispatching(fn) and not _goes_by_name(fn):
            return reduced_dispatch(fn)
        if made := reduced(fn):
            return made
        whole_fn = super().reducer_override(fn)
        if whole_fn is NotImplemented:
            return whole_fn
        if id(fn) in self._empty:
            return empty(whole_fn, early(fn, _goes_by_name))
        return whole(whole_fn, early(fn, _goes_by_name))

    def _class(self, cls: Any) -> Any:
        self._by_value(sys.modules.get(cls.__module__ or ""))
        if type(cls) in copyreg.dispatch_table:
            return NotImplemented
        if cls.__module__ == "builtins" or _goes_by_name(cls):
            return super().reducer_override(cls)
        if found := _by_other_name(cls):
            return found
        self.made.add(cls)
        self._entered[cls] += 1
        if self._entered[cls] > _CIRCLES:
            raise _Circle(cls)
        self.registrations.extend(Registration.of(cls))
        filled = [(fn, remaining(made)) for fn, made in self._emptied(cls)]
        if issubclass(cls, enum.Enum):
            return reduced_enum(cls, filled)
        registered = super().reducer_override(cls)[2][0].get("_abc_impl", ())
        return reduced_class(cls, filled, registered, cls in self._ways.late)

    def _emptied(self, cls: type) -> list[tuple[types.FunctionType, Any]]:
        """The functions of a class that are made empty, with what they are made of."""
        found = []
        for fn in functions_of(cls):
            if not is_dispatching(fn) and not _goes_by_name(fn) and not reduced(fn):
                self._by_value(sys.modules.get(fn.__module__ or ""))
                made = super().reducer_override(fn)
                if made is not NotImplemented:
                    self._empty[id(fn)] = fn
                    found.append((fn, made))
        return found

    def _instance(self, obj: Any) -> Any:
        cls = type(obj)
        if self._kept is not None and cls.__module__ != "builtins":
            if not _goes_by_name(cls):
                self.instances.append(obj)
        if is_cached(obj) and _goes_by_name(obj):
            return NotImplemented
        return (
            _by_other_name(obj) or remade(obj) or reduced_instance(obj) or NotImplemented
        )

    def _array(self, array: jax.Array) -> Any:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(array))
            return _key, (data, str(jax.random.key_impl(array)))
        if array.nbytes > LARGE:
            self.large.append(array)
        plain = np.asarray(array)
        weak = plain.ndim == 0 and jax.typeof(array).weak_type
        return jnp.asarray, (plain.item() if weak else plain,)

    def _by_value(self, module: types.ModuleType | None) -> None:
        if module is None or module.__name__ in self._known:
            return
        self._known.add(module.__name__)
        registered = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        if not registered and module.__name__ in sys.modules and _is_users(module):
            cloudpickle.register_pickle_by_value(module)
            self.modules.callback(cloudpickle.unregister_pickle_by_value, module)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        stream: io.BytesIO,
        arrays: Sequence[np.ndarray],
        resolve: Callable[[int], object] | None,
    ) -> None:
        super().__init__(stream, buffers=arrays)
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("reference", *reference):
                return ModuleAttribute(*reference).find_or_stand_in()
            case ("resource", int(number)):
                if self._resolve is None:
                    raise ProtocolError(
                        f"resource {number} arrived where no resources are"
                    )
                return self._resolve(number)
        raise ProtocolError(f"an unknown kind of reference arrived: {pid!r:.100}")


class _Trial(_Unpickler):
    """Loads what stays in this process as it is, and nothing that workers lack."""

    def __init__(
        self, stream: io.BytesIO, kept: Sequence[Any], ways: _Ways
    ) -> None:
        super().__init__(stream, (), None)
        self._kept = kept
        self._found = {found: part for part, found in ways.by_name.values()}

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("kept", int(number)):
                return self._kept[number]
            case ("reference", *reference):
                return self._found[ModuleAttribute(*reference)]
        return super().persistent_load(pid)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module == "__main__" or _is_users(sys.modules[module]):
            raise pickle.UnpicklingError(
                f"it would be imported as {name!r} from {module!r}, which workers "
                "do not have"
            )
        return found


def _goes_by_name(obj: Any) -> bool:
    """Whether workers import it: it is an attribute of what is installed there."""
    if isinstance(obj, types.ModuleType):
        return sys.modules.get(obj.__name__) is obj and not _is_users(obj)
    if not isinstance(obj, (type, types.FunctionType)) and not is_cached(obj):
        return False
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _is_users(module):
        return False
    found: Any = module
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _by_other_name(obj: Any) -> Any:
    """What pickle needs of an attribute of an installed module, if it is one.

    Of a class or function that calls itself otherwise, or of an object without state,
    which is told apart by being that object. None for any other.
    """
    named = isinstance(obj, _NAMED)
    if not named and not is_sentinel(obj):
        return None
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _is_users(module):
        return None
    name = getattr(obj, "__name__", "")
    if getattr(module, name, None) is not obj:
        if named and not isinstance(obj, type):
            return None
        name = next((n for n, v in vars(module).items() if v is obj), "")
    return (getattr, (module, name)) if name else None


def _is_users(module: types.ModuleType) -> bool:
    """Whether a module is part of the user's program, which workers do not have."""
    filename = module.__dict__.get("__file__")
    package = module.__name__.partition(".")[0]
    if package in ("__main__", "zstrat") or not isinstance(filename, str):
        return False  # cloudpickle ships __main__ by value anyway
    return not is_machinery(filename) and not is_installed(filename)


def _is_file_of_users(module: object) -> bool:
    return isinstance(module, types.ModuleType) and _is_users(module)


def _key(data: np.ndarray, impl: str) -> jax.Array:
    key: jax.Array = jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    return key


def _arrives(part: object, ways: _Ways) -> bool:
    try:
        _try(part, ways)
    except _Refused as error:
        return bool(error.args)
    return True


def _words(obj: object, path: str, culprit: object, reason: str) -> str:
    what = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
    place = f"{path} is a {what}, which" if path else f"a {what}"
    return (
        f"{_name(obj)} cannot be shipped to another task: {place} cannot {reason}. "
        f"Create it inside of the function that uses it, or capture plain "
        "data, arrays and zs.Variable objects"
    )


def _not_whole(obj: object, part: object, words: str) -> str:
    path = "it" if part is obj else find_value(obj, part) or "a part"
    kind = type(part).__qualname__
    return (
        f"{_name(obj)} would not arrive whole on another task: {path}, a {kind}, would "
        f"be another pytree there: {words}. Register {kind} in its own body or with "
        "register_pytree_node_class or register_dataclass of jax.tree_util, or import "
        "it from an installed package"
    )


def _name(obj: object) -> str:
    name = getattr(obj, "__qualname__", None)
    return repr(name) if isinstance(name, str) else f"this {type(obj).__name__}"
