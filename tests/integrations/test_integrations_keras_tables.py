"""Embeddings of Keras that are tables on parameter servers: steps look rows up, and
send gradients of rows. The oracle is plain Keras, with optimizers that leave rows alone
that have no gradient."""

import numpy as np
import pytest

import zstrat as zs

keras = pytest.importorskip("keras")
from keras_fits import QUIET, fitted, require_equal  # noqa: E402  # imports keras
from keras_tables import (  # noqa: E402
    DATA,
    IDS,
    LOSS,
    OTHERS,
    RNG,
    Y,
    by_id,
    towers,
    two_servers,
)

__all__ = ["two_servers"]
layers = keras.layers
pytestmark = QUIET


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.5, global_clipnorm=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_table_is_trained_as_keras_trains_it(strategy, name, tmp_path):
    def make(embedding):
        return lambda: towers(embedding, OPTIMIZERS[name]())

    plain, expected = fitted(make(layers.Embedding), **DATA)
    model, history = fitted(make(zs.keras.Embedding), strategy, **DATA)
    require_equal(model, plain, history, expected)
    found, predicted = (x.predict(DATA["x"], verbose=0) for x in (model, plain))
    np.testing.assert_allclose(found, predicted, rtol=1e-4)


def test_what_is_saved_and_assigned(strategy, tmp_path):
    def make(embedding):
        return lambda: towers(embedding, keras.optimizers.SGD(0.5))

    plain, _ = fitted(make(layers.Embedding), **DATA)
    model, _ = fitted(make(zs.keras.Embedding), strategy, **DATA)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    with strategy.scope():
        again = towers(zs.keras.Embedding, keras.optimizers.SGD(0.5))
    again.load_weights(tmp_path / "model.keras")
    given = [IDS, OTHERS]
    for each in (loaded, again):
        np.testing.assert_allclose(
            each.predict(given, verbose=0), plain.predict(given, verbose=0), rtol=1e-4
        )
    # What is assigned goes to the servers before the next step.
    for each in (plain, again):
        each.set_weights([0.5 * value for value in each.get_weights()])
        each.fit(given, Y, verbose=0, shuffle=False)
    for mine, its in zip(again.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)


def test_adam_moves_the_rows_of_a_step_alone(strategy):
    """While all rows are in each batch it is Keras' own Adam; then others rest."""
    ids = np.tile(np.arange(8), 5).reshape(20, 2).astype("int32")
    y = ids[:, :1].astype("float32")

    def make(embedding):
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                embedding(9, 3),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.1), "mse")
        return model

    keras.utils.set_random_seed(1)
    plain = make(layers.Embedding)
    with strategy.scope():
        model = make(zs.keras.Embedding)
    model.set_weights(plain.get_weights())
    first = plain.get_weights()[0]
    for each in (plain, model):
        each.fit(ids, y, batch_size=20, epochs=3, shuffle=False, verbose=0)
    before, expected = model.get_weights()[0], plain.get_weights()[0]
    np.testing.assert_allclose(before, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(before[8], first[8])
    model.fit(ids[:1], y[:1], epochs=1, verbose=0)  # rows 0 and 1
    after = model.get_weights()[0]
    np.testing.assert_array_equal(after[2:], before[2:])
    assert (after[:2] != before[:2]).any()


def test_a_table_of_any_id(strategy):
    """Ids of 64 bits, with the first rows of the table: as dense ids in plain Keras."""
    known = np.array([5, 5 + 2**32, -7, 2**62 + 3, 2**33])
    dense = np.tile(np.arange(5), 8).reshape(20, 2)
    x = np.linspace(0, 1, 20, dtype="float32")[:, None]
    y = (dense * [1, 0.3]).sum(1, keepdims=True).astype("float32")
    with strategy.scope():
        table = zs.HashTable(3, name="users")
    rows = table.lookup(known)
    keras.utils.set_random_seed(1)
    plain = by_id(layers.Embedding(5, 3, weights=rows), lambda ids: ids)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = by_id(zs.keras.Embedding(table), lambda ids: ids[:, ::-1])
    model.set_weights([model.get_weights()[0], *plain.get_weights()[1:]])
    given = {"batch_size": 20, "epochs": 4, "verbose": 0, "shuffle": False}
    expected = plain.fit([dense, x], y, **given).history
    history = model.fit([known[dense][:, ::-1], x], y, **given).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(table.lookup(known), plain.get_weights()[0], rtol=1e-4)
    wide = known[dense][:, ::-1]
    np.testing.assert_allclose(
        model.predict([wide, x], verbose=0),
        plain.predict([dense, x], verbose=0),
        rtol=1e-4,
    )
    np.testing.assert_allclose(
        model.evaluate([wide, x], y, verbose=0),
        plain.evaluate([dense, x], y, verbose=0),
        rtol=1e-4,
    )
    assert len(table) == 5
    assert model.optimizer.iterations.value == 4
    found, expected = (
        [each.train_on_batch([ids, x], y), each.test_on_batch([ids, x], y)]
        for each, ids in ((model, wide), (plain, dense))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert len(table) == 5
    # Leased batches bring ids whole, too.
    coordinator = zs.ClusterCoordinator(strategy)
    leased = coordinator.create_leased_dataset(
        ({"ids": wide + 2**40, "x": x}, y), batch=20, epochs=None
    )
    model.fit(leased, epochs=1, verbose=0)
    assert len(table) == 10


def test_a_large_embedding_of_keras_is_a_table_where_that_changes_nothing(
    strategy, monkeypatch, recwarn
):
    monkeypatch.setattr("zstrat.integrations.keras.embeddings.LARGE", 400)

    def make(optimizer):
        return lambda: towers(layers.Embedding, optimizer(0.5))

    plain, expected = fitted(make(keras.optimizers.Adagrad), **DATA)
    model, history = fitted(make(keras.optimizers.Adagrad), strategy, **DATA)
    require_equal(model, plain, history, expected)
    assert not [each for each in recwarn if each.category is zs.KerasWarning]
    with pytest.warns(zs.KerasWarning, match=r"zs\.keras\.Embedding"):
        model, history = fitted(make(keras.optimizers.RMSprop), strategy, **DATA)
    plain, expected = fitted(make(keras.optimizers.RMSprop), **DATA)
    require_equal(model, plain, history, expected)

    # Nor what something else reads, too; it says so once.
    def regularized(*arguments, **options):
        return layers.Embedding(*arguments, embeddings_regularizer="l2", **options)

    plain, expected = fitted(lambda: towers(regularized, "sgd"), **DATA)
    with pytest.warns(zs.KerasWarning, match="'shared/.*MiB") as warned:
        model, history = fitted(lambda: towers(regularized, "sgd"), strategy, **DATA)
    assert len([each for each in warned if each.category is zs.KerasWarning]) == 1
    require_equal(model, plain, history, expected)


def refused(case, strategy):
    def sequential(*inner, optimizer="sgd"):
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *inner])
        model.add(layers.Flatten())
        model.add(layers.Dense(2))
        model.compile(optimizer, LOSS)
        return model

    of = keras.optimizers
    embedding = zs.keras.Embedding
    match case:
        case "regularizer":
            return sequential(embedding(50, 2, embeddings_regularizer="l2"))
        case "accumulation":
            some = of.SGD(gradient_accumulation_steps=2)
            return sequential(embedding(50, 2), optimizer=some)
        case "average":
            return sequential(embedding(50, 2), optimizer=of.SGD(use_ema=True))
        case "computed":
            learned = embedding(50, 1)
            return sequential(learned, layers.Flatten(), embedding(50, 2))


