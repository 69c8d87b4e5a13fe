"""Calls callbacks for the batches in order, each when its step has ended.

Keras calls `on_train_batch_end` when a step has been scheduled, which on a cluster is
long before it has run. Here, one callback list holds the callbacks of the user and the
progress bar, and Keras treats that list as a single callback. Events of an epoch are
passed on at once; events of a batch are passed on when `Training` reports that the step
of the batch, and all steps before it, have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import keras
from keras.callbacks import Callback, CallbackList

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_EVENTS: Final[Mapping[str, tuple[Callable[..., None], Callable[..., None]]]] = {
    "train": (CallbackList.on_train_batch_begin, CallbackList.on_train_batch_end),
    "test": (CallbackList.on_test_batch_begin, CallbackList.on_test_batch_end),
    "predict": (CallbackList.on_predict_batch_begin, CallbackList.on_predict_batch_end),
}


class Scheduling(Protocol):
    """The interface that `InOrder` needs of `Training`, which runs the steps."""

    def scheduled(self, begin: int, end: int) -> None:
        """Called after a step was scheduled, with the numbers of its first and last
        batch."""

    def begin(self, mode: str) -> None:
        """Called before the first step of an epoch."""

    def deliver_all(self) -> None:
        """Waits for all scheduled steps, and calls the callbacks for their batches."""


class _Last(Callback):  # type: ignore[misc]  # Keras has no types
    """A callback that keeps the logs of an epoch as the callbacks before it left
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: Mapping[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs = logs or {}


class InOrder(CallbackList):  # type: ignore[misc]
    """The callbacks of one call of `fit`, `evaluate` or `predict`.

    Args:
        callbacks: The callbacks that the user gave.
        verbose: As in Keras; unless it is 0 there is a progress bar.
    """

    def __init__(self, scheduling: Scheduling, callbacks: Any, verbose: Any) -> None:
        self._scheduling, self._verbose = scheduling, verbose
        self._begin = 0
        self._last = _Last()
        mine = keras.tree.flatten(callbacks) if callbacks else []
        super().__init__([*mine, self._last], add_progbar=verbose != 0)
        self.is_empty: Final = not mine and verbose == 0

    def set_params(self, params: Any) -> None:
        super().set_params({**params, "verbose": self._verbose} if params else params)

    def deliver(self, mode: str, begin: int, end: int, logs: Any) -> None:
        """Calls ``on_*_batch_begin`` and ``on_*_batch_end`` of the callbacks for some
        batches."""
        on_begin, on_end = _EVENTS[mode]
        on_begin(self, begin)
        on_end(self, end, logs)

    def _begun(self, batch: int, logs: Any = None) -> None:
        self._begin = batch

    def _ended(self, batch: int, logs: Any = None) -> None:
        self._scheduling.scheduled(self._begin, batch)

    on_train_batch_begin = on_test_batch_begin = on_predict_batch_begin = _begun
    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _ended

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._scheduling.deliver_all()
        super().on_epoch_end(epoch, logs)
        # Keras copies the logs for a list; its history is to see what callbacks add.
        logs.update(self._last.logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._scheduling.begin("train")
        super().on_epoch_begin(epoch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        self._scheduling.deliver_all()
        self._scheduling.begin("test")
        super().on_test_begin(logs)

    def on_test_end(self, logs: Any = None) -> None:
        self._scheduling.deliver_all()
        super().on_test_end(logs)

    def on_predict_begin(self, logs: Any = None) -> None:
        self._scheduling.begin("predict")
        super().on_predict_begin(logs)

    def on_predict_end(self, logs: Any = None) -> None:
        self._scheduling.deliver_all()
        super().on_predict_end(logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._scheduling.deliver_all()
        super().on_train_end(logs)
