"""`Pickler` and `Unpickler`: the only users of cloudpickle.

`_code` lists how objects are pickled. The pickler decides by the type of the object,
and by the exceptions that earlier attempts have found (`Ways`).
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import pickle
import sys
import threading
import types
import weakref
from contextlib import ExitStack, contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np

from zstrat.errors import ProtocolError
from zstrat.program.trace._tracebacks import is_installed
from zstrat.variables import is_machinery, is_weak

from ._classes import (
    functions_of,
    is_sentinel,
    reduced_class,
    reduced_enum,
    reduced_instance,
    reduced_plain,
)
from ._functions import (
    early,
    empty,
    is_cached,
    is_dispatching,
    reduced,
    reduced_dispatch,
    reduced_vjp,
    remade,
    remaining,
    whole,
)
from ._references import ModuleAttribute, Registration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WARN_FROM_BYTES: Final = 16 * 2**20
"""Bytes of a captured array from which on the pickler warns: captured arrays are
shipped to every worker, and become constants of the compiled program."""

_CIRCLES: Final = 8
"""Limit of recursive visits of a class through its own body, before the class is
made."""

# cloudpickle's registry of modules is global; two threads would mix their entries.
lock: Final = threading.RLock()
plain: Final[weakref.WeakSet[type]] = weakref.WeakSet()
"""Classes whose statement cannot run again: cloudpickle makes them blank, and fills
them."""


class Resource:
    """Base of handles that the receiving task replaces by an object which it has under
    a number."""

    resource: int


WIDE: Final = frozenset({"float64", "int64", "uint64", "complex128"})

_NAMED: Final = (type, jax.custom_jvp, jax.custom_vjp, type(jax.jit(len)))


@dataclasses.dataclass
class Ways:
    """The parts of one object that are not pickled in the way that their type
    suggests."""

    by_name: dict[int, tuple[Any, ModuleAttribute]] = dataclasses.field(
        default_factory=dict
    )
    """Objects that workers import by name, by ``id``."""
    late: set[type] = dataclasses.field(default_factory=set)
    """Classes whose attributes are set after the class is made, because the attributes
    refer to the class."""


class CircularBody(TypeError):
    """The body of a class contains an object that refers to the class."""

    def __str__(self) -> str:
        return (
            f"the body of {self.args[0].__qualname__} has an object that refers to it"
        )


class NotShippable(Exception):
    """A part of an object cannot be pickled (see the cause), or arrives changed (see
    the arguments)."""


class NotLoaded(NotShippable):
    """The pickled bytes cannot be loaded."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no stubs
    """cloudpickle's pickler with the rules that the docstring of `_code` lists."""

    def __init__(
        self,
        stream: BytesIO,
        keep: Callable[[pickle.PickleBuffer], bool] | None,
        ways: Ways,
        kept: list[Any] | None,
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=keep)
        self.large: list[Any] = []
        self.resources: list[Resource] = []
        self.made: set[type] = set()
        self.instances: list[Any] = []
        self.modules = ExitStack()
        self._known: set[str] = set()
        self._ways, self._kept = ways, kept
        # Read for every object, hence one attribute.
        self._is_special = bool(ways.by_name) or kept is not None
        self._empty: dict[int, Any] = {}
        self._entered: dict[type, int] = {}

    @staticmethod
    @contextmanager
    def session(
        keep: Callable[[pickle.PickleBuffer], bool] | None,
        ways: Ways,
        kept: list[Any] | None = None,
    ) -> Iterator[tuple[Pickler, BytesIO]]:
        """Yields a pickler and its stream.

        Args:
            kept: A list to which arrays and handles are added, which a trial load uses
                as they are, instead of pickling them.
        """
        stream = BytesIO()
        pickler = Pickler(stream, keep, ways, kept)
        # Leaves cloudpickle's registry, which is global, as it was.
        with pickler.modules:
            try:
                yield pickler, stream
            except Exception as error:  # user code runs in __reduce__: see `find_way`
                raise NotShippable from error

    def persistent_id(self, obj: Any) -> Any:
        if self._is_special and (special := self._special_id(obj)):
            return special
        if isinstance(obj, Resource):
            self.resources.append(obj)
            return "resource", obj.resource
        return None

    def _special_id(self, obj: Any) -> tuple[Any, ...] | None:
        if id(obj) in self._ways.by_name:
            return "reference", *self._ways.by_name[id(obj)][1]
        if self._kept is not None and _stays(obj):
            # cloudpickle would fill the program's own class, if it is one of `plain`.
            self._kept.append(obj)
            return "kept", len(self._kept) - 1
        return None

    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case types.FunctionType():
                return self._function(obj)
            case type():
                return self._class(obj)
            case jax.custom_vjp():
                return _by_other_name(obj) or reduced_vjp(obj)
            case types.ModuleType():
                # Registered, so cloudpickle sends the module by value.
                self._by_value(obj)
            case jax.core.Tracer():
                raise TypeError(f"it is traced by jax ({obj})")
            case jax.Array():
                return self._array(obj)
            case np.ndarray():
                if obj.nbytes > WARN_FROM_BYTES:
                    self.large.append(obj)
            case _:
                return self._instance(obj)
        return super().reducer_override(obj)

    def _function(self, fn: types.FunctionType) -> Any:
        # Before cloudpickle is asked, which decides by its registry of modules.
        self._by_value(sys.modules.get(fn.__module__ or ""))
        if is_dispatching(fn) and not goes_by_name(fn):
            return reduced_dispatch(fn)
        if installed := reduced(fn):
            return installed
        whole_fn = super().reducer_override(fn)
        if whole_fn is NotImplemented:
            return whole_fn
        # It belongs to a class that is being made, and is filled after that.
        if id(fn) in self._empty:
            return empty(whole_fn, early(fn, goes_by_name))
        return whole(whole_fn, early(fn, goes_by_name))

    def _class(self, cls: Any) -> Any:
        self._by_value(sys.modules.get(cls.__module__ or ""))
        # Somebody has said how classes of this metaclass are pickled.
        if type(cls) in copyreg.dispatch_table:
            return NotImplemented
        if cls.__module__ == "builtins" or goes_by_name(cls):
            return super().reducer_override(cls)
        if named := _by_other_name(cls):
            return named
        self.made.add(cls)
        registrations = Registration.of(cls)
        if cls in plain:
            reduction = super().reducer_override(cls)
            return (
                reduced_plain(reduction, registrations) if registrations else reduction
            )
        self._entered[cls] = self._entered.get(cls, 0) + 1
        if self._entered[cls] > _CIRCLES:
            raise CircularBody(cls)
        filled = [(fn, remaining(reduction)) for fn, reduction in self._emptied(cls)]
        if issubclass(cls, enum.Enum):
            return reduced_enum(cls, filled, registrations)
        # cloudpickle finds the virtual subclasses of an abstract class.
        virtual = super().reducer_override(cls)[2][0].get("_abc_impl", ())
        is_late = cls in self._ways.late
        return reduced_class(cls, filled, virtual, registrations, late=is_late)

    def _emptied(self, cls: type) -> list[tuple[types.FunctionType, Any]]:
        """Returns the functions of a class that are sent empty at first, each with its
        reduction."""
        functions = []
        for fn in functions_of(cls):
            if not is_dispatching(fn) and not goes_by_name(fn) and not reduced(fn):
                self._by_value(sys.modules.get(fn.__module__ or ""))
                reduction = super().reducer_override(fn)
                if reduction is not NotImplemented:
                    # Held, so its id is not given to another function meanwhile.
                    self._empty[id(fn)] = fn
                    functions.append((fn, reduction))
        return functions

    def _instance(self, obj: Any) -> Any:
        cls = type(obj)
        is_trial = self._kept is not None and cls.__module__ != "builtins"
        # What a trial loads is compared with these, as only their classes may change.
        if is_trial and not goes_by_name(cls):
            self.instances.append(obj)
        if is_cached(obj) and goes_by_name(obj):
            return NotImplemented
        return (
            _by_other_name(obj)
            or remade(obj)
            or reduced_instance(obj)
            or NotImplemented
        )

    def _array(self, array: jax.Array) -> Any:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            # Its numbers: an array of random keys has no buffer.
            data = np.asarray(jax.random.key_data(array))
            return _key, (data, str(jax.random.key_impl(array)))
        if array.nbytes > WARN_FROM_BYTES:
            self.large.append(array)
        if is_weak(array):
            return _weak, array.__reduce__()
        plain = np.asarray(array)
        return _wide if plain.dtype.name in WIDE else jnp.asarray, (plain,)

    def _by_value(self, module: types.ModuleType | None) -> None:
        if module is None or module.__name__ in self._known:
            return
        self._known.add(module.__name__)
        # What the user has registered stays so.
        registered = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        if not registered and module.__name__ in sys.modules and is_users(module):
            cloudpickle.register_pickle_by_value(module)
            self.modules.callback(cloudpickle.unregister_pickle_by_value, module)


