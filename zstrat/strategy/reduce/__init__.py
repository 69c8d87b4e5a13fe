"""Values of replicas brought together: on one device, over several, over processes."""

from __future__ import annotations

from ._cross_device import checked_pairs as checked_pairs
from ._options import ChosenGroup as ChosenGroup
from ._options import called_with as called_with
from ._places import places as places
from ._places import put as put
from ._values import is_whole as is_whole
