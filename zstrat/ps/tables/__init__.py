"""Tables of any id: which rows they have."""

from ._index import NO_ROW, IdIndex

__all__ = ["NO_ROW", "IdIndex"]
