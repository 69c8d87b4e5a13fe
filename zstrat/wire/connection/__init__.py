"""One connection between two tasks, without I/O: `Peer` decides, and this package has
its parts."""

from __future__ import annotations

from ._body import ALIGNMENT as ALIGNMENT
from ._body import aligned as aligned
from ._deadlines import Carried as Carried
from ._deadlines import Carrier as Carrier
from ._greeting import described as described
from ._greeting import mismatch as mismatch
from ._greeting import task_name as task_name
from ._orders import Answered as Answered
from ._orders import Closed as Closed
from ._orders import Failed as Failed
from ._orders import Greeted as Greeted
from ._orders import Noticed as Noticed
from ._orders import Opened as Opened
from ._orders import Order as Order
from ._orders import OrderState as OrderState
from ._orders import Requested as Requested
from ._outbox import Frames as Frames
from ._peer import Peer as Peer
from ._peer import failure as failure
