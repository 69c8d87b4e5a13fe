"""Connects Keras' methods with the current strategy.

Entering a scope for the first time after keras was imported wraps methods of
`keras.Model`. `compile` decides which strategy trains a model: the one in whose scope
it is called, or else the one in whose scope the model was created. Models compiled and
created outside of scopes are not changed.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Final

import keras

from zstrat.program import get_worker_context
from zstrat.strategy import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    get_strategy,
    has_strategy,
)

from ._private import check, give_back, take_over, training_of, whole_batches
from ._strategies import ReplicaTraining, ServerTraining

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._training import Training

_LOOPS: Final = ("fit", "evaluate", "predict")
_BATCHES: Final = ("train_on_batch", "test_on_batch")

_IN_STEP: Final = (OneDeviceStrategy, MirroredStrategy, MultiWorkerMirroredStrategy)

# Weak, as a model is freed with the last reference to it.
_made_in: Final[weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()
"""For each model the strategy in whose scope it was created."""


def install() -> bool:
    """Wraps the methods of `keras.Model`. Returns False if they were wrapped
    already."""
    model: Any = keras.Model
    if getattr(model, "_zstrat_is_watched", False):
        return False
    model._zstrat_is_watched = True
    model.__new__ = staticmethod(_noted(model.__new__))
    # In the classes that define them: Keras compares `compile` of a model with that.
    owners = {
        name: next(each for each in model.__mro__ if name in vars(each))
        for name in ("compile", *_LOOPS, *_BATCHES)
    }
    owners["compile"].compile = _compiled(model.compile)
    for name in (*_LOOPS, *_BATCHES):
        setattr(owners[name], name, _looped(name, getattr(model, name)))
    return True


def _noted(new: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(new)
    def noted(cls: type, *args: Any, **kwargs: Any) -> Any:
        made = new(cls, *args, **kwargs)
        if has_strategy():
            _made_in[made] = get_strategy()
        return made

    return noted


def _compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def compiled(model: Any, *args: Any, **kwargs: Any) -> None:
        # This scope may be that of another strategy, or of none.
        give_back(model)
        method(model, *args, **kwargs)
        strategy = get_strategy() if has_strategy() else _made_in.get(model)
        if strategy is not None and not _is_in_step():
            check()
            take_over(model, _training(model, strategy))

    return compiled


def _is_in_step() -> bool:
    """Returns whether this code runs in a step on a worker, to which a compiled model
    may have been sent."""
    try:
        get_worker_context()
    except RuntimeError:
        return False
    return True


def _training(model: Any, strategy: Any) -> Training:
    if keras.distribution.distribution() is not None:
        raise NotImplementedError(
            "keras.distribution has a distribution, and the model is compiled under "
            f"{strategy!r:.100}: one of them can divide the batches. Call "
            "keras.distribution.set_distribution(None), or compile outside of the scope"
        )
    if isinstance(strategy, ParameterServerStrategy):
        return ServerTraining(model, strategy)
    if isinstance(strategy, _IN_STEP):
        return ReplicaTraining(model, strategy)
    raise NotImplementedError(
        f"fit of a Keras model under {strategy!r:.100}: use a "
        "zs.ParameterServerStrategy, a MirroredStrategy or a "
        "MultiWorkerMirroredStrategy; or train with model.stateless_call in a step of "
        "your own, which runs under every strategy (docs/libraries.md); or make and "
        "compile the model outside of the scope, to train in this process alone"
    )


def _looped(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def looped(model: Any, *args: Any, **kwargs: Any) -> Any:
        training = training_of(model)
        if training is None:
            return method(model, *args, **kwargs)
        with whole_batches():
            # One batch has neither epochs nor callbacks; Keras' method is enough.
            if name in _BATCHES:
                return method(model, *args, **kwargs)
            return training.call(name, method, args, kwargs)

    return looped
