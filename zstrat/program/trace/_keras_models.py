"""A word for steps that call a Keras model, whose values they keep as they were.

A Keras model reads variables of its own when it is called. In a step these are
constants of the trace, as any captured array is, and on a worker those of the model
that came with the step. Nothing of Keras is imported here: the method is wrapped when a
step is traced in a program that has imported it.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import jax

from zstrat.variables import recorder

from ._context import worker_context
from ._eager import Immediate

if TYPE_CHECKING:
    from collections.abc import Callable


class KerasWarning(UserWarning):
    """A step computes with the values that a Keras model had first, or a model trains
    without the strategy that is current."""


_WORDS: Final = (
    "the Keras model {name!r} is called in a step, which keeps the values that the "
    "model has now: they are constants of the step, whatever is trained later. Call "
    "model.stateless_call(params, state, x) with variables of zs.create_variables: "
    "docs/libraries.md of zstrat shows it"
)

_watched: Final[weakref.WeakSet[type]] = weakref.WeakSet()
"""Layer classes that warn already."""
_inside: Final[ContextVar[bool]] = ContextVar("zstrat_inside_keras", default=False)
"""Whether a layer is being called; layers inside belong to the same model."""


def watch_keras_models() -> None:
    """Makes Keras' layers warn if they are called in a step with their own values."""
    layer: Any = getattr(sys.modules.get("keras"), "Layer", None)
    if layer is not None and layer not in _watched:
        _watched.add(layer)
        layer.__call__ = _warning(layer.__call__)


def _warning(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def warning(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _inside.get() or recorder.get() is None:
            return method(self, *args, **kwargs)
        token = _inside.set(True)
        try:
            if _keeps_values(self):
                words = _WORDS.format(name=self.name)
                warnings.warn(words, KerasWarning, stacklevel=2)
            return method(self, *args, **kwargs)
        finally:
            _inside.reset(token)

    return warning


def _keeps_values(layer: Any) -> bool:
    """Returns whether it computes with arrays from before the step. (In
    ``stateless_call`` it computes with values from the step.)"""
    if isinstance(recorder.get(), Immediate) and worker_context.get() is None:
        return False  # an eager step of this process: it has the model itself
    values = [variable.value for variable in layer.variables]
    return any(
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in values
    )
