"""A step's body with the scope of a strategy around it, as it is shipped.

The coordinator traces a step in its strategy's scope, and a worker must trace the same
body with the same answer of ``get_strategy()``. A worker has entered no scope, so the
body brings its own: wherever it is traced or run, at the cost of that alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class Scoping(Protocol):
    """A strategy: pickled, it arrives as what stands for it on a worker."""

    def scope(self) -> AbstractContextManager[object]: ...


@final
class ScopedBody:
    """Calls ``step`` in the scope of ``strategy``."""

    __slots__ = ("step", "strategy")

    def __init__(self, step: Callable[..., Any], strategy: Scoping) -> None:
        self.step, self.strategy = step, strategy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.strategy.scope():
            return self.step(*args, **kwargs)

    def __reduce__(self) -> Any:
        return ScopedBody, (self.step, self.strategy)
