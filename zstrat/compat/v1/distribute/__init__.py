"""``tf.compat.v1.distribute``: every name is an alias of zstrat's public name.

Names are imported when they are first used, as in zstrat itself.
"""

from zstrat.doors import fetched_late

__getattr__, __dir__ = fetched_late(__name__)
