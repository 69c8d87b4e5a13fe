"""Training of Keras models by a strategy: `fit` runs on its replicas or workers.

    with strategy.scope():
        model = keras.Sequential([...])
        model.compile(optimizer="adam", loss="mse")
    model.fit(x, y, epochs=3)

This package is imported automatically when a scope is entered in a program that has
imported keras. Workers and parameter servers receive programs that jax has traced, so
they need no Keras. `shipped` has the classes of these programs, and workers import it
through this package, so this file imports nothing of Keras.
"""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
