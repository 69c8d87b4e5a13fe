"""Aliases for names under ``tf.compat.v1``."""

from . import distribute as distribute
