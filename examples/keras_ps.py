"""A Keras model, trained on parameter servers by Keras' own ``fit``.

Two lines are new: the scope, and the strategy that it is of. The rest is a program of
Keras; its data, its callbacks and its history are as ever.

Two ps and two workers on this machine, the digits of scikit-learn.

    python examples/keras_ps.py
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported

import argparse
import sys

import keras
from digits import load_digits

import zstrat as zs

GOAL = 0.9


def make_model():
    """Logits [n, 10] of images [n, 8, 8, 1], compiled."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.003),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    parser = argparse.ArgumentParser(description="A Keras model on parameter servers.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    (images, labels), test = load_digits()
    with zs.LocalCluster(2, options.workers) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            model = make_model()
        history = model.fit(
            images,
            labels,
            batch_size=64,
            epochs=options.epochs,
            callbacks=[
                keras.callbacks.ReduceLROnPlateau("loss", patience=1),
                keras.callbacks.EarlyStopping("loss", patience=3),
            ],
            verbose=0,
        )
        _, accuracy = model.evaluate(*test, verbose=0)
    loss = history.history["loss"][-1]
    print(f"loss {loss:.3f}, test accuracy {accuracy:.1%} (goal {GOAL:.0%})")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
