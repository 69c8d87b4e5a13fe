"""Ranks that compute together: schedules, groups, memory that one host shares."""

from ._schedule import Act as Act
from ._schedule import Action as Action
from ._schedule import Schedule as Schedule
from ._terms import ReduceOp as ReduceOp
