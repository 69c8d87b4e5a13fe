"""References by name, for objects that cannot be pickled but are in a file of workers.

Examples: a lock, an open file, a class that is registered with jax by functions. A
worker with the same source imports the module and reads the attribute. This is the
exception, because an import gives the object of the source, not its present state.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable


class ModuleAttribute(NamedTuple):
    """An attribute of a module with the digest of the module's source."""

    module: str
    name: str
    file: str
    digest: bytes
    is_class: bool

    def find_or_stand_in(self) -> Any:
        """Imports the attribute; if that fails, returns a stand-in that raises at use.

        A shipped function may never be called.
        """
        try:
            return self.find()
        except ImportError as error:
            if self.is_class:
                return _AbsentClass(self.name, (), {"message": str(error)})
            return AbsentValue(str(error))

    def find(self) -> Any:
        """Imports the attribute.

        Raises:
            ImportError: The module is not here, or its source differs.
        """
        file = _file(self.module)
        if file is None:
            raise ImportError(_words(self, f"has no module {self.module!r}"))
        if _digest(file) != self.digest:
            raise ImportError(_words(self, f"has another source, {file}"))
        value: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            value = getattr(value, part)
        return value


class AbsentValue:
    """Stands for a value that this process cannot import; raises at its first use."""

    def __init__(self, message: str) -> None:
        self.message = message

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise ImportError(self.message)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle and others read these of any object
            raise AttributeError(name)
        self._refuse()

    __call__ = __enter__ = __exit__ = __getitem__ = __setitem__ = _refuse
    __iter__ = __next__ = __len__ = __contains__ = __bool__ = _refuse


class _AbsentClass(type):
    """Stands for a class that this process cannot import; raises at its first use."""

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
    """Finds the value among the attributes of modules."""
    for module in modules:
        name = _name_in(module, value)
        file = None if name is None else _file(module.__name__)
        if name and file:
            kind = isinstance(value, type)
            return ModuleAttribute(module.__name__, name, file, _digest(file), kind)
    return None


def _name_in(module: types.ModuleType, value: object) -> str | None:
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
