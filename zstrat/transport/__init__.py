"""Sockets, connections and keys: how tasks reach each other. The door to ZeroMQ."""

from ._address import check_address as check_address
from ._curve import Security as Security
from ._curve import generate_keys as generate_keys
from ._curve import key_names as key_names
from ._echo import Echo as Echo
from ._endpoint import Absorber as Absorber
from ._endpoint import Endpoint as Endpoint
from ._handling import Handler as Handler
from ._identity import hello as hello
from ._identity import new_incarnation as new_incarnation
from ._link import Link as Link
from ._loop import Bell as Bell
from ._loop import LoopBell as LoopBell
from ._loop import Portal as Portal
from ._loop import ThreadBell as ThreadBell
from ._loop import close_portals as close_portals
from ._loop import new_event_loop as new_event_loop
from ._loop import outcome as outcome
from ._loop import run as run
from ._pool import POOL as POOL
from ._pool import Pool as Pool
from ._remote import Remote as Remote
from ._secrecy import Secrecy as Secrecy
from ._shared import Arena as Arena
from ._shared import Mapping as Mapping
