"""Ships the registration of the user's pytree classes along with the classes.

jax keeps pytree classes in a registry of the process. A class that is pickled by value
arrives on a worker as a new class, unknown to jax there, and would count as a leaf.
What jax knows of a class is found from outside: an instance without a life is
flattened, and its children tell which fields are data.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import jax
from jax import tree_util


class Way(enum.Enum):
    """How a class was registered."""

    DATACLASS = "register_dataclass"
    NODE_CLASS = "register_pytree_node_class"
    KEYS_CLASS = "register_pytree_with_keys_class"


class Registration(NamedTuple):
    """A class, how to register it, and its fields if it is a dataclass."""

    cls: type
    way: Way
    data: tuple[str, ...] = ()
    meta: tuple[str, ...] = ()

    @staticmethod
    def of(cls: type) -> list[Registration]:
        """The registration of a class, if it has one that can be found."""
        if issubclass(cls, tuple) or not _is_registered(cls):
            return []
        if "tree_unflatten" in dir(cls):
            with_keys = "tree_flatten_with_keys" in dir(cls)
            return [Registration(cls, Way.KEYS_CLASS if with_keys else Way.NODE_CLASS)]
        if dataclasses.is_dataclass(cls):
            data = _data_fields(cls)
            names = [field.name for field in dataclasses.fields(cls)]
            meta = tuple(name for name in names if name not in data)
            return [Registration(cls, Way.DATACLASS, data, meta)]
        return []


def register(registration: Registration) -> None:
    """Registers a class that arrived, unless jax knows it."""
    cls: Any = registration.cls
    if _is_registered(cls):
        return
    match registration.way:
        case Way.DATACLASS:
            data, meta = list(registration.data), list(registration.meta)
            tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)
        case Way.NODE_CLASS:
            tree_util.register_pytree_node_class(cls)
        case Way.KEYS_CLASS:
            tree_util.register_pytree_with_keys_class(cls)


def _blank(cls: type) -> Any:
    """An instance whose fields are strings that name them."""
    blank: Any = object.__new__(cls)
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            object.__setattr__(blank, field.name, field.name)
    return blank


def _is_registered(cls: type) -> bool:
    try:
        blank = _blank(cls)
        leaves = jax.tree.leaves(blank)
    except TypeError:  # it cannot be made without arguments (a class written in C)
        return False
    except Exception:  # its own flatten ran and missed its attributes: so it has one
        return True
    return not (len(leaves) == 1 and leaves[0] is blank)


def _data_fields(cls: type) -> tuple[str, ...]:
    blank = _blank(cls)
    children = tree_util.tree_flatten_with_path(blank)[0]
    return tuple(str(leaf) for _, leaf in children)
