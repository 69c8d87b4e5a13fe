"""Arguments of variables and their updates, by TensorFlow's signatures and rules."""

import inspect

import numpy as np
import pytest

import zstrat.variables as zv
from zstrat.wire import UpdateOp

ON_READ = zv.VariableSynchronization.ON_READ
DENSE = {"assign": [9.0, 9.0], "assign_add": [11.0, 12.0], "assign_sub": [-7.0, -6.0]}
SCATTERS = {
    "add": 7,
    "sub": -1,
    "mul": 12,
    "div": 0.75,
    "min": 3,
    "max": 4,
    "update": 4,
}


def whole():
    return zv.Variable([2.0, 3.0], name="w")


def in_parts():
    return zv.ShardedVariable([zv.Variable([2.0]), zv.Variable([3.0])], "w")


@pytest.fixture(params=[whole, in_parts])
def make(request):
    return request.param


def parameters(method):
    found = inspect.signature(method).parameters.values()
    return [(each.name, each.default) for each in found][2:]


@pytest.mark.parametrize("kind", [zv.Variable, zv.ShardedVariable])
def test_updates_have_the_arguments_of_tensorflow(kind):
    dense = [("use_locking", False), ("name", None), ("read_value", True)]
    for name in DENSE:
        assert parameters(getattr(kind, name)) == dense
        assert parameters(getattr(kind, f"{name}_async")) == dense
    for name in SCATTERS:
        assert parameters(getattr(kind, f"scatter_{name}")) == dense[:2]
    assert parameters(kind.scatter_async)[1:] == dense[:2]
    assert parameters(kind.sparse_read) == dense[1:2]
    assert parameters(kind.sparse_read_async) == dense[1:2]
    assert parameters(zv.ShardedVariable.batch_scatter_update) == dense[:2]


@pytest.mark.parametrize(("name", "expected"), DENSE.items())
async def test_updates_do_the_same_with_them(make, name, expected):
    for words in (
        {"use_locking": True},
        {"use_locking": None, "name": "op"},
        {"read_value": False},
    ):
        variable = make()
        assert getattr(variable, name)([9.0, 9.0], **words) is variable
        np.testing.assert_array_equal(variable.numpy(), expected)
    positions = (False, "op", True)
    variable = make()
    getattr(variable, name)([9.0, 9.0], *positions)
    np.testing.assert_array_equal(variable.numpy(), expected)
    variable = make()
    assert await getattr(variable, f"{name}_async")([9.0, 9.0], *positions) is variable
    np.testing.assert_array_equal(await variable.value_async(), expected)
    np.testing.assert_array_equal(await variable.read_value_async(), expected)
    with pytest.raises(ValueError, match="'w'"):
        await getattr(variable, f"{name}_async")(1.0)


@pytest.mark.parametrize("name", SCATTERS)
async def test_updates_of_rows_do_the_same_with_them(make, name):
    delta = zv.IndexedSlices(np.float32([4.0]), [1])
    expected = [2.0, SCATTERS[name]]
    update = UpdateOp[f"SCATTER_{name.upper()}"]
    one, other, third = make(), make(), make()
    getattr(one, f"scatter_{name}")(delta, True, "op")
    getattr(other, f"scatter_{name}")(delta, use_locking=False, name=None)
    assert await third.scatter_async(update, delta, True, name="op") is third
    variables = [one, other, third]
    if make is in_parts and name == "update":
        variables.append(make().batch_scatter_update(delta, True, name="op"))
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), expected)


async def test_reads_of_rows_take_a_name(make):
    variable = make()
    np.testing.assert_array_equal(variable.sparse_read([1], name="op"), [3.0])
    np.testing.assert_array_equal(await variable.sparse_read_async([1], "op"), [3.0])


@pytest.mark.parametrize("given", [{}, {"trainable": None}])
def test_variables_that_are_aggregated_on_read_are_not_trainable(given):
    assert zv.Variable(0.0, **given).trainable
    assert not zv.Variable(0.0, synchronization=ON_READ, **given).trainable
    made = zv.create_variables({"a": 0.0}, synchronization=ON_READ, **given)
    assert not made["a"].trainable
    assert zv.create_variables({"a": 0.0}, **given)["a"].trainable


@pytest.mark.parametrize(
    "create",
    [
        lambda **how: zv.Variable(0.0, name="seen", **how),
        lambda **how: zv.create_variables({"seen": 0.0}, **how),
    ],
)
def test_it_cannot_be_said_to_be(create):
    assert not zv.Variable(0.0, False, synchronization=ON_READ).trainable
    words = r"'seen'.*VariableSynchronization\.ON_READ"
    with pytest.raises(ValueError, match=words):
        create(trainable=True, synchronization=ON_READ)
