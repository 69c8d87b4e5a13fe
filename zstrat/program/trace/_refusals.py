"""The errors for what a step function cannot do, which say what to write instead.

Law: every message names the user's line (`_tracebacks`). jax's own error is the cause.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jax import errors as jax_errors

from zstrat.variables import DeviceStorage, LocalStorage

from ._tracebacks import here, raised_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.program.lookup._lookups import PlannedLookup
    from zstrat.variables import Table, VariableHandle

    from ._iterator import StepIterator


# The first class that fits names the remedy, so subclasses of ConcretizationTypeError
# come before it.
_TRACED: Final[tuple[tuple[type[Exception], str], ...]] = (
    (
        jax_errors.TracerBoolConversionError,
        "a Python branch (if, while, and, or, not, assert) on a value that is known "
        "only when the step runs. Write jnp.where(condition, a, b), jax.lax.cond or "
        "jax.lax.while_loop; a Python bool or str argument may be branched on",
    ),
    (
        jax_errors.TracerIntegerConversionError,
        "Python needs an integer now (an index, a length, an axis), but it is known "
        "only when the step runs, as all numbers that a step is called with. Index a "
        "jax array (jnp.asarray(x)[i], jnp.take), or bind the number: "
        "zs.function(functools.partial(fn, axis=0))",
    ),
    (
        jax_errors.NonConcreteBooleanIndexError,
        "a boolean mask as an index gives a shape that is known only when the step "
        "runs. Write jnp.where(mask, x, 0), or multiply by the mask",
    ),
    (
        jax_errors.TracerArrayConversionError,
        "numpy needs a value that is known only when the step runs. Use jax.numpy in "
        "place of numpy, and value() in place of numpy()",
    ),
    (
        jax_errors.ConcretizationTypeError,
        "Python needs a value now (int(), float(), bool(), a shape, an axis), but it "
        "is known only when the step runs. Keep it a jax array, or pass it in from "
        "outside of the step",
    ),
)


class LoopsOverData(RuntimeError):
    """A traced step branches on the end of its data. The end differs between calls, so
    the step cannot be one program. Caught where the step can run in Python."""

    def __init__(self, name: str, where: str = "") -> None:
        self.name, self.where = name, where or here()
        super().__init__(name, self.where)

    def __str__(self) -> str:
        return (
            f"{self.where}: Python branches on where {self.name} ends (a for loop over "
            "it, or has_value()), in a step that is traced once. Draw a fixed number "
            "of elements, for _ in range(n): x = next(iterator), and catch "
            "zs.OutOfRangeError where the step is called or fetched; or make the body "
            "of the loop a zs.function, and loop outside of it; or use "
            "zs.function(fn, eager=True)"
        )


LOOKS: Final = tuple([kind for kind, _ in _TRACED])
"""jax's errors that are raised when Python needs a value that is being traced."""

# Of jax 0.10 and 0.11, and of numpy; these errors have no types of their own.
_STATIC: Final = (
    "Shapes must be 1D sequences of concrete values",
    "Slice entries must be static integers",
    "Array slice indices must have static start/stop/step",
    "expected a sequence of integers or a single integer",
)

_NOT_TRANSFORMED: Final = (
    "inside a function that jax transforms (jax.grad, jax.jit, jax.vmap, jax.lax.cond, "
    "jax.lax.scan or zs.value_and_grad), which may run it never or many times"
)


def is_of_shapes(error: TypeError | IndexError) -> bool:
    """Returns whether the error is about a shape or slice that depends on a traced
    value, so that it does not occur when the function runs with values."""
    words = str(error)
    return words.startswith(_STATIC) and "Tracer" in words


@contextmanager
def translated_variable_errors(step: str) -> Iterator[None]:
    """Replaces jax's error about a `Variable` among the arguments of a jax function,
    raised in the block, by an error of zstrat with the user's line.

    Raises:
        TypeError: In place of jax's error.
    """
    try:
        yield
    except ValueError as error:
        # jax's error has no type of its own, and its remedy is not for users.
        if "__jax_array__" not in str(error):
            raise
        raise TypeError(
            f"{raised_at(error)}, in the step function {step!r}: a zs.Variable is "
            "passed to a function that jax compiles (jnp.exp, jnp.matmul, jax.nn.relu, "
            "jax.jit, jax.grad, ...), which takes arrays: write v.value(), or "
            "zs.values(tree) for a pytree"
        ) from error


