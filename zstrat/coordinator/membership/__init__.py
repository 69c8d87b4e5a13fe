"""The workers of a cluster, which may change while a program trains, and the share of
the data that each worker reads."""

from __future__ import annotations

from ._membership import AdmitWorker as AdmitWorker
from ._membership import InputPipelines as InputPipelines
from ._membership import Membership as Membership
from ._membership import MoveWorker as MoveWorker
from ._membership import RefuseWorker as RefuseWorker
from ._membership import ReleaseWorker as ReleaseWorker
