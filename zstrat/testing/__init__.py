"""Tools to test programs that use zstrat; zstrat itself does not import them.

Faults are context managers, in force during their block. All of them work with
``with``; `in_thread` adapts slow ones to ``async with``. pytest is not required.
"""

from ._cluster import DaemonCluster as DaemonCluster
from ._cluster import ProcessResources as ProcessResources
from ._cluster import RelayedCluster as RelayedCluster
from ._cluster import ThreadCluster as ThreadCluster
from ._cluster import frozen as frozen
from ._cluster import full_disk as full_disk
from ._cluster import in_thread as in_thread
from ._cluster import leak_check as leak_check
from ._link import FakeClock as FakeClock
from ._link import FakeLink as FakeLink
from ._link import FakeRemote as FakeRemote
from ._link import FakeTimer as FakeTimer
from ._link import through_the_codec as through_the_codec
from ._network import NoNamespacesError as NoNamespacesError
from ._network import Relay as Relay
from ._network import SwitchedNetwork as SwitchedNetwork
from ._network import switched_network as switched_network