@pytest.mark.parametrize(
    ("case", "remedy"),
    [
        ("regularizer", "regularizer"),
        ("accumulation", "gradient_accumulation_steps"),
        ("average", "use_ema"),
        ("computed", "batch alone"),
    ],
)
def test_what_is_refused(strategy, case, remedy):
    with strategy.scope():
        model = refused(case, strategy)
    with pytest.raises(NotImplementedError, match=remedy):
        model.fit(IDS, Y, batch_size=16, verbose=0)


def test_a_mask_is_made_of_32_bits_of_the_ids(strategy):
    with strategy.scope():
        table = zs.HashTable(2, name="masked")
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                zs.keras.Embedding(table, mask_zero=True),
                layers.GlobalAveragePooling1D(),
            ]
        )
        model.compile("sgd", "mse")
    ids = np.array([[5, 6, 0, 0]])
    expected = table.lookup([5, 6]).mean(0)
    np.testing.assert_allclose(model.predict(ids, verbose=0)[0], expected, rtol=1e-5)
    several = np.tile(ids << 32, (20, 1))
    with pytest.raises(ValueError, match="32 bits"):
        model.predict(several, batch_size=1, verbose=0)
    # That was all of it: the next call is not told of it again.
    np.testing.assert_allclose(model.predict(ids, verbose=0)[0], expected, rtol=1e-5)


def test_what_an_embedding_of_a_table_refuses(strategy, tmp_path):
    with strategy.scope():
        table = zs.HashTable(2, name="users")
    with pytest.raises(ValueError, match="embeddings_regularizer"):
        zs.keras.Embedding(table, embeddings_regularizer="l2")
    with pytest.raises(TypeError, match="output_dim"):
        zs.keras.Embedding(3)
    model = keras.Sequential(
        [keras.Input((), dtype="int32"), zs.keras.Embedding(table)]
    )
    with pytest.raises(RuntimeError, match="predict"):
        model(np.array([2**40]))
    with pytest.raises(NotImplementedError, match=r"zs\.Checkpoint"):
        model.save(tmp_path / "model.keras")
    with pytest.warns(zs.KerasWarning, match=r"zs\.Checkpoint"):
        model.save_weights(tmp_path / "model.weights.h5")
    keys = [keras.Input((), dtype="int32") for _ in range(2)]
    twice = [
        zs.keras.Embedding(table, name=name)(key)
        for name, key in zip("ab", keys, strict=True)
    ]
    with strategy.scope():
        both = keras.Model(keys, layers.Add()(twice))
        both.compile("sgd", "mse")
    with pytest.raises(NotImplementedError, match="'a' and 'b'"):
        both.fit([np.arange(4)] * 2, np.zeros((4, 2)), verbose=0)
    with zs.OneDeviceStrategy("CPU:0").scope():
        model.compile("sgd", "mse")
    with pytest.raises(NotImplementedError, match="ParameterServerStrategy"):
        model.fit(np.arange(4), np.zeros((4, 2)), verbose=0)


