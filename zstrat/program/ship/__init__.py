"""Functions and objects as bytes, between tasks of one program.

Begin at `_code`, which lists how each kind of object is sent; `_pickler` says how an
object of each kind is made again.
"""

from __future__ import annotations
