"""Numbers of 64 bits in a program of 32: said where they come from, once."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

WIDE = 2**32 + 1
ROUNDED = np.full((4, 2), 0.1)  # 1/10 has no finite binary fraction
EXACT = np.full((4, 2), 0.5)


def silent():
    """Nothing is said inside, and nothing fails because of it: warnings are errors."""
    return warnings.catch_warnings(action="error")


@pytest.mark.parametrize("value", [ROUNDED, lambda: ROUNDED, EXACT, ROUNDED + 1j])
def test_a_variable_of_64_bits_is_warned_about_where_it_is_made(make_cluster, value):
    dtype = np.asarray(value() if callable(value) else value).dtype
    narrow = "complex64" if dtype.kind == "c" else "float32"
    for strategy in (
        zs.get_strategy(),
        make_cluster().strategy,
        zs.OneDeviceStrategy("CPU:0"),
    ):
        with strategy.scope(), pytest.warns(zs.DowncastWarning) as said:
            variable = zs.Variable(value, name="w")
        assert variable.dtype == dtype
        (one,) = said
        assert one.filename == __file__
        words = str(one.message)
        assert words.startswith(f"'w': created with dtype {dtype}")
        assert f'dtype="{narrow}", or value.astype("{narrow}")' in words
        assert "JAX_ENABLE_X64=1" in words


def test_one_that_was_asked_for_is_not():
    with silent():
        wide = zs.Variable(ROUNDED, dtype="float64")
        zs.Variable(ROUNDED, dtype="float32")
        zs.Variable(ROUNDED.astype("float32"))
        zs.Variable([0.1])
        zs.Variable(wide)
        zs.Variable(np.int64(3))  # a counter
        with jax.enable_x64(True):
            zs.Variable(ROUNDED)


def test_a_whole_tree_is_warned_about_once():
    tree = dict.fromkeys("abcde", ROUNDED)
    with pytest.warns(zs.DowncastWarning, match=r"'a'.*'b'.*'c'") as said:
        zs.create_variables(tree)
    assert len(said) == 1


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (np.array([1, WIDE]), "int64, and jax computes with int32: 4294967297 becomes"),
        (np.array([1, WIDE], "uint64"), "uint64, and jax computes with uint32"),
        (
            ROUNDED,
            r"float64.*: 0\.1 becomes 0\.10000000149011612\. Give it as \.astype",
        ),
        (np.float64(1e300), r"float64.*: 1e\+300 becomes inf"),
        (ROUNDED + 1j, "complex128, and jax computes with complex64"),
    ],
    ids=["int64", "uint64", "float64", "large", "complex128"],
)
def test_an_argument_is_warned_about_once(given, words):
    step = zs.function(lambda batch: batch["x"] * 2)
    place = r"^args\[0\]\['x'\] of the step function '.*' has dtype "
    with pytest.warns(zs.DowncastWarning, match=place + words) as said:
        step({"x": given})
    # numpy tells of what is too large besides.
    (one,) = [each for each in said if each.category is zs.DowncastWarning]
    assert one.filename == __file__
    step({"x": given})
    step({"x": np.stack([given, given])})  # another program


@pytest.mark.parametrize(
    "given",
    [
        np.array([1, 2**31 - 1]),
        np.array([], np.int64),
        EXACT,
        np.array([np.nan, np.inf, -0.0]),
        np.float64(0.1),
        0.1,
        np.array([True]),
    ],
    ids=str,
)
def test_what_loses_nothing_is_not(given):
    step = zs.function(lambda x: x * 2)
    with silent():
        step(given)
        zs.function(lambda x: x * 2, eager=True)(given)


def test_with_64_bits_nothing_is_said():
    step = zs.function(lambda x: x * 2)
    with jax.enable_x64(True), silent():
        assert int(step(np.int64(WIDE))) == 2 * WIDE
        step(ROUNDED)


def test_integers_that_grow_are_warned_about_when_they_are_cut():
    step = zs.function(lambda x: x * 2)
    with silent():
        step(np.int64(2**31 - 1))
    with pytest.warns(zs.DowncastWarning, match=r"\b2147483648\b.*\b2147483648\b"):
        step(np.int64(2**31))


def test_an_element_is_warned_about_with_its_iterator():
    iterator = zs.StepIterator([{"x": ROUNDED}] * 2, name="the photographs")
    step = zs.function(lambda it: next(it)["x"] * 2)
    words = r"\b0\b.*\['x'\]"
    with pytest.warns(zs.DowncastWarning, match=words) as said:
        step(iterator)
    assert len(said) == 1
    with silent():
        step(iterator)


def test_an_eager_step_warns_about_its_arguments():
    step = zs.function(lambda x: x * 2, eager=True)
    with pytest.warns(zs.DowncastWarning, match=r"^args\[0\] of.*becomes 1") as said:
        step(np.int64(WIDE))
    assert len(said) == 1
    with silent():
        step(np.int64(WIDE))


def test_an_argument_of_run_is_warned_about():
    strategy = zs.MirroredStrategy(["CPU:0"])
    with pytest.warns(zs.DowncastWarning, match=r"\[0\].*'sum'") as said:
        strategy.run(jnp.sum, args=(ROUNDED,))
    assert len(said) == 1
    assert said[0].filename == __file__


def test_a_step_of_parameter_servers_warns_about_its_arguments(make_cluster):
    fake = make_cluster()
    with fake.strategy.scope():
        w = zs.Variable([1.0, 2.0])
    step = fake.ship(zs.function(lambda x: w.value() * x.sum()))
    with pytest.warns(zs.DowncastWarning, match=r"^args\[0\] of the step function"):
        fake.run(step, ROUNDED)


def test_a_distributed_dataset_is_warned_about_where_it_was_distributed():
    """Its elements are put on devices before a step sees them."""
    strategy = zs.MirroredStrategy(["CPU:0"])
    dataset = zs.data.Dataset.from_tensor_slices({"x": ROUNDED, "y": EXACT}).batch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    line = test_a_distributed_dataset_is_warned_about_where_it_was_distributed
    with pytest.warns(zs.DowncastWarning) as said:
        found = [batch["x"] for batch in distributed]
    with silent():
        list(distributed)
    assert [each.dtype for each in found] == [np.float32] * 2
    (one,) = said
    assert (one.filename, one.lineno) == (
        __file__,
        line.__code__.co_firstlineno + 4,
    )
    assert str(one.message).startswith("element['x'] of a distributed dataset has dtyp")


def test_integers_of_a_distributed_dataset_are_warned_about_by_the_step():
    strategy = zs.MirroredStrategy(["CPU:0"])
    dataset = zs.data.Dataset.from_tensor_slices(np.array([1, WIDE])).batch(2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    step = zs.function(lambda it: strategy.run(lambda x: x % 7, args=(next(it),)))
    with pytest.warns(zs.DowncastWarning, match=r"\b0\b.*\b4294967297\b"):
        step(iterator)
