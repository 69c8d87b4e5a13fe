"""A word for programs that train a Keras model in the scope of a strategy.

Keras makes its own variables and trains with them in its own process, whatever strategy
is current. Nothing of Keras is imported here: the two methods that lead there are
wrapped when a scope is entered in a program that has imported it.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final

from ._frames import current

if TYPE_CHECKING:
    from collections.abc import Callable

_TRAINS: Final = ("compile", "fit")
_WORDS: Final = (
    "model.{name} of Keras in strategy.scope() of {strategy!r:.100}: the variables of "
    "a Keras model are its own, and model.fit trains them in this process alone, "
    "without the strategy. Give their values to zs.create_variables, compute with "
    "model.stateless_call in a zs.function, and put the trained values back: "
    "examples/keras_ps.py of zstrat does"
)


_watched: Final[weakref.WeakSet[type]] = weakref.WeakSet()
"""Classes of models whose methods warn already."""


class KerasWarning(UserWarning):
    """A Keras model is about to train without the strategy that is current."""


def watch_keras() -> None:
    """Has ``compile`` and ``fit`` of Keras' models warn if a strategy is current."""
    model = getattr(sys.modules.get("keras"), "Model", None)
    if model is None or model in _watched:
        return
    _watched.add(model)
    for name in _TRAINS:
        setattr(model, name, _warning(name, getattr(model, name)))


def _warning(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> Any:
        frame = current()
        if frame is not None and not frame.strategy.is_default:
            words = _WORDS.format(name=name, strategy=frame.strategy)
            warnings.warn(words, KerasWarning, stacklevel=2)
        return method(*args, **kwargs)

    return told
