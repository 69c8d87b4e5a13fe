"""Input pipelines: what a worker's step functions draw their batches from. No jax."""

from ._context import InputContext as InputContext
from ._dataset import AUTOTUNE as AUTOTUNE
from ._dataset import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from ._dataset import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from ._dataset import Dataset as Dataset
from ._elements import Elements as Elements
from ._tree import own as own
