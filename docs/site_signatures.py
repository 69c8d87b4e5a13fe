"""How the reference shows that a class is called, where Python sees it otherwise.

mkdocstrings shows the signature of ``__init__``. A class that is made by ``__new__``
has its signature there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from griffe import Class


class SignatureOfNew(griffe.Extension):
    """Shows the arguments of ``__new__`` as those of ``__init__``."""

    def on_class(self, *, cls: Class, **given: Any) -> None:
        """Called by griffe for each class, once its members are known."""
        made = cls.members.get("__new__")
        if isinstance(made, griffe.Function) and "__init__" not in cls.members:
            call = griffe.Function("__init__", parameters=made.parameters)
            cls.set_member("__init__", call)
