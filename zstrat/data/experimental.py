"""TF's path of the sharding options of tf.data: the same names as there."""

from ._replica_rows import SHARD_HINT as SHARD_HINT
from ._replica_rows import AutoShardPolicy as AutoShardPolicy
from ._replica_rows import DistributeOptions as DistributeOptions
