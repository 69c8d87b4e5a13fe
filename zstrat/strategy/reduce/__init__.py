"""Reductions of the values of replicas: on one device, across devices, across
processes."""

from __future__ import annotations

from zstrat.strategy._options import ChosenGroup as ChosenGroup
from zstrat.strategy._options import called_with as called_with

from ._cross_device import checked_pairs as checked_pairs
from ._on_devices import places as places
from ._on_devices import put as put
from ._values import is_whole as is_whole
