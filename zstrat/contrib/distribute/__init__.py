"""``tf.contrib.distribute`` of TF 1.12: strategies with towers.

*Tower* is the old name of a replica, and *distribution strategy* that of a strategy.
Each of these strategies calls a strategy of zstrat, its engine.
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
