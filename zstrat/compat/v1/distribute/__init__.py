"""``tf.compat.v1.distribute``: every name is the public one of zstrat.

Names are fetched when they are first used, as zstrat's own are.
"""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
