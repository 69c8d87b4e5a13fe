"""Data that Keras reads, and a `zs.data.Dataset`."""

import numpy as np
import pytest

import zstrat as zs

keras = pytest.importorskip("keras")
from keras_fits import DATA, QUIET, X, Y, compared, dense, fitted  # noqa: E402  # imports keras

pytestmark = QUIET


class Pages(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        return X[number * 20 :][:20], Y[number * 20 :][:20]


def grains():
    """What grain reads: each example once, in order."""
    grain = pytest.importorskip("grain")
    if hasattr(keras.Model, "_enforce_jax_state_sharding"):
        pytest.skip("this version of Keras itself does not read grain")
    rows = grain.MapDataset.source(list(zip(X, Y, strict=True)))
    without_threads = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return rows.batch(16).to_iter_dataset(without_threads)


def tensors():
    """A pipeline of TensorFlow, with weights of examples."""
    data = pytest.importorskip("tensorflow").data.Dataset
    weights = np.linspace(0.1, 2, 60)
    return data.from_tensor_slices((X, Y, weights)).batch(16).prefetch(2)


@pytest.mark.filterwarnings("ignore:.*ran out of data:UserWarning")  # of grain
@pytest.mark.parametrize("data", [Pages, grains, tensors])
def test_data_that_keras_reads(data):
    given = {"x": data, "y": None, "batch_size": None, "shuffle": False}
    if data is tensors:
        given["validation_data"] = tensors
    compared(dense, **given)


def test_a_dataset_ends_by_itself():
    def data():
        rows = zs.data.Dataset.from_tensor_slices((X, Y))
        return rows.filter(lambda x, y: True).batch(16)  # of unknown length

    _, expected = fitted(dense, **DATA, shuffle=False, validation_data=(X, Y))
    with pytest.warns(UserWarning, match="ran out of data"):
        _, history = fitted(
            dense,
            zs.OneDeviceStrategy("CPU:0"),
            x=data,
            y=None,
            batch_size=None,
            validation_data=data,
        )
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


class Quarters(keras.utils.PyDataset):
    """What Keras itself reads: four batches of 15."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        rows = slice(15 * number, 15 * number + 15)
        return X[rows], Y[rows]


@pytest.mark.filterwarnings("ignore:.*ran out of data:UserWarning")
@pytest.mark.parametrize("steps", [2, 3])
def test_epochs_of_some_steps_begin_again_where_those_of_keras_do(steps):
    def rows():
        return zs.data.Dataset.from_tensor_slices((X, Y)).batch(15)

    given = {"epochs": 4, "y": None, "batch_size": None, "shuffle": False}
    given |= {"steps_per_epoch": steps, "validation_steps": 2}
    plain, expected = fitted(dense, x=Quarters, validation_data=Quarters, **given)
    one = zs.OneDeviceStrategy("CPU:0")
    model, history = fitted(dense, one, x=rows, validation_data=rows, **given)
    assert model.optimizer.iterations.value == plain.optimizer.iterations.value
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
