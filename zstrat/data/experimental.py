"""Where tf.data keeps what shares datasets out: the same names under the same path."""

from ._options import SHARD_HINT as SHARD_HINT
from ._options import AutoShardPolicy as AutoShardPolicy
from ._options import DistributeOptions as DistributeOptions
