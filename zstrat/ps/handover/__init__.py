"""The state that a parameter server leaves to its next process."""

from __future__ import annotations

from ._handover import HandedOverStore as HandedOverStore
from ._handover import Handover as Handover
from ._handover import StoreRole as StoreRole
