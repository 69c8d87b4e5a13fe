"""Tables of any id: the index from ids to rows, and values whose rows are added and
removed."""

from ._growing_cell import GrowingCell
from ._index import NO_ROW, IdIndex

__all__ = ["NO_ROW", "GrowingCell", "IdIndex"]
