"""Ranks that compute together: schedules, groups, memory that one host shares."""

from typing import TYPE_CHECKING

from zstrat.doors import by_name, fetched_late

if TYPE_CHECKING:
    from ._buckets import Bucket as Bucket
    from ._buckets import buckets as buckets
    from ._compression import Compression as Compression
    from ._compression import Compressor as Compressor
    from ._engine import CallKind as CallKind
    from ._engine import CollectiveCall as CollectiveCall
    from ._reduction import narrow as narrow
    from ._reduction import reduction_of as reduction_of
    from ._terms import ReduceOp as ReduceOp
    from .group._group import Group as Group
    from .group._node import GROUP_MESSAGES as GROUP_MESSAGES
    from .group._node import GroupNode as GroupNode
    from .group._pending import Pending as Pending
    from .group._runtime import announce as announce
    from .group._runtime import withdraw as withdraw
    from .memory._engines import SharedMemory as SharedMemory
    from .schedules._algorithms import ALGORITHMS as ALGORITHMS
    from .schedules._algorithms import algorithm_named as algorithm_named
    from .schedules._choice import Choices as Choices
    from .schedules._choice import Measurement as Measurement
    from .schedules._choice import Rule as Rule
    from .schedules._choice import choices_from as choices_from
    from .schedules._choice import fitted as fitted
    from .schedules._choice import read_choices as read_choices
    from .schedules._progress import ScheduleProgress as ScheduleProgress
    from .schedules._progress import parts as parts
    from .schedules._schedule import Act as Act
    from .schedules._schedule import Schedule as Schedule
    from .schedules._schedule import first_place as first_place
else:
    __getattr__, __dir__ = fetched_late(
        __name__,
        by_name(
            {
                "._buckets": "Bucket buckets",
                "._compression": "Compression Compressor",
                "._engine": "CallKind CollectiveCall",
                "._reduction": "narrow reduction_of",
                "._terms": "ReduceOp",
                ".group._group": "Group",
                ".group._node": "GROUP_MESSAGES GroupNode",
                ".group._pending": "Pending",
                ".group._runtime": "announce withdraw",
                ".memory._engines": "SharedMemory",
                ".schedules._algorithms": "ALGORITHMS algorithm_named",
                ".schedules._choice": (
                    "Choices Measurement Rule choices_from fitted read_choices"
                ),
                ".schedules._progress": "ScheduleProgress parts",
                ".schedules._schedule": "Act Schedule first_place",
            }
        ),
    )
