"""Schedules step functions on workers, which may come and go while a program trains.

``zs.coordinator`` has the names of ``tf.distribute.coordinator``.
"""

from zstrat.program import get_current_worker_index as get_current_worker_index

from ._coordinator import AsyncClusterCoordinator as AsyncClusterCoordinator
from ._coordinator import ClusterCoordinator as ClusterCoordinator
from ._coordinator import CoordinatorFace as CoordinatorFace
from ._core import CoordinatedStrategy as CoordinatedStrategy
from ._datasets import PerWorkerDataset as PerWorkerDataset
from ._datasets import PerWorkerIterator as PerWorkerIterator
from ._leased_datasets import LeasedDataset as LeasedDataset
from ._leased_datasets import LeasedEpoch as LeasedEpoch
from ._leased_datasets import LeasedIterator as LeasedIterator
from ._run_status import log_scalar as log_scalar
from ._session import ClusterSession as ClusterSession
from ._session_pause import SessionCut as SessionCut
from ._values import AsyncRemoteValue as AsyncRemoteValue
from ._values import PerWorkerValues as PerWorkerValues
from ._values import RemoteValue as RemoteValue
from ._values import RemoteValueStatus as RemoteValueStatus
from .connecting._session_opening import connect_session as connect_session
from .connecting._session_opening import hold_session as hold_session
from .connecting._session_opening import join_session as join_session
from .membership._task_changes import StoreServers as StoreServers
from .membership._task_changes import Workers as Workers
from .profiling._profile import Profile as Profile
from .profiling._profile import profile as profile
from .profiling._span_export import OpenTelemetryExport as OpenTelemetryExport
from .recovery._inventory import RestorePoint as RestorePoint
from .recovery._recovery import PS_WAIT as PS_WAIT
from .recovery._recovery import until_settled as until_settled
from .rounds._optimizer_rounds import RestoredRounds as RestoredRounds

PerWorkerValue = PerWorkerValues
experimental_get_current_worker_index = get_current_worker_index
