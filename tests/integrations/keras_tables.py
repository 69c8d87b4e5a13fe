"""Data, clusters and models of tests of tables."""

import keras
import numpy as np
import pytest

import zstrat as zs

layers = keras.layers

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 50, (60, 4)).astype("int32")
OTHERS = RNG.integers(0, 9, 60).astype("int32")
Y = (IDS.sum(1) % 2).astype("int64")
DATA = {"x": [IDS, OTHERS], "y": Y, "validation_split": 0.2}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(scope="module", name="strategy")
def two_servers():
    with zs.LocalCluster(num_ps=2, num_workers=1) as cluster:
        made = zs.ParameterServerStrategy(cluster.resolver)
        yield made
        made.close()


def towers(embedding, optimizer, rows=50):
    """A table that two inputs share, another one with masks, and dense layers."""
    many, one = keras.Input((4,), dtype="int32"), keras.Input((), dtype="int32")
    shared = embedding(rows, 3, name="shared")
    masked = embedding(9, 3, mask_zero=True, name="masked")
    pooled = layers.GlobalAveragePooling1D()(shared(many))
    read = layers.SimpleRNN(2)(masked(layers.Reshape((1,))(one)))
    both = layers.Concatenate()([pooled, shared(one), read])
    model = keras.Model([many, one], layers.Dense(2)(both))
    model.compile(optimizer, LOSS, metrics=["accuracy"])
    return model


def by_id(embedding, read, optimizer="adam"):
    """A model of ids and a number for each."""
    ids = keras.Input((2,), dtype="int32", name="ids")
    x = keras.Input((1,), name="x")
    rows = layers.Flatten()(embedding(read(ids)))
    model = keras.Model(
        [ids, x], layers.Dense(1)(layers.Concatenate()([rows, x, rows]))
    )
    model.compile(optimizer, "mse")
    return model
