"""Hands the state of a parameter server to the next process of its task."""

from __future__ import annotations

from ._handover import HandedOverStore as HandedOverStore
from ._handover import Handover as Handover
from ._handover import StoreRole as StoreRole
