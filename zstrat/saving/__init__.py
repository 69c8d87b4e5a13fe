"""Saving and restoring the state of a program: checkpoints, exports, and evaluation in
a separate process."""

from ._checkpoint import Checkpoint as Checkpoint
from ._evaluator import JsonLines as JsonLines
from ._evaluator import MetricsExport as MetricsExport
from ._evaluator import MetricsWriter as MetricsWriter
from ._evaluator import SidecarEvaluator as SidecarEvaluator
from ._evaluator import TensorBoardEvents as TensorBoardEvents
from ._export import export_orbax as export_orbax
from ._export import export_safetensors as export_safetensors
from ._export import export_safetensors_async as export_safetensors_async
from ._preemption import Countdown as Countdown
from ._preemption import PreemptionCheckpointHandler as PreemptionCheckpointHandler
from ._preemption import PreemptionHandler as PreemptionHandler
from ._preemption import TerminationConfig as TerminationConfig
from ._preemption import Wish as Wish
from ._restore import RestoreStatus as RestoreStatus
from ._rotation import CheckpointManager as CheckpointManager
from ._rotation import CheckpointWarning as CheckpointWarning
from ._rotation import latest_checkpoint as latest_checkpoint
