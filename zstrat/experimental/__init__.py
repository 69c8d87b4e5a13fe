"""Aliases for names under ``tf.distribute.experimental``, at the same paths.

Law of the package: nothing is defined here. Each name is the one of `zstrat` itself.
"""

from zstrat.saving import PreemptionCheckpointHandler as PreemptionCheckpointHandler
from zstrat.saving import TerminationConfig as TerminationConfig
from zstrat.strategy import CentralStorageStrategy as CentralStorageStrategy
from zstrat.strategy import CommunicationImplementation as CommunicationImplementation
from zstrat.strategy import CommunicationOptions as CommunicationOptions
from zstrat.strategy import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from zstrat.strategy import ParameterServerStrategy as ParameterServerStrategy
from zstrat.strategy import TPUStrategy as TPUStrategy
from zstrat.strategy import ValueContext as ValueContext

from . import coordinator as coordinator
from . import partitioners as partitioners

CollectiveCommunication = CommunicationImplementation
CollectiveHints = CommunicationOptions
