"""Input pipelines: the datasets from which a worker's step functions draw their
batches. Imports no jax."""

from . import experimental as experimental
from ._autoshard import Allotment as Allotment
from ._autoshard import allotted as allotted
from ._autoshard import as_dataset as as_dataset
from ._autoshard import is_steady as is_steady
from ._autoshard import not_batched as not_batched
from ._batches import IndexedPass as IndexedPass
from ._dataset import AUTOTUNE as AUTOTUNE
from ._dataset import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from ._dataset import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from ._dataset import Dataset as Dataset
from ._elements import ClosingIterator as ClosingIterator
from ._elements import Elements as Elements
from ._elements import ending as ending
from ._foreign import is_huggingface as is_huggingface
from ._foreign import parse_no_flags as parse_no_flags
from ._leased import Lease as Lease
from ._leased import LeasedElements as LeasedElements
from ._leased import LeasedSource as LeasedSource
from ._leaves import dense as dense
from ._leaves import require_data as require_data
from ._lineage import ShapePromise as ShapePromise
from ._parallel import Prefetcher as Prefetcher
from ._passes import Recipe as Recipe
from ._position import MOST_DRAWN as MOST_DRAWN
from ._position import CheckpointableIterator as CheckpointableIterator
from ._position import DatasetIterator as DatasetIterator
from ._position import Position as Position
from ._position import plain_place as plain_place
from ._position import require_fit as require_fit
from ._replica_rows import SHARD_HINT as SHARD_HINT
from ._replica_rows import AutoShardPolicy as AutoShardPolicy
from ._replica_rows import Cut as Cut
from ._replica_rows import Cutter as Cutter
from ._replica_rows import DistributeOptions as DistributeOptions
from ._replica_rows import InputContext as InputContext
from ._replica_rows import Options as Options
from ._replica_rows import Span as Span
from ._replica_rows import Worker as Worker
from ._replica_rows import batch_sizes_for_worker as batch_sizes_for_worker
from ._spec import TensorSpec as TensorSpec
from ._tree import kind_of as kind_of
from ._tree import native as native
from ._tree import own as own

TextLineDataset = Dataset.from_text_lines
TFRecordDataset = Dataset.from_tfrecords
