"""Aliases for ``tf.distribute.experimental.coordinator``."""

from zstrat.coordinator import ClusterCoordinator as ClusterCoordinator
from zstrat.coordinator import PerWorkerValues as PerWorkerValues
from zstrat.coordinator import RemoteValue as RemoteValue
