"""A word for programs that train a Keras model in the scope of a strategy.

Keras makes its own variables and trains with them in its own process, whatever strategy
is current. Nothing of Keras is imported here: the methods that do so are wrapped when a
scope is entered in a program that has imported it.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from zstrat.program import KerasWarning as KerasWarning

from ._frames import current

if TYPE_CHECKING:
    from collections.abc import Callable

_LOCAL: Final = (
    "compile",
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)
_WORDS: Final = (
    "model.{name} of Keras in strategy.scope() of {strategy!r:.100}: the variables of "
    "a Keras model are its own, and its methods train and compute in this process "
    "alone, without the strategy. Outside of the scope there is no such warning. To "
    "train with the strategy give their values to zs.create_variables, compute with "
    "model.stateless_call in a zs.function, and put the trained values back: "
    "examples/keras_ps.py of zstrat does"
)


_watched: Final[weakref.WeakSet[type]] = weakref.WeakSet()
"""Classes of models whose methods warn already."""


_inside: Final[ContextVar[bool]] = ContextVar("zstrat_inside_fit", default=False)
"""Whether one of them runs, which calls others."""


def watch_keras() -> None:
    """Has the methods of Keras' models that train or compute by themselves warn if a
    strategy is current."""
    model = getattr(sys.modules.get("keras"), "Model", None)
    if model is None or model in _watched:
        return
    _watched.add(model)
    for name in _LOCAL:
        if (method := getattr(model, name, None)) is not None:
            setattr(model, name, _warning(name, method))


def _warning(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def warned(*args: Any, **kwargs: Any) -> Any:
        frame = current()
        is_ours = frame is not None and not frame.strategy.is_default
        if frame is not None and is_ours and not _inside.get():
            words = _WORDS.format(name=name, strategy=frame.strategy)
            warnings.warn(words, KerasWarning, stacklevel=2)
        token = _inside.set(True)
        try:
            return method(*args, **kwargs)
        finally:
            _inside.reset(token)

    return warned
