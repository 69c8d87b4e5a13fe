"""Backups of stores: which process has which copy, what follows when one is lost, and
how stores move while a program trains. A store is a part of the variables, with the
slots of their optimizers; one process at a time serves it as its primary."""

from __future__ import annotations

from ._orders import Attach as Attach
from ._orders import Copy as Copy
from ._orders import CopyPhase as CopyPhase
from ._orders import Detach as Detach
from ._orders import Drop as Drop
from ._orders import Host as Host
from ._orders import Lose as Lose
from ._orders import Promote as Promote
from ._orders import Serve as Serve
from ._orders import Swap as Swap
from ._placement import StorePlacement as StorePlacement
from ._replication import Replication as Replication
from ._store_moves import StoreMoves as StoreMoves
from ._store_moves import plan_drain as plan_drain
from ._store_moves import plan_rebalance as plan_rebalance
from ._store_processes import CopiesStatus as CopiesStatus
from ._successors import successors as successors
