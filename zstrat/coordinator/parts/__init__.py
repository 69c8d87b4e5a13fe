"""The objects that a coordinator is built from, for programs that build their own, as
the simulation of the tests does on one event loop without threads."""

from __future__ import annotations

from zstrat.coordinator._calls import Code as Code
from zstrat.coordinator._calls import PickledArguments as PickledArguments
from zstrat.coordinator._calls import ScheduledCall as ScheduledCall
from zstrat.coordinator._cluster import Cluster as Cluster
from zstrat.coordinator._dispatch import Dispatcher as Dispatcher
from zstrat.coordinator._engine import ClosureEngine as ClosureEngine
from zstrat.coordinator._queue import Closure as Closure
from zstrat.coordinator._queue import Effect as Effect
from zstrat.coordinator._queue import Queue as Queue
from zstrat.coordinator._queue import QueuePhase as QueuePhase
from zstrat.coordinator._resources import Record as Record
from zstrat.coordinator._servers import ParameterServers as ParameterServers
from zstrat.coordinator._session_pause import cut_of as cut_of
from zstrat.coordinator._values import Kept as Kept
from zstrat.coordinator._values import Result as Result
from zstrat.coordinator._waiting import Cancelling as Cancelling
from zstrat.coordinator.leases import Draw as Draw
from zstrat.coordinator.leases import LeaseBook as LeaseBook
