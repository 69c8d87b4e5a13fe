"""TF's path of the sharding options of tf.data: the same names as there."""

from ._options import SHARD_HINT as SHARD_HINT
from ._options import AutoShardPolicy as AutoShardPolicy
from ._options import DistributeOptions as DistributeOptions
