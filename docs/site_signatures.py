"""How the reference shows that a class or a method is called, where Python sees it
otherwise.

mkdocstrings shows the parameters that are written at a function. A class that is made
by ``__new__`` has its signature there, and a method under ``@parameters_of(other)`` has
that of ``other``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from griffe import Class, Function


class SignaturesFromElsewhere(griffe.Extension):
    """Shows the parameters of ``__new__`` as those of ``__init__``, and of the function
    that ``@parameters_of`` names as those of the method."""

    def on_class(self, *, cls: Class, **given: Any) -> None:
        """Called by griffe for each class, once its members are known."""
        made = cls.members.get("__new__")
        if isinstance(made, griffe.Function) and "__init__" not in cls.members:
            call = griffe.Function("__init__", parameters=made.parameters)
            cls.set_member("__init__", call)
        for method in cls.members.values():
            if isinstance(method, griffe.Function):
                _sign(method, cls)


def _sign(method: Function, cls: Class) -> None:
    for decorator in method.decorators:
        name = str(decorator.value).removeprefix("parameters_of(").removesuffix(")")
        signed = cls.members.get(name)
        if isinstance(signed, griffe.Function):
            own, taken = list(method.parameters), list(signed.parameters)
            method.parameters = griffe.Parameters(own[0], *taken[1:])
