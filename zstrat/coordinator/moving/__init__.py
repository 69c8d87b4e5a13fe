"""Parameter servers that come and go while a program trains, and stores that move."""

from __future__ import annotations

from ._rebalancing import plan_drain as plan_drain
from ._rebalancing import plan_rebalance as plan_rebalance
from ._store_moves import StoreMoves as StoreMoves
