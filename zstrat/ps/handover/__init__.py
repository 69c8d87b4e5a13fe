"""What a parameter server that stops leaves to the process that goes on for it."""

from __future__ import annotations

from ._handover import HandedOverStore as HandedOverStore
from ._handover import Handover as Handover
from ._handover import StoreRole as StoreRole