def test_tables_and_a_kernel_of_one_shape(strategy):
    """Each has its own rows in a step, and its own state of the optimizer."""
    with strategy.scope():
        tables = [zs.HashTable(3, name=name) for name in ("left", "right")]
    known = np.arange(50)
    firsts = [table.lookup(known) for table in tables]

    def make(left, right):
        keras.utils.set_random_seed(1)
        ids, x = keras.Input((4,), dtype="int32"), keras.Input((left.input_dim,))
        twin = layers.Dense(3, use_bias=False)  # its kernel is as what stands for both
        rows = layers.Flatten()(left(ids)), right(ids[:, 0])
        model = keras.Model([ids, x], layers.Concatenate()([*rows, twin(x)]))
        model.compile(keras.optimizers.Adagrad(0.3), "mse")
        return model

    with strategy.scope():
        model = make(*map(zs.keras.Embedding, tables))
    (rows, _) = model.get_weights()[0].shape
    plain = make(*[layers.Embedding(rows, 3) for _ in tables])
    weights = plain.get_weights()
    for weight, first in zip(weights, firsts, strict=False):
        weight[:50] = first
    plain.set_weights(weights)
    model.set_weights(weights)
    x = RNG.normal(size=(60, rows)).astype("float32")
    for each in (plain, model):
        y = np.zeros((60, each.output_shape[1]))
        each.fit([IDS, x], y, epochs=2, shuffle=False, verbose=0)
    expected = plain.get_weights()
    found = [*[table.lookup(known) for table in tables], model.get_weights()[-1]]
    for mine, its in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, its[: len(mine)], rtol=1e-4, atol=1e-6)


def test_a_model_has_what_the_steps_before_an_error_made(strategy):
    with strategy.scope():
        rows = [keras.Input((4,), dtype="int32"), zs.keras.Embedding(50, 3)]
        model = keras.Sequential([*rows, layers.Flatten(), layers.Dense(1)])
        model.compile("sgd", "mse")
    wrong = IDS.copy()
    wrong[-1] = 50
    # Without one that has to be called at once Keras starts a thread, and leaves it.
    each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    given = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": [each]}
    with pytest.raises(IndexError):
        model.fit(wrong, np.ones(60), **given)
    table, kernel, bias = model.get_weights()
    expected = table[IDS].reshape(60, -1) @ kernel + bias
    found = model.predict(IDS, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert model.optimizer.iterations.value == 14


class Sometimes(keras.Model):
    """Looks a table up in training, or else in other steps."""

    def __init__(self, table, *, trains):
        super().__init__()
        self.users = zs.keras.Embedding(table, name="users")
        self.last, self.trains = layers.Dense(1), trains

    def build(self, shape):
        self.users.build(shape)
        self.last.build((None, 2))

    def call(self, ids, training=False):
        is_used = training is self.trains
        return self.last(self.users(ids) if is_used else keras.ops.ones((8, 2)))


def test_steps_that_do_not_look_a_table_up(strategy):
    ids, y = np.arange(8), np.ones((8, 1))
    for trains in (True, False):
        with strategy.scope():
            table = zs.HashTable(2, name=f"trains {trains}")
            model = Sometimes(table, trains=trains)
            model.compile("adam", "mse")
        assert model.evaluate(ids, y, verbose=0) >= 0
        if trains:
            model.fit(ids, y, verbose=0)
            assert len(table) == 8
        else:
            with pytest.raises(NotImplementedError, match="'users'"):
                model.fit(ids, y, verbose=0)
        kernel, bias = model.get_weights()[1:]
        if trains:
            found = model.predict(ids, verbose=0)
            np.testing.assert_allclose(found, np.ones((8, 2)) @ kernel + bias, 1e-5)


@pytest.mark.parametrize("name", ["of all rows", "decay later"])
def test_an_embedding_is_read_whole_where_rows_move_with_others(strategy, name):
    class OfAllRows(keras.optimizers.SGD):
        def apply(self, grads, variables=None):
            norm = sum(keras.ops.sum(keras.ops.square(each)) for each in grads)
            moved = [each + 1e-3 * keras.ops.minimum(norm, 1.0) for each in grads]
            return super().apply(moved, variables)

    later = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.0, 0.05])
    optimizers = {
        "of all rows": lambda: OfAllRows(0.1),
        "decay later": lambda: keras.optimizers.SGD(later, weight_decay=0.1),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zstrat.integrations.keras.embeddings.LARGE", 8)

        def made():
            return towers(layers.Embedding, optimizers[name]())

        with pytest.warns(zs.KerasWarning, match=r"zs\.keras\.Embedding"):
            model, history = fitted(made, strategy, **DATA)
        plain, expected = fitted(made, **DATA)
    require_equal(model, plain, history, expected)
