"""The part of TF 1.12's ``tf.contrib`` that concerns distribution."""

from . import distribute as distribute
