"""A group of ranks: forms generations, makes collective calls, and leaves."""

from __future__ import annotations

from zstrat.collectives._engine import ConnectionEnded as ConnectionEnded
from zstrat.collectives._engine import Differs as Differs
from zstrat.collectives._engine import Overdue as Overdue

from ._executors import CallTurns as CallTurns
from ._generation import Generation as Generation
from ._inquiry import FORGOTTEN as FORGOTTEN
from ._inquiry import FailureInquiry as FailureInquiry
from ._inquiry import verdict as verdict
from ._mesh import Mesh as Mesh
from ._rendezvous import GroupSeat as GroupSeat
from ._rendezvous import MembershipState as MembershipState
from ._rendezvous import RendezvousService as RendezvousService
from ._rendezvous import seat_of as seat_of
from ._runtime import GroupRuntime as GroupRuntime
from ._socket_engine import LARGEST as LARGEST
from ._socket_engine import SocketEngine as SocketEngine
