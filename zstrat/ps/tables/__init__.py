"""Tables of any id: which rows they have."""

from ._index import ABSENT, IdIndex

__all__ = ["ABSENT", "IdIndex"]
