"""Parameter-server training for JAX, with the programming model of tf.distribute.

``import zstrat`` does not import jax: a daemon must choose devices and flags before jax
loads. Every public name is fetched from its package when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

__version__ = "0.1.0"

_EXPORTS: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            "AlreadyExistsError",
            "BusyError",
            "CancelledError",
            "ClosedError",
            "ClosureAbortedError",
            "ClosureInputError",
            "CollectiveTimeoutError",
            "DataLossError",
            "DeadlineExceededError",
            "InvalidArgumentError",
            "NotFoundError",
            "NotPrimaryError",
            "OutOfRangeError",
            "PSUnavailableError",
            "PeerLostError",
            "PermissionDeniedError",
            "ProtocolError",
            "ResourceExhaustedError",
            "ResultLostError",
            "RetryDiffersError",
            "StaleSessionError",
            "StepError",
            "UnavailableError",
            "VersionMismatchError",
            "WorkerLostError",
            "ZstratError",
        ),
        "zstrat.errors",
    ),
    **dict.fromkeys(
        ("ClusterSpec",),
        "zstrat.cluster",
    ),
    **dict.fromkeys(
        (
            "AsyncClusterCoordinator",
            "ClusterCoordinator",
            "PerWorkerDataset",
            "PerWorkerValues",
            "AsyncRemoteValue",
            "RemoteValue",
            "RemoteValueStatus",
            "OpenTelemetryExport",
            "log_scalar",
            "profile",
        ),
        "zstrat.coordinator",
    ),
    **dict.fromkeys(
        ("get_tower_context",),
        "zstrat.contrib.distribute",
    ),
    **dict.fromkeys(
        ("ReduceOp",),
        "zstrat.collectives",
    ),
    **dict.fromkeys(
        ("InputContext",),
        "zstrat.data",
    ),
    **dict.fromkeys(
        (
            "dashboard",
            "serve_http",
        ),
        "zstrat.transport.health",
    ),
    **dict.fromkeys(
        (
            "LocalCluster",
            "Server",
        ),
        "zstrat.launch",
    ),
    **dict.fromkeys(
        (
            "Function",
            "RaggedIds",
            "RetraceWarning",
            "StepIterator",
            "WorkerContext",
            "embedding_lookup",
            "embedding_lookup_sparse",
            "function",
            "get_current_worker_index",
            "get_worker_context",
            "grad",
            "safe_embedding_lookup_sparse",
            "value_and_grad",
        ),
        "zstrat.program",
    ),
    **dict.fromkeys(
        (
            "Checkpoint",
            "CheckpointManager",
            "CheckpointWarning",
            "JsonLines",
            "MetricsExport",
            "MetricsWriter",
            "PreemptionCheckpointHandler",
            "PreemptionHandler",
            "RestoreStatus",
            "SidecarEvaluator",
            "TensorBoardEvents",
            "TerminationConfig",
            "export_orbax",
            "export_safetensors",
            "export_safetensors_async",
            "latest_checkpoint",
        ),
        "zstrat.saving",
    ),
    **dict.fromkeys(
        (
            "BetweenGraphStrategy",
            "CentralStorageStrategy",
            "CommunicationImplementation",
            "CommunicationOptions",
            "CrossDeviceOps",
            "DistributedDataset",
            "DistributedIterator",
            "DistributedValues",
            "HierarchicalCopyAllReduce",
            "InputOptions",
            "InputReplicationMode",
            "KerasWarning",
            "Mirrored",
            "MirroredStrategy",
            "MultiStepContext",
            "MultiWorkerMirroredStrategy",
            "NcclAllReduce",
            "OneDeviceStrategy",
            "ParameterServerStrategy",
            "PerReplica",
            "ReductionToOneDevice",
            "ReplicaContext",
            "RunOptions",
            "Strategy",
            "StrategyExtended",
            "TPUStrategy",
            "ValueContext",
            "experimental_set_strategy",
            "get_cross_replica_context",
            "get_loss_reduction",
            "get_replica_context",
            "get_strategy",
            "get_update_replica_id",
            "has_strategy",
            "in_cross_replica_context",
        ),
        "zstrat.strategy",
    ),
    **dict.fromkeys(
        ("experimental_connect_to_cluster",),
        "zstrat.tpu",
    ),
    **dict.fromkeys(
        (
            "IndexedSlices",
            "Module",
            "NarrowingWarning",
            "Optimizer",
            "ShardedVariable",
            "Variable",
            "VariableAggregation",
            "VariableSynchronization",
            "create_variables",
            "values",
        ),
        "zstrat.variables",
    ),
}
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


def __getattr__(name: str) -> object:
    value: object
    if name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    elif name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
    else:
        words = f"module 'zstrat' has no attribute {name!r}"
        raise AttributeError(words, name=name, obj=sys.modules[__name__])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_MODULES})
