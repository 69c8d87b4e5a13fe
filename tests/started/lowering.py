"""Lets jax make programs in less processor time.

Several are lowered one after another in one context of MLIR. To make a context and load
its dialects takes four milliseconds, a fifth of what a program of a test takes until it
can run. A context belongs to one thread. It keeps the constants of its programs, so
that now and then there is a new one.

What is lowered to the same text as before, of another function, is not compiled again:
in a process of tests that is every third program. jax counts it as compiled."""

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


compiled = {}
"""Programs of this process, by what they were compiled from."""


def share_programs():
    """Call it once jax may be imported. Leaves a jax alone that it does not know."""
    if not version("jax").startswith("0.10."):
        return
    from jax._src import compiler

    compile_and_load = compiler.backend_compile_and_load

    def shared(backend, module, devices, options, host_callbacks):
        given = (backend, module, devices, options, host_callbacks)
        if host_callbacks:  # functions of Python, which the text has as addresses
            return compile_and_load(*given)
        text = module.operation.get_asm(enable_debug_info=False)
        key = (text, options.SerializeAsString(), tuple(devices))
        if key not in compiled:
            compiled[key] = compile_and_load(*given)
        return compiled[key]

    compiler.backend_compile_and_load = shared


def share_contexts():
    """Call it once jax may be imported. Leaves a jax alone that it does not know."""
    if version("jax").startswith("0.10."):
        from jax._src.interpreters import mlir

        if not isinstance(mlir.make_ir_context, Contexts):
            mlir.make_ir_context = Contexts(mlir.make_ir_context)
