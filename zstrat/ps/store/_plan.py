"""The base of all plans, and the plan of a read that takes long.

To add such a read, have the function in its row of `OPERATIONS` (`zstrat.ps._requests`)
return a `ReadPlan`: what computes on any thread, and what makes the answer of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.wire import Message


class StorePlan:
    """What a request has to have computed before the store commits it; each has
    ``generation``, that of `HeldVariables` when it was made, and ``compute()``."""

    __slots__ = ()


@final
@dataclass(slots=True)
class ReadPlan(StorePlan):
    """A read: computes something of variables, and answers with it.

    Args:
        work: An estimate of the bytes that are moved.
        read: Computes, on any thread. It needs no lease (`Cell.look`), as the request
            holds the names of what it reads; an answer with views of a value does.
        answer: Makes the answer of what ``read`` has returned, on the loop.
    """

    generation: int
    work: int
    read: Callable[[], Any]
    answer: Callable[[Any], Message]
    found: Any = None

    def compute(self) -> None:
        """Raises what ``read`` does."""
        self.found = self.read()
