"""The sharding options of tf.data, under the path and the names that TF gives them."""

from ._replica_rows import SHARD_HINT as SHARD_HINT
from ._replica_rows import AutoShardPolicy as AutoShardPolicy
from ._replica_rows import DistributeOptions as DistributeOptions