class Unpickler(pickle.Unpickler):
    """Loads what a `Pickler` has written, and resolves references and resources in this
    process."""

    def __init__(
        self,
        stream: BytesIO,
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
                        f"resource {number} arrived at a task without resources"
                    )
                return self._resolve(number)
        raise ProtocolError(f"unknown kind of reference: {pid!r:.100}")


class TrialUnpickler(Unpickler):
    """Loads a trial: kept objects are used as they are, and modules that workers do not
    have are not imported."""

    def __init__(self, stream: BytesIO, kept: Sequence[Any], ways: Ways) -> None:
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
        # Found here in any case, as this is the program; a worker would have to import
        # it.
        cls = super().find_class(module, name)
        if module == "__main__" or is_users(sys.modules[module]):
            raise pickle.UnpicklingError(
                f"workers would import it as {name!r} from {module!r}, which they do "
                "not have"
            )
        return cls


def _stays(obj: object) -> bool:
    """Returns whether a trial uses the object as it is, without a copy."""
    if isinstance(obj, np.ndarray):
        return not obj.dtype.hasobject
    if isinstance(obj, type):
        return obj in plain
    return isinstance(obj, (jax.Array, Resource))


def goes_by_name(obj: Any) -> bool:
    """Returns whether workers import the object: it is an attribute of an installed
    module."""
    if isinstance(obj, types.ModuleType):
        return sys.modules.get(obj.__name__) is obj and not is_users(obj)
    if not isinstance(obj, (type, types.FunctionType)) and not is_cached(obj):
        return False
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or is_users(module):
        return False
    attribute: Any = module
    for name in obj.__qualname__.split("."):
        attribute = getattr(attribute, name, None)
    return attribute is obj


