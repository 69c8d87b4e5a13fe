"""The step functions of one object: those of its class, bound to it.

A step that is a method has programs of its own for each object, so the bound `Function`
is kept in the object, in one private entry of its ``__dict__``. It is kept by the
unbound function and not by a name: a subclass and its parent may have a ``step`` each.

Law of the file: a copy of the object, shallow, deep or pickled, begins with none.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ._function import Function

_ENTRY: Final = "_zstrat_bound_functions"
_lock: Final = threading.Lock()


class BoundFunctions:
    """What is kept in ``owner``."""

    __slots__ = ("_bound", "owner")

    def __init__(self, owner: object = None) -> None:
        self.owner = owner
        self._bound: dict[Function, Function] = {}

    def of(self, unbound: Function, instance: object) -> Function:
        """The function bound to the instance; the same object at every call."""
        found = self._bound.get(unbound)
        if found is None:
            body = unbound.body.__get__(instance)
            made = type(unbound)(body, eager=unbound.eager)
            found = self._bound.setdefault(unbound, made)
        return found

    def __reduce__(self) -> Any:
        return BoundFunctions, ()


def bound_functions(instance: object, name: str) -> BoundFunctions:
    """Those kept in the instance.

    Raises:
        TypeError: It is a class, or has no ``__dict__`` to keep them in.
    """
    if isinstance(instance, type):
        raise TypeError(
            f"the step function {name!r} is a class method: a zs.function is bound to "
            "objects. Make it a function outside of the class, or a static method "
            "(@staticmethod above @zs.function), and name the class in its body"
        )
    try:
        kept = vars(instance)
    except TypeError:
        raise TypeError(
            f"the step function {name!r} is a method of {type(instance).__name__}, "
            "whose objects have only __slots__ and no place for their programs: add "
            "'__dict__' to __slots__, or make it a function outside of the class"
        ) from None
    found = kept.get(_ENTRY)
    if found is None or found.owner is not instance:
        with _lock:
            found = kept.get(_ENTRY)
            # A shallow copy came with the original's.
            if found is None or found.owner is not instance:
                found = kept[_ENTRY] = BoundFunctions(instance)
    bound: BoundFunctions = found
    return bound
