"""TF's old paths, as aliases: nothing here has behaviour."""

from . import v1 as v1
