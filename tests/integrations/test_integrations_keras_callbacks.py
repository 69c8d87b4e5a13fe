"""Callbacks of Keras see under a strategy what Keras shows them."""

import numpy as np
import pytest

import zstrat as zs

keras = pytest.importorskip("keras")
from keras_fits import QUIET, X, Y, compared, dense  # noqa: E402  # imports keras

callbacks = keras.callbacks
pytestmark = QUIET


class Seen(callbacks.Callback):
    """Notes every event with its logs; the values of the model are not asked for."""

    def __init__(self):
        super().__init__()
        self.events = []

    def _note(name):
        def note(self, *arguments, logs=None):
            number = [each for each in arguments if not isinstance(each, dict)]
            found = [each for each in (*arguments, logs) if isinstance(each, dict)]
            self.events.append((name, number, dict(*found)))

        return note

    for _when in ("begin", "end"):
        for _what in ("train", "epoch", "train_batch", "test", "test_batch"):
            locals()[f"on_{_what}_{_when}"] = _note(f"{_what} {_when}")


def test_callbacks_see_what_keras_shows_them(tmp_path):
    seen = []

    def made():
        seen.append(Seen())
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return [
            seen[-1],
            callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            callbacks.ReduceLROnPlateau(patience=1, min_delta=1.0),
            callbacks.EarlyStopping(
                patience=2, min_delta=0.5, restore_best_weights=True
            ),
            callbacks.ModelCheckpoint(folder / "model.keras"),
            callbacks.CSVLogger(folder / "log.csv"),
            callbacks.BackupAndRestore(folder / "backup"),
            callbacks.TerminateOnNaN(),
        ]

    compared(dense, epochs=5, validation_data=(X, Y), callbacks=made)
    its, mine = (each.events for each in seen)
    assert [each[:2] for each in mine] == [each[:2] for each in its]
    for (_, _, logs), (_, _, expected) in zip(mine, its, strict=True):
        assert logs == pytest.approx(expected, rel=1e-5)
    logs = [(tmp_path / name / "log.csv").read_text().count("\n") for name in "01"]
    assert logs[0] == logs[1] > 2
    saved = keras.models.load_model(tmp_path / "1" / "model.keras")
    assert saved.optimizer.iterations.value == 3 * 4


def test_batches_are_delivered_in_order_when_their_steps_have_ended():
    from zstrat.integrations.keras.callbacks import InOrder

    class Scheduling:
        def scheduled(self, begin, end):
            events.append(("scheduled", begin, end))

        def begin(self, mode):
            events.append(("begin", mode))

        def deliver_all(self):
            events.append("delivered")

    events, seen = [], Seen()
    every = InOrder(Scheduling(), [seen], verbose=0)
    every.on_epoch_begin(0)
    every.on_train_batch_begin(0)
    every.on_train_batch_end(1, {"loss": 9.0})
    assert [each[0] for each in seen.events] == ["epoch begin"]
    every.deliver("train", 0, 1, {"loss": 2.0})
    every.on_epoch_end(0, {"loss": 2.0})
    assert events == [("begin", "train"), ("scheduled", 0, 1), "delivered"]
    assert seen.events[1:] == [
        ("train_batch begin", [0], {}),
        ("train_batch end", [1], {"loss": 2.0}),
        ("epoch end", [0], {"loss": 2.0}),
    ]


@pytest.mark.skipif(
    hasattr(keras.Model, "_enforce_jax_state_sharding"),
    reason="this version of Keras itself fails when a callback of fit calls predict",
)
def test_callbacks_may_use_the_model():
    """Also between batches, when other steps are under way."""

    class Uses(callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.found = []

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.found.append(self.model.predict(X[:3], verbose=0).sum())
            self.found.append(logs["loss"])

        def on_epoch_end(self, epoch, logs=None):
            self.found += self.model.evaluate(X, Y, verbose=0, callbacks=[Seen()])
            self.model.optimizer.learning_rate = 0.5

    used = [Uses(), Uses()]
    each = iter(used)
    compared(
        lambda: dense(optimizer=keras.optimizers.SGD(0.1)),
        validation_data=(X, Y),
        callbacks=lambda: [next(each)],
    )
    assert len(used[0].found) == 2 * (4 + 1 + 2)
    np.testing.assert_allclose(used[1].found, used[0].found, rtol=1e-4)


def test_a_callback_that_raises_gets_no_further_batches():
    class Raises(callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1
            if batch == 1:
                raise LookupError("enough")

    raises = Raises()
    with zs.OneDeviceStrategy("CPU:0").scope():
        model = dense()
    with pytest.raises(LookupError):
        model.fit(X, Y, batch_size=16, verbose=0, callbacks=[raises])
    assert raises.batches == 2
    before = model.optimizer.iterations.value
    model.fit(X, Y, batch_size=16, verbose=0)
    assert model.optimizer.iterations.value == before + 4
