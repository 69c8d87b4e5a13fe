"""Parameter-server training for JAX, with the programming model of tf.distribute.

``import zstrat`` does not import jax: a daemon must choose devices and flags before jax
loads. Every public name is imported from its package when it is first used;
``__init__.pyi`` lists the names and their packages.
"""

from zstrat.doors import fetched_late

__version__ = "0.1.0"

__getattr__, __dir__ = fetched_late(__name__)
