"""TF's old paths. Nothing here has a behaviour of its own."""

from . import v1 as v1
