"""Parameter servers: variables with versions, updates that apply once and whole."""

from ._client import PsClient as PsClient
from ._engine import OptimizerEngine as OptimizerEngine
from ._line import ServerLine as ServerLine
from ._parts import EagerRun as EagerRun
from ._parts import ordinal as ordinal
from ._parts import require_same as require_same
from ._pushing import PsUpdate as PsUpdate
from ._reading import Ref as Ref
from ._reading import RowsRef as RowsRef
from ._service import PsService as PsService
from ._snapshot_client import PinnedTensor as PinnedTensor
from ._store import Store as Store
