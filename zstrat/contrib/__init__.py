"""TF 1.12's ``tf.contrib``, as far as it is about distribution."""

from . import distribute as distribute
