"""Keras computes with jax in these tests, and is imported before a scope is entered."""

import os

os.environ["KERAS_BACKEND"] = "jax"
