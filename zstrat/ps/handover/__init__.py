"""What a parameter server that stops leaves to the process that goes on for it."""

from __future__ import annotations

from ._handover import Handover as Handover
from ._handover import LeftStore as LeftStore
from ._handover import StoreRole as StoreRole
