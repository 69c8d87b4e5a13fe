"""Aliases for ``tf.distribute.experimental.partitioners``."""

from zstrat.variables.partitioners import (
    FixedShardsPartitioner as FixedShardsPartitioner,
)
from zstrat.variables.partitioners import MaxSizePartitioner as MaxSizePartitioner
from zstrat.variables.partitioners import MinSizePartitioner as MinSizePartitioner
from zstrat.variables.partitioners import Partitioner as Partitioner
