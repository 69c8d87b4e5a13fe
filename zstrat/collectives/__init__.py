"""Ranks that compute together: schedules, groups, memory that one host shares."""

from ._engine import Call as Call
from ._engine import Kind as Kind
from ._memory import SharedMemory as SharedMemory
from ._progress import Codec as Codec
from ._progress import Progress as Progress
from ._progress import Send as Send
from ._progress import parts as parts
from ._reduction import Reduction as Reduction
from ._reduction import reduction_of as reduction_of
from ._ring import ring_all_gather as ring_all_gather
from ._ring import ring_all_reduce as ring_all_reduce
from ._ring import ring_reduce_scatter as ring_reduce_scatter
from ._schedule import Act as Act
from ._schedule import Action as Action
from ._schedule import Schedule as Schedule
from ._terms import ReduceOp as ReduceOp
