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

import hashlib
import io
import pickle
import sys
import threading
import types
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np

from zstrat.errors import ProtocolError, VersionMismatchError
from zstrat.program.trace._where import is_installed
from zstrat.variables import is_machinery

from ._pickle_diagnostics import find_value, unpicklable
from ._pytrees import Registration, register
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
# cloudpickle's registry of modules is global; dumps of two threads would mix theirs.
_lock: Final = threading.RLock()


class Resource:
    """Base of handles whose object lives on the receiving task under a number."""

    resource: int


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
    try:
        with _lock, _Pickler.session(keep) as (pickler, stream):
            # In this order: pickling the object finds the registrations.
            pickler.dump((obj, pickler.registrations))
    except _Refused as error:
        raise TypeError(_words(obj, str(error.__cause__))) from error.__cause__
    return _MAGIC + _VERSION + stream.getvalue(), pickler.large


class _Refused(Exception):
    """Something was not pickled; the cause says why."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no stubs
    """cloudpickle with the rules of the module's docstring."""

    def __init__(
        self, stream: io.BytesIO, keep: Callable[[pickle.PickleBuffer], bool] | None
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=keep)
        self.registrations: list[Registration] = []
        self.large: list[Any] = []
        self.modules = ExitStack()
        self._known: set[str] = set()

    @staticmethod
    @contextmanager
    def session(
        keep: Callable[[pickle.PickleBuffer], bool] | None,
    ) -> Iterator[tuple[_Pickler, io.BytesIO]]:
        stream = io.BytesIO()
        pickler = _Pickler(stream, keep)
        with pickler.modules:
            try:
                yield pickler, stream
            except Exception as error:  # user code runs in __reduce__: see `_words`
                raise _Refused from error

    def persistent_id(self, obj: Any) -> Any:
        return ("resource", obj.resource) if isinstance(obj, Resource) else None

    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case types.FunctionType() | type():
                self._by_value(sys.modules.get(obj.__module__ or ""))
                if isinstance(obj, type) and _is_by_value(obj):
                    self.registrations.extend(Registration.of(obj))
                elif isinstance(obj, types.FunctionType) and (made := reduced(obj)):
                    return made
            case jax.custom_vjp():
                return reduced_vjp(obj)
            case types.ModuleType():
                self._by_value(obj)
            case jax.core.Tracer():
                raise TypeError(f"it is traced by jax ({obj})")
            case jax.Array():
                return self._array(obj)
            case np.ndarray() if obj.nbytes > LARGE:
                self.large.append(obj)
        return super().reducer_override(obj)

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
            case ("resource", int(number)):
                if self._resolve is None:
                    raise ProtocolError(
                        f"resource {number} arrived where no resources are"
                    )
                return self._resolve(number)
        raise ProtocolError(f"an unknown kind of reference arrived: {pid!r:.100}")


def _is_by_value(cls: type) -> bool:
    """Whether a class arrives as a new one, not as that of an imported module."""
    module = sys.modules.get(cls.__module__)
    local = cls.__module__ == "__main__" or "<locals>" in cls.__qualname__
    return module is None or local or _is_users(module)


def _is_users(module: types.ModuleType) -> bool:
    """Whether a module is part of the user's program, which workers do not have."""
    filename = module.__dict__.get("__file__")
    package = module.__name__.partition(".")[0]
    if package in ("__main__", "zstrat") or not isinstance(filename, str):
        return False  # cloudpickle ships __main__ by value anyway
    return not is_machinery(filename) and not is_installed(filename)


def _key(data: np.ndarray, impl: str) -> jax.Array:
    key: jax.Array = jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    return key


def _picklable(obj: object) -> bool:
    try:
        _dumped_plainly(obj)
    except _Refused:
        return False
    return True


def _dumped_plainly(obj: object) -> None:
    with _lock, _Pickler.session(None) as (pickler, _):
        pickler.dump(obj)


def _words(obj: object, reason: str) -> str:
    path, culprit = unpicklable(obj, _picklable)
    what = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
    place = f"{path} is a {what}, which" if path else f"a {what}"
    return (
        f"{_name(obj)} cannot be shipped to another task: {place} cannot be pickled "
        f"({reason}). Create it inside of the function that uses it, or capture plain "
        "data, arrays and zs.Variable objects"
    )


def _name(obj: object) -> str:
    name = getattr(obj, "__qualname__", None)
    return repr(name) if isinstance(name, str) else f"this {type(obj).__name__}"
