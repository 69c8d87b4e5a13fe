"""Parameter-server training for JAX, with the programming model of tf.distribute.

``import zstrat`` does not import jax: a daemon must choose devices and flags before jax
loads. Every public name is fetched from its package when it is first used; which
names there are, and of which package, says ``__init__.pyi``.
"""

from zstrat.doors import fetched_late

__version__ = "0.1.0"

__getattr__, __dir__ = fetched_late(__name__)
