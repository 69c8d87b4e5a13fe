"""Saving and restoring what a program has: checkpoints, exports, evaluation beside."""

from ._checkpoint import Checkpoint as Checkpoint
from ._restore import RestoreStatus as RestoreStatus
from ._rotation import CheckpointManager as CheckpointManager
from ._rotation import CheckpointWarning as CheckpointWarning
from ._rotation import latest_checkpoint as latest_checkpoint
