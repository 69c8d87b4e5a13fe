"""The cores of a TPU system, and their assignment to replicas. Computes with
coordinates alone, not with devices."""

from . import experimental as experimental
from ._topology import devices_by_task as devices_by_task
from ._topology import (
    experimental_connect_to_cluster as experimental_connect_to_cluster,
)
