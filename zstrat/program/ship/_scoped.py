"""A step's body with the scope of a strategy around it, as it is shipped.

The coordinator traces a step in its strategy's scope, and a worker must trace the same
body with the same answer of ``get_strategy()``. A worker has entered no scope, so the
body brings its own: wherever it is traced or run, at the cost of that alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

from jax.tree_util import register_dataclass

from zstrat.variables import recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager


class Scoping(Protocol):
    """A strategy: pickled, it arrives as what stands for it on a worker."""

    def scope(self) -> AbstractContextManager[object]: ...


@runtime_checkable
class TakesValues(Protocol):
    """A recorder that takes values of variables which are not where it runs."""

    def take_values(self, values: Mapping[int, Any]) -> None:
        """They are those of the variables with these keys, during the whole step."""
        ...


@final
@dataclass(frozen=True)
class CarriedValues:
    """Values of variables of the coordinator's process, as they were when the step was
    scheduled; as the first argument they travel with it. Keys are those of the
    variables; values are arrays, which are traced as those of any argument are."""

    keys: tuple[int, ...]
    values: tuple[Any, ...]

    def give(self) -> None:
        """Hands them to the recorder of the step that is being traced."""
        current = recorder.get()
        assert isinstance(current, TakesValues), current
        current.take_values(dict(zip(self.keys, self.values, strict=True)))


register_dataclass(CarriedValues, data_fields=["values"], meta_fields=["keys"])


@final
class ScopedBody:
    """Calls ``step`` in the scope of ``strategy``, with the values that were carried to
    it."""

    __slots__ = ("step", "strategy")

    def __init__(self, step: Callable[..., Any], strategy: Scoping) -> None:
        self.step, self.strategy = step, strategy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], CarriedValues):
            args[0].give()
            args = args[1:]
        with self.strategy.scope():
            return self.step(*args, **kwargs)

    def __reduce__(self) -> Any:
        return ScopedBody, (self.step, self.strategy)
