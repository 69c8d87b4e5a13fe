"""``tf.compat.v1.distribute.cluster_resolver``: where a process learns its cluster."""

from __future__ import annotations

from typing import Final

from zstrat import cluster

_NAMES: Final = frozenset(
    {
        "ClusterResolver",
        "GCEClusterResolver",
        "KubernetesClusterResolver",
        "KubernetesExecutableLocation",
        "SimpleClusterResolver",
        "SlurmClusterResolver",
        "TFConfigClusterResolver",
        "TPUClusterResolver",
        "UnionResolver",
    }
)


def __getattr__(name: str) -> object:
    if name == "UnionClusterResolver":  # TF's public name of the class
        name = "UnionResolver"
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(cluster, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
