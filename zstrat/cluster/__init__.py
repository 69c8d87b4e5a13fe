"""Who is in a cluster, and where a process learns it."""

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
from ._ports import free_ports as free_ports
from ._resolver import ClusterResolver as ClusterResolver
from ._resolver import FunctionClusterResolver as FunctionClusterResolver
from ._resolver import RunningCluster as RunningCluster
from ._resolver import SimpleClusterResolver as SimpleClusterResolver
from ._resolver import UnionResolver as UnionResolver
from ._resolver import cluster_spec_of as cluster_spec_of
from ._roles import collective_leader as collective_leader
from ._roles import coordination_leader as coordination_leader
from ._roles import has_worker as has_worker
from ._roles import id_in_cluster as id_in_cluster
from ._roles import is_chief as is_chief
from ._roles import should_load_checkpoint as should_load_checkpoint
from ._roles import should_save_checkpoint as should_save_checkpoint
from ._roles import should_save_summary as should_save_summary
from ._roles import worker_count as worker_count
from ._sagemaker import SageMakerClusterResolver as SageMakerClusterResolver
from ._slurm import SlurmClusterResolver as SlurmClusterResolver
from ._spec import TASK_TYPES as TASK_TYPES
from ._spec import ClusterSpec as ClusterSpec
from ._spec import host_and_port as host_and_port
from ._spec import normalize_cluster_spec as normalize_cluster_spec
from ._spec import task_count as task_count
from ._spec import validate_cluster_spec as validate_cluster_spec
from ._tf_config import TFConfigClusterResolver as TFConfigClusterResolver
from ._toml import TomlClusterResolver as TomlClusterResolver
from ._tpu import TPUClusterResolver as TPUClusterResolver
from ._tpu import TPUSystemMetadata as TPUSystemMetadata

KubernetesExecutableLocation = ExecutableLocation
