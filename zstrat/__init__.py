"""Parameter-server training for JAX, with the programming model of tf.distribute.

``import zstrat`` does not import jax: a daemon must choose devices and flags before jax
loads. Every public name is fetched from its package when it is first used.
"""

from __future__ import annotations

from typing import Final

from zstrat.doors import by_name, fetched_late

__version__ = "0.1.0"

_EXPORTS: Final = by_name(
    {
        "zstrat.errors": "AlreadyExistsError BusyError CancelledError ClosedError "
        "ClosureAbortedError ClosureInputError CollectiveTimeoutError DataLossError "
        "DeadlineExceededError HeldError InvalidArgumentError NotFoundError "
        "NotPrimaryError OutOfRangeError PSUnavailableError PeerLostError "
        "PermissionDeniedError ProtocolError ResourceExhaustedError ResultLostError "
        "RetryDiffersError StaleSessionError StepError UnavailableError "
        "VersionMismatchError WorkerLostError ZstratError",
        "zstrat.cluster": "ClusterSpec",
        "zstrat.coordinator": "AsyncClusterCoordinator ClusterCoordinator "
        "PerWorkerDataset PerWorkerValues AsyncRemoteValue RemoteValue "
        "RemoteValueStatus OpenTelemetryExport log_scalar profile",
        "zstrat.contrib.distribute": "get_tower_context",
        "zstrat.collectives": "ReduceOp",
        "zstrat.data": "InputContext",
        "zstrat.transport.health": "dashboard serve_http",
        "zstrat.launch": "LocalCluster Server",
        "zstrat.program": "Function RaggedIds RetraceWarning StepIterator "
        "WorkerContext embedding_lookup embedding_lookup_sparse function "
        "get_current_worker_index get_worker_context grad "
        "safe_embedding_lookup_sparse value_and_grad",
        "zstrat.saving": "Checkpoint CheckpointManager CheckpointWarning JsonLines "
        "MetricsExport MetricsWriter PreemptionCheckpointHandler PreemptionHandler "
        "RestoreStatus SidecarEvaluator TensorBoardEvents TerminationConfig "
        "export_orbax export_safetensors export_safetensors_async latest_checkpoint",
        "zstrat.strategy": "BetweenGraphStrategy CentralStorageStrategy "
        "CommunicationImplementation CommunicationOptions CrossDeviceOps "
        "DistributedDataset DistributedIterator DistributedValues "
        "HierarchicalCopyAllReduce InputOptions InputReplicationMode KerasWarning "
        "Mirrored MirroredStrategy MultiStepContext MultiWorkerMirroredStrategy "
        "NcclAllReduce OneDeviceStrategy ParameterServerStrategy PerReplica "
        "ReductionToOneDevice ReplicaContext RunOptions Strategy StrategyExtended "
        "TPUStrategy ValueContext experimental_set_strategy get_cross_replica_context "
        "get_loss_reduction get_replica_context get_strategy get_update_replica_id "
        "has_strategy in_cross_replica_context",
        "zstrat.tpu": "experimental_connect_to_cluster",
        "zstrat.variables": "IndexedSlices Module NarrowingWarning Optimizer "
        "ShardedVariable Variable VariableAggregation VariableSynchronization "
        "create_variables values",
    }
)
"""Public name -> the package that defines it."""

_MODULES: Final[dict[str, str]] = {
    "cluster_resolver": "zstrat.cluster",
    "collectives": "zstrat.collectives",
    "compat": "zstrat.compat",
    "contrib": "zstrat.contrib",
    "coordinator": "zstrat.coordinator",
    "data": "zstrat.data",
    "errors": "zstrat.errors",
    "experimental": "zstrat.experimental",
    "initializers": "zstrat.initializers",
    "integrations": "zstrat.integrations",
    "launch": "zstrat.launch",
    "partitioners": "zstrat.variables.partitioners",
    "testing": "zstrat.testing",
    "tpu": "zstrat.tpu",
}
"""Public name -> the module that it is."""

__getattr__, __dir__ = fetched_late(__name__, _EXPORTS, _MODULES)
