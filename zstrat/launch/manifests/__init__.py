"""A cluster and its program as objects of Kubernetes, which starts them."""

from ._objects import KINDS as KINDS
from ._objects import manifests as manifests
from ._objects import secrets_from as secrets_from
from ._objects import written as written
from ._pods import PodCluster as PodCluster
from ._pods import resources_from as resources_from
