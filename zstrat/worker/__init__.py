"""The worker: runs the closures of one coordinator at a time. Imports jax."""

from ._capture import SessionCapture as SessionCapture
from ._closure import Costs as Costs
from ._closure import Do as Do
from ._closure import Ending as Ending
from ._closure import Post as Post
from ._closure import RoundPush as RoundPush
from ._closure import SharedPull as SharedPull
from ._executor import Executor as Executor
from ._executor import work as work
from ._needs import Catalog as Catalog
from ._needs import Reads as Reads
from ._pipeline import Pipeline as Pipeline
from ._pushes import PushEncoding as PushEncoding
from ._reports import Hear as Hear
from ._reports import Listen as Listen
from ._reports import StepOutput as StepOutput
from ._resident import Residents as Residents
from ._resources import Resources as Resources
from ._server_links import ServerLinks as ServerLinks
from ._server_links import ServerPresence as ServerPresence
from ._service import Compilations as Compilations
from ._service import WorkerService as WorkerService
from ._step_runner import StepRunner as StepRunner
