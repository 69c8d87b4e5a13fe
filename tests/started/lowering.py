"""Lets jax lower programs in less processor time: several, one after another, in one
context of MLIR. To make a context and load its dialects takes four milliseconds, a
fifth of what a program of a test takes until it can run.

A context belongs to one thread. It keeps the constants of its programs, so that now and
then there is a new one."""

import threading
from importlib.metadata import version

PROGRAMS = 50
"""How many are lowered in one context."""


class Contexts(threading.local):
    """The context of a thread, in the place of the function that makes one."""

    def __init__(self, make):
        self._make, self._context, self._left = make, None, 0

    def __call__(self):
        if not self._left:
            self._context, self._left = self._make(), PROGRAMS
        self._left -= 1
        return self._context


def share_contexts():
    """Call it once jax may be imported. Leaves a jax alone that it does not know."""
    if version("jax").startswith("0.10."):
        from jax._src.interpreters import mlir

        if not isinstance(mlir.make_ir_context, Contexts):
            mlir.make_ir_context = Contexts(mlir.make_ir_context)
