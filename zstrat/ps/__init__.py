"""Parameter servers: variables with versions, updates that apply once and whole."""

from ._engine import OptimizerEngine as OptimizerEngine
from ._service import PsService as PsService
from ._store import Store as Store
