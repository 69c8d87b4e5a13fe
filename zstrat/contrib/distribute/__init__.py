"""``tf.contrib.distribute`` of TF 1.12: strategies of towers.

A *tower* is a replica, and a *distribution strategy* a strategy, by their old names;
the engines underneath are strategies of zstrat.
"""

from zstrat.strategy import MultiStepContext as MultiStepContext

from ._strategy import DistributionStrategy as DistributionStrategy
from ._strategy import PerDeviceDataset as PerDeviceDataset
from ._towers import ParameterServerStrategy as ParameterServerStrategy
from ._towers import SessionConfig as SessionConfig
from ._towers import TowerContext as TowerContext
from ._towers import get_cross_tower_context as get_cross_tower_context
from ._towers import get_distribution_strategy as get_distribution_strategy
from ._towers import get_tower_context as get_tower_context
from ._towers import has_distribution_strategy as has_distribution_strategy
from ._towers import in_cross_tower_context as in_cross_tower_context
from ._towers import require_tower_context as require_tower_context