@contextmanager
def translated_errors(step: str) -> Iterator[None]:
    """Replaces jax's errors about traced values, raised in the block, by errors of
    zstrat with the user's line.

    Raises:
        TypeError: In place of jax's errors about values that are not known yet, and
            about variables where jax takes arrays.
        RuntimeError: In place of jax's error about a leaked value.
        OverflowError: In place of jax's error about a number that is too large.
    """
    try:
        with translated_variable_errors(step):
            yield
    except jax_errors.UnexpectedTracerError as error:
        raise leaked(step, "the body", raised_at(error)) from error
    except OverflowError as error:
        # Other overflows are the user's own.
        if "Python int" not in str(error) and "overflow" not in str(error):
            raise
        raise OverflowError(
            f"{raised_at(error)}, in the step function {step!r}: {error}. A step "
            "computes with 32 bits, but for ids of a zs.HashTable that are its "
            "arguments or elements: pass a larger number as an argument, as "
            "numpy.int64, or switch on jax_enable_x64 (JAX_ENABLE_X64=1, on the "
            "workers, too)"
        ) from error
    except tuple(cls for cls, _ in _TRACED) as error:
        words = next(text for cls, text in _TRACED if isinstance(error, cls))
        raise TypeError(
            f"{raised_at(error)}, in the step function {step!r}: {words}. (To step "
            "through the body with real values, use @zs.function(eager=True).)"
        ) from error


def update_inside(variable: object, op: str) -> RuntimeError:
    """Makes the error of an update under jax.grad, lax.cond and the like."""
    return RuntimeError(
        f"{here()}: {op} of {variable} {_NOT_TRANSFORMED}. Return the new value from "
        "that function (from a loss: has_aux=True) and update the variable after it; "
        "for an update under a condition assign jnp.where(condition, new, old)"
    )


def live_read_inside(variable: object) -> RuntimeError:
    """Makes the error of an eager ``value_and_grad(variables=)`` with a read under
    jax.jit."""
    return RuntimeError(
        f"{here()}: {variable} is read inside a function that jax transforms (jax.jit, "
        "jax.vmap, jax.lax.scan, ...) while zs.value_and_grad(variables=...) "
        "differentiates with real values. Pass it as an argument (argnums), or do it "
        "in a zs.function that is not eager"
    )


def step_inside(what: str) -> TypeError:
    """Makes the error of a step that is called while jax traces another function."""
    return TypeError(
        f"{what} inside a function that jax transforms (jax.jit, jax.vmap, jax.grad, "
        "jax.lax.scan, ...): a step runs by itself. Make the outermost function a "
        "zs.function too, which inlines this one; without variables in it, the plain "
        "Python function (fn.__wrapped__) does as well"
    )


def draw_inside() -> RuntimeError:
    """Makes the error of next(iterator) under jax.grad, lax.cond and the like."""
    return RuntimeError(
        f"{here()}: next(iterator) {_NOT_TRANSFORMED}. Draw the element before, in the "
        "body of the zs.function, and pass it in as an argument"
    )


def draw_in_replica(iterator: StepIterator) -> RuntimeError:
    """Makes the error of next(iterator) in a function of several replicas."""
    return RuntimeError(
        f"{here()}: next() of {iterator.name} inside a replica function that runs for "
        "several replicas: draw before it, and give each replica its rows with "
        "strategy.run(fn, args=(next(iterator),))"
    )


def lookup_inside(table: object) -> RuntimeError:
    """Makes the error of a lookup under jax.jit, jax.grad, lax.scan and the like."""
    return RuntimeError(
        f"{here()}: rows of {table} are looked up inside a function that jax "
        "transforms (jax.jit, jax.grad, jax.vmap, jax.lax.scan, ...), where their ids "
        "are not known to the step. Look them up before, in the body of the "
        "zs.function, and pass the rows in (ids may have any shape); for gradients "
        "with respect to the table use zs.value_and_grad in place of jax.grad"
    )


def lookup_after_update(table: object, where: str) -> RuntimeError:
    """Makes the error of a lookup after an update of the table in the same step."""
    return RuntimeError(
        f"{here()}: rows of {table} are looked up after the same step updated it (at "
        f"{where}). Look them up before the update, or read value(), the whole of it"
    )


def lookup_not_ready(table: object) -> RuntimeError:
    """Makes the error of a lookup while jax traces a function outside of steps."""
    return RuntimeError(
        f"{here()}: rows of {table} are looked up inside a function that jax "
        "transforms (jax.jit, jax.vmap, jax.lax.scan, ...), so its ids have no value "
        "now. Look them up before and pass the rows in, or do it in a zs.function"
    )


