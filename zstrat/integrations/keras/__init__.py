"""Keras models that train where a strategy says.

    with strategy.scope():
        model = keras.Sequential([...])
        model.compile(optimizer="adam", loss="mse")
    model.fit(x, y, epochs=3)

Imported by itself when a scope is entered in a program that has imported keras. What
travels to workers and parameter servers is what jax has traced, so they need no Keras;
`shipped` has the classes of it, and so this file imports nothing of Keras.
"""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
