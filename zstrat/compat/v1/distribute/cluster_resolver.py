"""``tf.compat.v1.distribute.cluster_resolver``: aliases of zstrat's cluster
resolvers."""

from zstrat.cluster import ClusterResolver as ClusterResolver
from zstrat.cluster import GCEClusterResolver as GCEClusterResolver
from zstrat.cluster import KubernetesClusterResolver as KubernetesClusterResolver
from zstrat.cluster import KubernetesExecutableLocation as KubernetesExecutableLocation
from zstrat.cluster import SimpleClusterResolver as SimpleClusterResolver
from zstrat.cluster import SlurmClusterResolver as SlurmClusterResolver
from zstrat.cluster import TFConfigClusterResolver as TFConfigClusterResolver
from zstrat.cluster import TPUClusterResolver as TPUClusterResolver
from zstrat.cluster import UnionResolver as UnionResolver

UnionClusterResolver = UnionResolver  # TF's public name of the class
