"""Uses the names of Keras that its documentation does not promise.

All other files of this package use only public names. `check` raises an error that says
which Keras to install if one of these names is missing:

| name | what it is here |
|---|---|
| `_get_jax_state` | called before the first step, and after each synchronization |
| ``_jax_state*`` of a model | whether there is state that its variables lack |
| ``_enforce_jax_state_sharding()`` | of older versions: lays out a step's results |
| `_flatten_layers` | all layers of a model |
| `get_keras_mask` of ``keras.src.backend`` | the mask that a loss is given |
| `_distribute_data` of its trainer | moves batches to devices of this process |
| ``_shape`` of a variable | set while a step is traced on rows of a table |
| the state of a SeedGenerator | two numbers of uint32, by which it is recognized |
| `_symbolic_build` | builds a model, its metrics and its optimizer for a batch |

`make_train_function`, `make_test_function`, `make_predict_function`,
`compute_loss_and_updates` and `jax_state_sync` have no underscore, but no page either.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import keras

from .embeddings import building

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

VERSIONS: Final = "3.10 to 3.15"
"""The versions that have these names: the oldest and the newest that were tested."""

_METHODS: Final = (
    "_flatten_layers",
    "_get_jax_state",
    "_symbolic_build",
    "compute_loss_and_updates",
    "jax_state_sync",
    "make_predict_function",
    "make_test_function",
    "make_train_function",
)

_LAYOUTS: Final = "_enforce_jax_state_sharding"  # older versions have it

_FUNCTIONS: Final = {
    "get_keras_mask": "keras.src.backend",
    "_distribute_data": "keras.src.backend.jax.trainer",
}

_is_whole: Final[ContextVar[bool]] = ContextVar("zstrat_whole", default=False)
"""Whether Keras passes batches on as the user gave them, without moving them to
devices."""


@functools.cache
def check() -> None:
    """Checks that Keras computes with jax and has the names used in this file. The
    first call also patches Keras' trainer, so that `whole_batches` has an effect.

    Raises:
        RuntimeError: Keras uses another backend than jax.
        ImportError: Keras lacks one of the names.
    """
    if keras.backend.backend() != "jax":
        raise RuntimeError(
            f"Keras computes with {keras.backend.backend()!r}, and a strategy with "
            "jax: set the environment variable KERAS_BACKEND=jax before keras is "
            "imported"
        )
    missing = [
        f"Model.{name}" for name in _METHODS if getattr(keras.Model, name, None) is None
    ]
    missing += [
        f"{module}.{name}"
        for name, module in _FUNCTIONS.items()
        if getattr(importlib.import_module(module), name, None) is None
    ]
    # An attribute of instances alone, so a variable has to be made.
    if getattr(keras.Variable(0.0, name="zstrat_check"), "_shape", None) is None:
        missing.append("Variable._shape")
    if missing:
        raise ImportError(
            f"keras {keras.__version__} has no {missing[0]}: zstrat trains models of "
            f"Keras {VERSIONS}. Install one of these, or train with "
            "model.stateless_call in a step of your own (docs/libraries.md)"
        )

    # Once for the process: the loops of Keras look it up in their module, and models
    # without a strategy get what they got before.
    trainer: Any = importlib.import_module(_FUNCTIONS["_distribute_data"])
    distribute = trainer._distribute_data

    def distributed(data: Any, layouts: Any = None) -> Any:
        return data if _is_whole.get() else distribute(data, layouts)

    trainer._distribute_data = distributed


@contextlib.contextmanager
def whole_batches() -> Iterator[None]:
    """Makes Keras pass batches on as they were given, in the block. Outside of the
    block Keras may move them to devices of jax first, which cuts ids to 32 bits."""
    token = _is_whole.set(True)
    try:
        yield
    finally:
        _is_whole.reset(token)


def take_over(model: Any, training: Any) -> None:
    """Makes `fit`, `evaluate` and `predict` of this model run their steps by
    ``training.run(mode, iterator)``, and exchange state with Keras' variables by
    ``training.enter_state()`` and ``training.leave_state()``."""

    def state(**wanted: bool) -> tuple[None, ...]:
        # Keras carries the state from step to step, and looks at none of it: it is
        # with the strategy. As many parts as it unpacks have to be there.
        training.enter_state(counts=bool(wanted.get("metrics_variables")))
        del wanted["purge_model_variables"]
        return (None,) * sum(wanted.values())

    def synchronize() -> None:
        # Keras calls this often, also where nothing has run since the last time.
        if getattr(model, "_jax_state", None) and not model._jax_state_synced:
            training.leave_state()
            model._jax_state_synced = True

    def symbolic_build(*args: Any, **kwargs: Any) -> None:
        with building(), warnings.catch_warnings():
            # Keras describes the batch to jax as it was given. jax warns that it would
            # cut 64-bit ids, but here only shapes are computed.
            warnings.filterwarnings("ignore", ".*ShapeDtypeStruct", UserWarning)
            type(model)._symbolic_build(model, *args, **kwargs)

    def maker(mode: str, arity: int) -> Any:
        def step(state: Any, iterator: Any) -> Any:
            return training.run(mode, iterator), (None,) * arity

        def make(force: bool = False) -> None:
            setattr(model, f"{mode}_function", step)

        return make

    # On the instance: the class may be the user's, and have other instances.
    model._zstrat_training = training
    model._get_jax_state = state
    model._symbolic_build = symbolic_build
    if getattr(model, _LAYOUTS, None) is not None:
        # A step is traced here without layouts: its strategy says where values are.
        setattr(model, _LAYOUTS, lambda *parts, **named: (*parts, *named.values()))
    model.jax_state_sync = synchronize
    model.make_train_function = maker("train", 4)
    model.make_test_function = maker("test", 3)
    model.make_predict_function = maker("predict", 2)


def training_of(model: Any) -> Any:
    """Returns the `Training` that `take_over` gave the model; None if Keras trains
    it."""
    return vars(model).get("_zstrat_training")


def give_back(model: Any) -> None:
    """Undoes `take_over`: Keras trains the model again."""
    for name in ("_zstrat_training", _LAYOUTS, *_METHODS):
        vars(model).pop(name, None)


@contextlib.contextmanager
def noted_losses(model: Any) -> Iterator[list[Any]]:
    """Collects, in the block, the losses that the model computes: those added by its
    layers (``add_loss``), then the total loss. Yields the list.

    Raises:
        NotImplementedError: An output of the model has a mask.
    """
    from keras.src.backend import get_keras_mask

    found: list[Any] = []

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        given = keras.tree.flatten((args, kwargs))
        if any(get_keras_mask(each) is not None for each in given):
            raise NotImplementedError(
                f"the loss of model {model.name!r} is a mean over what a mask lets "
                "through, of which replicas have different numbers, but they count by "
                "their rows: give the mask as sample_weight to a model without masks "
                "at its end (a layer with supports_masking=False), or use a strategy "
                "with one replica or with parameter servers"
            )
        # By the class: the method of the instance is this very function.
        loss = type(model).compute_loss(model, *args, **kwargs)
        found.extend([*model.losses, loss])
        return loss

    model.compute_loss = compute_loss
    try:
        yield found
    finally:
        del model.compute_loss


@contextlib.contextmanager
def with_shapes(shapes: Iterable[tuple[Any, tuple[int, ...]]]) -> Iterator[None]:
    """Makes the given variables accept arrays of the given shapes, in the block."""
    given = [(variable, variable._shape, shape) for variable, shape in shapes]
    try:
        for variable, _, shape in given:
            variable._shape = shape
        yield
    finally:
        for variable, before, _ in given:
            variable._shape = before


def is_seed(array: Any) -> bool:
    """Returns whether the array, one of the state of a model, is that of a
    `keras.random.SeedGenerator`: a seed and a counter. A single number of that dtype is
    a counter of the user's own."""
    return bool(array.dtype == "uint32" and array.shape == (2,))


def layers_of(model: Any) -> list[Any]:
    """Returns all layers of a model, nested layers included."""
    return list(model._flatten_layers())


def build(model: Any, batch: Any) -> None:
    """Builds what is not built yet: the model, its metrics, losses and optimizer."""
    model._symbolic_build(data_batch=batch)
