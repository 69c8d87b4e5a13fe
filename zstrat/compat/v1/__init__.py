"""What TF keeps under ``tf.compat.v1``."""

from . import distribute as distribute
