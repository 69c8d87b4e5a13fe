"""Parameter servers that come and go while a program trains, and stores that move."""

from __future__ import annotations

from ._levelling import leaving as leaving
from ._levelling import levelled as levelled
from ._store_moves import StoreMoves as StoreMoves
