"""References by name in a pickle, and registrations of pytree classes.

Objects that cannot be pickled, but are in a file that workers have, are sent by name: a
lock, an open file, a class that is registered with jax by functions. A worker with the
same source imports the module and reads the attribute. This is the exception, because
an import gives the object of the source, not its present state.

The registration of a pytree class is sent with the class. jax keeps pytree classes in a
registry of the process. A class that is pickled by value is a new class on a worker,
unknown to jax there, and would count as a leaf. jax does not show the registration, so
it is found by a trial: a blank instance is flattened, and its children show which
fields are data. The two functions of ``register_pytree_node`` cannot be found this way,
so such a class is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import jax
from jax import tree_util

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable


class ModuleAttribute(NamedTuple):
    """A reference to an attribute of a module, with the digest of the module's
    source."""

    module: str
    name: str
    file: str
    digest: bytes
    is_class: bool

    def find_or_stand_in(self) -> Any:
        """Imports the attribute; if that fails, returns an object that raises when it
        is used, because a shipped function may never use it."""
        try:
            return self.find()
        except ImportError as error:
            if self.is_class:
                return _AbsentClass(self.name, (), {"message": str(error)})
            return AbsentValue(str(error))

    def find(self) -> Any:
        """Imports the attribute.

        Raises:
            ImportError: The module is not installed here, or its source differs.
        """
        file = _file(self.module)
        if file is None:
            raise ImportError(_words(self, f"has no module {self.module!r}"))
        # Before the import, as another source must not run here.
        if _digest(file) != self.digest:
            raise ImportError(_words(self, f"has another source, {file}"))
        value: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            value = getattr(value, part)
        return value


class AbsentValue:
    """Replaces a value that this process cannot import; raises at its first use."""

    def __init__(self, message: str) -> None:
        self.message = message

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise ImportError(self.message)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle and others read these of any object
            raise AttributeError(name)
        self._refuse()

    # Python looks these up in the class, past ``__getattr__``.
    __call__ = __enter__ = __exit__ = __getitem__ = __setitem__ = _refuse
    __iter__ = __next__ = __len__ = __contains__ = __bool__ = _refuse


class _AbsentClass(type):
    """Replaces a class that this process cannot import; raises at its first use."""

    message: str

    def _refuse(cls, *args: object, **kwargs: object) -> NoReturn:
        raise ImportError(cls.message)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        cls._refuse()

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]
    ) -> Any:
        def refuse(cls: type, *args: object, **kwargs: object) -> NoReturn:
            raise ImportError(namespace["message"])

        return super().__new__(mcs, name, bases, {**namespace, "__new__": refuse})

    __call__ = __instancecheck__ = __subclasscheck__ = _refuse


def attribute(
    value: object, modules: Iterable[types.ModuleType]
) -> ModuleAttribute | None:
    """Finds the value among the attributes of modules; returns a reference to it, or
    None."""
    for module in modules:
        name = _name_in(module, value)
        file = None if name is None else _file(module.__name__)
        if name and file:
            kind = isinstance(value, type)
            return ModuleAttribute(module.__name__, name, file, _digest(file), kind)
    return None


def _name_in(module: types.ModuleType, value: object) -> str | None:
    # A function or class is found by its own name first, which needs no search.
    qualname = getattr(value, "__qualname__", None)
    if isinstance(qualname, str) and "<" not in qualname:
        attribute: Any = module
        for part in qualname.split("."):
            attribute = getattr(attribute, part, None)
        if attribute is value:
            return qualname
    return next((name for name, v in vars(module).items() if v is value), None)


def _file(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a package above it is missing; __main__
        return None
    if spec is None or not spec.has_location or not spec.origin:
        return None
    return spec.origin if Path(spec.origin).is_file() else None


def _digest(file: str) -> bytes:
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).digest()


def _words(wanted: ModuleAttribute, lack: str) -> str:
    places = ", ".join(path or os.getcwd() for path in sys.path)
    return (
        f"{wanted.module}.{wanted.name} cannot be shipped, so each task imports it "
        f"from the source of the program, {wanted.file}; this task {lack} (it runs in "
        f"{os.getcwd()} and searches {places}). Give all workers the same file: "
        "install it, or add its folder to their PYTHONPATH; or create it in the "
        "function that uses it. A pytree class can be shipped if it is registered by "
        "register_pytree_node_class or register_dataclass of jax.tree_util"
    )


HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: written in Python


class RegisteredPytree(enum.Enum):
    """The ways to register a pytree class with jax."""

    DATACLASS = "register_dataclass"
    NODE_CLASS = "register_pytree_node_class"
    KEYS_CLASS = "register_pytree_with_keys_class"
    STATIC = "register_static"
    ITSELF = "its metaclass or __init_subclass__"


class Registration(NamedTuple):
    """The registration of a class with jax: the class, the way to register it, and its
    fields if it is a dataclass."""

    cls: type
    way: RegisteredPytree
    data: tuple[str, ...] = ()
    meta: tuple[str, ...] = ()

    @staticmethod
    def of(cls: Any) -> list[Registration]:
        """Returns the registration of a class; [] if it has none.

        Raises:
            TypeError: The class is registered by functions (``register_pytree_node``).
        """
        # jax knows each NamedTuple without a registration.
        if issubclass(cls, tuple) or not _is_registered(cls):
            return []
        if "tree_unflatten" in dir(cls):
            with_keys = "tree_flatten_with_keys" in dir(cls)
            return [
                Registration(
                    cls,
                    RegisteredPytree.KEYS_CLASS
                    if with_keys
                    else RegisteredPytree.NODE_CLASS,
                )
            ]
        if _is_static(cls):
            return [Registration(cls, RegisteredPytree.STATIC)]
        data = _data_fields(cls)
        if data is not None:
            # jax builds a dataclass by its constructor, which takes only these.
            names = [f.name for f in dataclasses.fields(cls) if f.init]
            meta = tuple(name for name in names if name not in data)
            return [Registration(cls, RegisteredPytree.DATACLASS, data, meta)]
        if _may_register_itself(cls):
            return [Registration(cls, RegisteredPytree.ITSELF)]
        raise TypeError(_unknown(cls))


def register(registration: Registration) -> None:
    """Registers a class that arrived with jax, unless it is registered.

    Raises:
        TypeError: The class should have registered itself, and has not.
    """
    cls: Any = registration.cls
    # By its own statement, or when it arrived before.
    if _is_registered(cls):
        return
    match registration.way:
        case RegisteredPytree.DATACLASS:
            data, meta = list(registration.data), list(registration.meta)
            tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)
        case RegisteredPytree.NODE_CLASS:
            tree_util.register_pytree_node_class(cls)
        case RegisteredPytree.KEYS_CLASS:
            tree_util.register_pytree_with_keys_class(cls)
        case RegisteredPytree.STATIC:
            tree_util.register_static(cls)
        case RegisteredPytree.ITSELF:
            raise TypeError(_unknown(cls))


def _blank(cls: type) -> Any:
    """Makes an instance whose fields have their own names as values.

    Raises:
        TypeError: The class cannot be made without arguments.
    """
    # ``object.__new__`` refuses a class with a base in C.
    builtin: Any = next(base for base in cls.__mro__ if not base.__flags__ & HEAP_TYPE)
    if builtin is cls:
        raise TypeError(f"{cls.__qualname__} is written in C")
    blank = builtin.__new__(cls)
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            # Past the ``__setattr__`` of a frozen dataclass.
            object.__setattr__(blank, field.name, field.name)
    return blank


def _is_registered(cls: type) -> bool:
    try:
        blank = _blank(cls)
    except TypeError:  # abstract, or a class written in C
        return False
    try:
        leaves = jax.tree.leaves(blank)
    except Exception:  # its own flatten ran without attributes: so it has one
        return True
    # What jax does not know is a leaf itself.
    return not (len(leaves) == 1 and leaves[0] is blank)


def _is_static(cls: type) -> bool:
    blank = _blank(cls)
    try:
        structure: Any = jax.tree.structure(blank)  # its stubs lack node_data
        data = structure.node_data()
    except Exception:  # as above: a flatten of its own
        return False
    # A static node has itself as its auxiliary data.
    return data is not None and data[1] is blank


def _data_fields(cls: type) -> tuple[str, ...] | None:
    """Returns the names of the fields that are pytree children; None if the children
    are not fields."""
    if not dataclasses.is_dataclass(cls):
        return None
    try:
        children = tree_util.tree_flatten_with_path(_blank(cls))[0]
    except Exception:  # flatten computes with the fields, which are strings here
        return None
    leaves = tuple(leaf for _, leaf in children)
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    data = [name for name in names if name in leaves]
    return leaves if len(data) == len(leaves) else None


def _may_register_itself(cls: type) -> bool:
    """Returns whether a base class runs code when the class is made, and so may
    register it at the receiver, too."""
    makers = [base for base in cls.__mro__[1:] if "__init_subclass__" in vars(base)]
    modules = {type(cls).__module__, *(maker.__module__ for maker in makers)}
    return not modules <= {"builtins", "abc", "typing"}


def _unknown(cls: type) -> str:
    return (
        f"{cls.__qualname__} is registered as a pytree by functions that jax does not "
        "give back, so a worker could not register it: use register_dataclass or "
        "register_pytree_node_class of jax.tree_util, or import the class from an "
        "installed package"
    )
