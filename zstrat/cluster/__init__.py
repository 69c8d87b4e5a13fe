"""Who is in a cluster, and where a process learns it."""

from ._resolver import ClusterResolver as ClusterResolver
from ._resolver import SimpleClusterResolver as SimpleClusterResolver
from ._spec import ClusterSpec as ClusterSpec
from ._tf_config import TFConfigClusterResolver as TFConfigClusterResolver
from ._toml import TomlClusterResolver as TomlClusterResolver
from ._union import UnionResolver as UnionResolver
from ._validate import TASK_TYPES as TASK_TYPES
from ._validate import collective_leader as collective_leader
from ._validate import id_in_cluster as id_in_cluster
from ._validate import is_chief as is_chief
from ._validate import normalize_cluster_spec as normalize_cluster_spec
from ._validate import task_count as task_count
from ._validate import validate_cluster_spec as validate_cluster_spec
from ._validate import worker_count as worker_count
