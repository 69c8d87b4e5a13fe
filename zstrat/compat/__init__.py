"""TF's old paths. Nothing here has behaviour."""

from . import v1 as v1
