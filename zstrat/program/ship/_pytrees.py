"""Ships the registration of the user's pytree classes with the classes.

jax keeps pytree classes in a registry of the process. A class that is pickled by value
is a new class on a worker, unknown to jax there, and would count as a leaf. The
registration is found from outside: a blank instance is flattened, and its children show
which fields are data. The two functions of ``register_pytree_node`` cannot be found
this way, so such a class is refused.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Final, NamedTuple

import jax
from jax import tree_util

HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: written in Python


class RegisteredPytree(enum.Enum):
    """The ways to register a class."""

    DATACLASS = "register_dataclass"
    NODE_CLASS = "register_pytree_node_class"
    KEYS_CLASS = "register_pytree_with_keys_class"
    STATIC = "register_static"
    ITSELF = "its metaclass or __init_subclass__"


class Registration(NamedTuple):
    """A class, the way to register it, and its fields if it is a dataclass."""

    cls: type
    way: RegisteredPytree
    data: tuple[str, ...] = ()
    meta: tuple[str, ...] = ()

    @staticmethod
    def of(cls: Any) -> list[Registration]:
        """Finds the registration of a class, if it has one.

        Raises:
            TypeError: It is registered by functions (``register_pytree_node``).
        """
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
            names = [f.name for f in dataclasses.fields(cls) if f.init]
            meta = tuple(name for name in names if name not in data)
            return [Registration(cls, RegisteredPytree.DATACLASS, data, meta)]
        if _may_register_itself(cls):
            return [Registration(cls, RegisteredPytree.ITSELF)]
        raise TypeError(_unknown(cls))


def register(registration: Registration) -> None:
    """Registers a class that arrived, unless it is registered.

    Raises:
        TypeError: It should have registered itself, and has not.
    """
    cls: Any = registration.cls
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
    """Makes an instance whose fields are their own names.

    Raises:
        TypeError: The class cannot be made without arguments.
    """
    builtin: Any = next(base for base in cls.__mro__ if not base.__flags__ & HEAP_TYPE)
    if builtin is cls:
        raise TypeError(f"{cls.__qualname__} is written in C")
    blank = builtin.__new__(cls)
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
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
    return not (len(leaves) == 1 and leaves[0] is blank)


def _is_static(cls: type) -> bool:
    blank = _blank(cls)
    try:
        structure: Any = jax.tree.structure(blank)  # its stubs lack node_data
        data = structure.node_data()
    except Exception:  # as above: a flatten of its own
        return False
    return data is not None and data[1] is blank


def _data_fields(cls: type) -> tuple[str, ...] | None:
    """Returns the fields that are children; None if the children are not fields."""
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
    """Returns whether a base runs code when the class is made, so also at the
    receiver."""
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