def _by_other_name(obj: Any) -> Any:
    """Reduces an attribute of an installed module to the name of that attribute; None
    for other objects.

    For classes and functions with another ``__qualname__``, and for sentinels: objects
    without state, which are compared by identity.
    """
    named = isinstance(obj, _NAMED)
    if not named and not is_sentinel(obj):
        return None
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or is_users(module):
        return None
    name = getattr(obj, "__name__", "")
    if getattr(module, name, None) is not obj:
        if named and not isinstance(obj, type):
            return None
        name = next((n for n, v in vars(module).items() if v is obj), "")
    return (getattr, (module, name)) if name else None


def is_users(module: types.ModuleType) -> bool:
    """Returns whether a module is part of the user's program, which workers do not
    have."""
    filename = module.__dict__.get("__file__")
    package = module.__name__.partition(".")[0]
    if package in ("__main__", "zstrat") or not isinstance(filename, str):
        return False  # cloudpickle ships __main__ by value anyway
    return not is_machinery(filename) and not is_installed(filename)


def is_file_of_users(module: object) -> bool:
    return isinstance(module, types.ModuleType) and is_users(module)


def _wide(value: Any) -> jax.Array:
    """Makes a 64-bit jax array even if jax is limited to 32 bits, because parameter
    servers also run the optimizers of programs that use 64 bits."""
    with jax.enable_x64(True):
        return jnp.asarray(value)


def _weak(make: Callable[..., jax.Array], args: tuple[Any, ...]) -> jax.Array:
    """Loads a weakly typed array, which only jax's own pickle keeps."""
    with jax.enable_x64(True):
        return make(*args)


def _key(data: np.ndarray, impl: str) -> jax.Array:
    key: jax.Array = jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    return key