def read_after_optimizer(variable: VariableHandle, where: str) -> RuntimeError:
    """Makes the error of a read after an optimizer in the same step."""
    if isinstance(variable.storage, DeviceStorage):
        computed = (
            "by the optimizer, of the gradients of all replicas. Read it before "
            "apply_gradients, after strategy.run, or in the next step"
        )
    else:
        by = (
            "optimizer"
            if isinstance(variable.storage, LocalStorage)
            else "parameter server"
        )
        computed = (
            f"by the {by}, after the step. Read it before apply_gradients, or in the "
            "next step"
        )
    return RuntimeError(
        f"{here()}: {variable.spec} is read after an optimizer updated it in the same "
        f"step (at {where}): its new value is computed {computed}"
    )


def not_shared(who: str, *variables: object) -> ValueError:
    """Makes the error of a step for workers that uses variables of this process.

    ``who`` is the beginning of the message: the step and its verb.
    """
    return ValueError(
        f"{who} {', '.join(map(str, variables))}, created outside of "
        "strategy.scope(): it is stored in the process that created it, and workers "
        "cannot reach it. Create variables that workers use inside strategy.scope(). "
        "(A scheduled step that is traced may read others; their values are sent with "
        "it.)"
    )


def leaked(step: str, what: str, where: str) -> RuntimeError:
    """Makes the error of a traced value from a finished or outer transformation."""
    return RuntimeError(
        f"{where}, in the step function {step!r}: {what} uses a value that belongs to "
        "another function that jax transforms (jax.grad, jax.jit, jax.vmap, "
        "jax.lax.cond, ...): it was kept in a global, an attribute or a list, or the "
        "step is itself called under a transformation. Return the value from that "
        "function, or pass it to the step"
    )


def changed(step: str, what: str) -> RuntimeError:
    """Makes the error of a second trace of the body that differs from the first."""
    return RuntimeError(
        f"the body of the step function {step!r} did something else when it was traced "
        f"again: {what}. It must depend only on its arguments: no counters, random "
        "choices or clocks of Python, no 'first call' branches"
    )


def result_changed(step: str, place: str, before: str, after: str) -> RuntimeError:
    """Makes the error of a second trace that returns another static value."""
    return RuntimeError(
        f"the step function {step!r} returns a value at {place} that changes from "
        f"trace to trace: it was {before}, and is {after}. A Python number that a step "
        "returns is a constant of its trace (from random or np.random, a clock, a "
        "counter, or a captured object that the body changes). Draw with jax.random "
        "and a key that is an argument, keep a count in a zs.Variable, or pass the "
        "value to the step; or remove it from the result"
    )


def collective_inside(where: str) -> RuntimeError:
    """Makes the error of a collective of processes under lax.scan, lax.cond."""
    return RuntimeError(
        f"{where}: a collective of several processes is inside a loop or a branch that "
        "jax compiles (jax.lax.scan, while_loop, cond, switch, jax.vmap, "
        "jax.shard_map), where a step cannot be cut: call it in the body of the "
        "replica function, under jax.grad or in jax.jit, before or after the loop"
    )


def hashed_update(table: Table, where: str) -> ValueError:
    """Returns the error for an update of rows that the step does not look up."""
    return ValueError(
        f"{where}: rows of {table} are updated by other ids than the step looks up "
        "with one zs.embedding_lookup or several: in steps give an optimizer the "
        "gradient of zs.value_and_grad as it is, or scatter_add by the very ids of a "
        "look-up; if ids are computed from rows of this table, pass them to a step "
        "of their own; between steps use table.assign(ids, values)"
    )


def lookup_among_stages(step: str, lookup: PlannedLookup) -> RuntimeError:
    """Makes the error of a lookup on servers in a step on variables of this process."""
    return RuntimeError(
        f"{lookup.where}, in the step function {step!r}: it looks up rows of "
        f"{lookup.table}, which is stored on parameter servers, and uses variables of "
        "another strategy in this process. Create all of them in one scope"
    )


def refuse_random_keys(leaves: Sequence[Any], name: str) -> None:
    """Refuses elements with random keys.

    Raises:
        TypeError: A leaf is an array of random keys.
    """
    dtypes = [getattr(leaf, "dtype", None) for leaf in leaves]
    if any(dtype is not None and not isinstance(dtype, np.dtype) for dtype in dtypes):
        raise TypeError(
            f"an element of {name} has random keys, but a step draws arrays of numbers "
            "or booleans: put jax.random.key_data(key) into the dataset, and wrap it "
            "in the step with jax.random.wrap_key_data"
        )
