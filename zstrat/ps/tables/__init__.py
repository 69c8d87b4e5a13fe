"""Tables of any id: which rows they have, and values whose rows come and go."""

from ._growing_cell import GrowingCell
from ._index import NO_ROW, IdIndex

__all__ = ["NO_ROW", "GrowingCell", "IdIndex"]
