"""Who is in a cluster, and where a process learns it."""

from typing import TYPE_CHECKING

from zstrat.doors import by_name, fetched_late

if TYPE_CHECKING:
    from ._detect import Launch as Launch
    from ._detect import detect as detect
    from ._detect import launch_in as launch_in
    from ._detect import launched_together as launched_together
    from ._detect import resolver_of as resolver_of
    from ._google import GCEClusterResolver as GCEClusterResolver
    from ._gpus import GPUS_VARIABLE as GPUS_VARIABLE
    from ._gpus import parts_of as parts_of
    from ._gpus import take_part as take_part
    from ._gpus import visible_gpus as visible_gpus
    from ._hostlist import expand_hostlist as expand_hostlist
    from ._hostlist import expand_tasks_per_node as expand_tasks_per_node
    from ._kubernetes import ExecutableLocation as ExecutableLocation
    from ._kubernetes import KubernetesClusterResolver as KubernetesClusterResolver
    from ._kubernetes import (
        KubernetesExecutableLocation as KubernetesExecutableLocation,
    )
    from ._ports import free_ports as free_ports
    from ._resolver import ClusterResolver as ClusterResolver
    from ._resolver import FunctionClusterResolver as FunctionClusterResolver
    from ._resolver import RunningCluster as RunningCluster
    from ._resolver import SimpleClusterResolver as SimpleClusterResolver
    from ._resolver import UnionResolver as UnionResolver
    from ._resolver import cluster_spec_of as cluster_spec_of
    from ._roles import id_in_cluster as id_in_cluster
    from ._roles import is_chief as is_chief
    from ._roles import should_load_checkpoint as should_load_checkpoint
    from ._roles import should_save_checkpoint as should_save_checkpoint
    from ._roles import should_save_summary as should_save_summary
    from ._roles import worker_count as worker_count
    from ._sagemaker import SageMakerClusterResolver as SageMakerClusterResolver
    from ._slurm import SlurmClusterResolver as SlurmClusterResolver
    from ._spec import ClusterSpec as ClusterSpec
    from ._spec import host_and_port as host_and_port
    from ._spec import normalize_cluster_spec as normalize_cluster_spec
    from ._spec import task_count as task_count
    from ._spec import validate_cluster_spec as validate_cluster_spec
    from ._tf_config import TFConfigClusterResolver as TFConfigClusterResolver
    from ._toml import TomlClusterResolver as TomlClusterResolver
    from ._tpu import TPUClusterResolver as TPUClusterResolver
    from ._tpu import TPUSystemMetadata as TPUSystemMetadata
else:
    __getattr__, __dir__ = fetched_late(
        __name__,
        by_name(
            {
                "._detect": "Launch detect launch_in launched_together resolver_of",
                "._google": "GCEClusterResolver",
                "._gpus": "GPUS_VARIABLE parts_of take_part visible_gpus",
                "._hostlist": "expand_hostlist expand_tasks_per_node",
                "._kubernetes": (
                    "ExecutableLocation KubernetesClusterResolver "
                    "KubernetesExecutableLocation"
                ),
                "._ports": "free_ports",
                "._resolver": (
                    "ClusterResolver FunctionClusterResolver RunningCluster "
                    "SimpleClusterResolver UnionResolver cluster_spec_of"
                ),
                "._roles": (
                    "id_in_cluster is_chief should_load_checkpoint "
                    "should_save_checkpoint should_save_summary worker_count"
                ),
                "._sagemaker": "SageMakerClusterResolver",
                "._slurm": "SlurmClusterResolver",
                "._spec": (
                    "ClusterSpec host_and_port normalize_cluster_spec "
                    "task_count validate_cluster_spec"
                ),
                "._tf_config": "TFConfigClusterResolver",
                "._toml": "TomlClusterResolver",
                "._tpu": "TPUClusterResolver TPUSystemMetadata",
            }
        ),
    )
