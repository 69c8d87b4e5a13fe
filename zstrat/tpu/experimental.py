"""The names in ``tf.tpu.experimental``."""

from ._device_assignment import DeviceAssignment as DeviceAssignment
from ._device_assignment import DeviceOrderMode as DeviceOrderMode
from ._topology import Topology as Topology
from ._topology import initialize_tpu_system as initialize_tpu_system
