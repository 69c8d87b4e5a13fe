"""Names at the paths that they have in ``tf.distribute.experimental``.

Law of the package: nothing is defined here. Each name is the one of `zstrat` itself.
"""

from zstrat.strategy import CentralStorageStrategy as CentralStorageStrategy
from zstrat.strategy import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from zstrat.strategy import ParameterServerStrategy as ParameterServerStrategy
from zstrat.strategy import TPUStrategy as TPUStrategy

from . import coordinator as coordinator
from . import partitioners as partitioners
