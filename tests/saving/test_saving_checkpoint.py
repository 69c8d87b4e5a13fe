"""`zs.Checkpoint` with variables of this process: what is found, what is refused."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest

from zstrat.checkpoint import MANIFEST, Manifest
from zstrat.errors import BusyError, DataLossError, InvalidArgumentError, NotFoundError
from zstrat.saving import Checkpoint, latest_checkpoint
from zstrat.variables import Module, Optimizer, ShardedVariable, Variable


def ones(*shape):
    return np.ones(shape, "f4")


def zeros(*shape):
    return Variable(np.zeros(shape, "f4"))


class Pair(NamedTuple):
    left: Variable
    right: Variable


class Net(Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.w = Variable(np.full((2, 3), fill, "f4"))
        self.layers = [Variable(np.full(2, fill, "f4")), {"b": Variable(fill)}]
        self.pair = Pair(Variable(fill), Variable(fill + 1))
        self.sizes = [1, 2]  # nothing to save, and no error in a module
        self.act = np.tanh
        self.again = self.w

    def numbers(self):
        return [np.asarray(v.numpy()).tolist() for v in self.variables]


@pytest.mark.shows("tf.train.Checkpoint", "Checkpoint.restore")
def test_what_was_saved_is_restored(tmp_path):
    net = Net(3.0)
    path = Checkpoint(net=net).save(tmp_path / "ckpt")
    assert path == str(tmp_path / "ckpt-1")
    other = Net(0.0)
    status = Checkpoint(net=other).restore(path)
    assert other.numbers() == net.numbers()
    assert status.assert_consumed() is status
    assert status.expect_partial() is status
    assert status.assert_existing_objects_matched() is status
    assert (status.unused, status.path) == ([], path)


def test_one_tensor_for_what_is_reached_twice(tmp_path):
    net = Net(3.0)
    path = Checkpoint(net=net).save(tmp_path / "ckpt")
    names = set(Manifest.of(path).tensors)
    assert names == {
        "save_counter",
        "net/again",
        "net/layers/0",
        "net/layers/1/b",
        "net/pair/left",
        "net/pair/right",
    }
    only = zeros(2, 3)
    Checkpoint(net={"w": only}).restore(path)
    assert (only.numpy() == 3.0).all()


def test_training_goes_on_as_if_nothing_had_been(tmp_path):
    """Slots, their counts and the optimizer's own count, in the textbook's sense: the
    same steps after the restore give the same numbers."""
    grads = [
        np.random.default_rng(n).normal(size=(3, 2)).astype("f4") for n in range(6)
    ]

    def program():
        table = Variable(ones(3, 2))
        return table, Optimizer(optax.adam(0.1), count_iterations=True)

    table, optimizer = program()
    for grad in grads:
        optimizer.apply_gradients([(grad, table)])
    half, first = program()
    for grad in grads[:3]:
        first.apply_gradients([(grad, half)])
    path = Checkpoint(table=half, optimizer=first).write(tmp_path / "half")
    rest, second = program()
    second.apply_gradients([(grads[0], rest)])  # its slots are replaced
    Checkpoint(table=rest, optimizer=second).restore(path).assert_consumed()
    assert second.iterations.numpy() == 3
    for grad in grads[3:]:
        second.apply_gradients([(grad, rest)])
    np.testing.assert_array_equal(rest.numpy(), table.numpy())


def test_slots_that_were_not_there_are_initialized(tmp_path):
    value, optimizer = Variable(ones(2)), Optimizer(optax.sgd(1.0, momentum=0.5))
    checkpoint = Checkpoint(v=value, o=optimizer)
    path = checkpoint.save(tmp_path / "c")  # before the first gradient
    optimizer.apply_gradients([(ones(2), value)])
    checkpoint.restore(path)
    optimizer.apply_gradients([(ones(2), value)])
    assert value.numpy().tolist() == [0.0, 0.0]  # and not -0.5, with the old momentum


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "complex128", "bool"])
def test_dtypes(tmp_path, dtype):
    from zstrat.wire import DTYPES

    raw = np.array([[0, 1], [1, 0]]).astype(DTYPES[dtype])
    value = Variable(raw, dtype=raw.dtype)
    scalar = Variable(raw[0, 1], dtype=raw.dtype)
    empty = Variable(np.zeros((0, 3), raw.dtype), dtype=raw.dtype)
    path = Checkpoint(v=value, s=scalar, e=empty).save(tmp_path / "c")
    other = Variable(np.zeros_like(raw), dtype=raw.dtype)
    other_scalar = Variable(np.zeros_like(raw[0, 0]), dtype=raw.dtype)
    Checkpoint(v=other, s=other_scalar, e=empty).restore(path).assert_consumed()
    assert other.numpy().tobytes() == raw.tobytes()
    assert other_scalar.numpy().tobytes() == raw[0, 1].tobytes()


def test_names_with_dots_and_slashes_stay_apart(tmp_path):
    names = ["a/b", "a.b", "a..b", "a.Sb", ".slots", "a"]
    tree = {name: Variable(float(n)) for n, name in enumerate(names)}
    tree["a"] = {"b": tree["a"]}
    path = Checkpoint(t=tree).save(tmp_path / "c")
    again = {name: Variable(-1.0) for name in names}
    again["a"] = {"b": again["a"]}
    Checkpoint(t=again).restore(path).assert_consumed()
    assert [float(again[name].numpy()) for name in names[:-1]] == [0, 1, 2, 3, 4]
    assert float(again["a"]["b"].numpy()) == 5


def test_any_partitioning(tmp_path):
    whole = np.arange(24, dtype="f4").reshape(8, 3)

    def sharded(parts, value):
        return ShardedVariable([Variable(p) for p in np.array_split(value, parts)])

    path = Checkpoint(t=sharded(3, whole)).save(tmp_path / "c")
    assert Manifest.of(path).tensors["t"].shape == (8, 3)
    for parts in (1, 2, 5, 8):
        other = sharded(parts, np.zeros_like(whole))
        Checkpoint(t=other).restore(path).assert_consumed()
        np.testing.assert_array_equal(other.numpy(), whole)


def test_other_shapes_and_dtypes_are_all_named_and_nothing_changes(tmp_path):
    path = Checkpoint(
        a=Variable(ones(2)), b=Variable(ones(3)), c=Variable(ones(1))
    ).save(tmp_path / "c")
    a, b, c = zeros(2, 2), Variable(np.zeros(3), name="bee", dtype="f8"), zeros(1)
    with pytest.raises(InvalidArgumentError) as caught:
        Checkpoint(a=a, b=b, c=c).restore(path)
    text = str(caught.value)
    assert "(float32[2, 2]) at a: the checkpoint has float32[2]" in text
    assert "variable 'bee' (float64[3]) at b: the checkpoint has float32[3]" in text
    assert "at c" not in text
    assert isinstance(caught.value, ValueError)
    assert c.numpy().tolist() == [0.0]


def test_what_is_missing_is_named(tmp_path):
    path = Checkpoint(a=Variable(ones(2))).save(tmp_path / "c")
    a, late = zeros(2), Variable(5.0, name="late")
    optimizer = Optimizer(optax.sgd(0.1), name="sgd")
    checkpoint = Checkpoint(a=a, more=[late], o=optimizer)
    with pytest.raises(NotFoundError) as caught:
        checkpoint.restore(path)
    assert "variable 'late' (float32[]) at more/0" in str(caught.value)
    assert "optimizer 'sgd' at o" in str(caught.value)
    assert "expect_partial=True" in str(caught.value)
    assert a.numpy().tolist() == [0.0, 0.0]
    status = checkpoint.restore(path, expect_partial=True)
    assert a.numpy().tolist() == [1.0, 1.0]
    assert float(late.numpy()) == 5.0
    with pytest.raises(AssertionError, match="'late'"):
        status.assert_existing_objects_matched()


def test_what_nobody_takes_is_named_by_assert_consumed(tmp_path):
    path = Checkpoint(a=Variable(1.0), b={"x": Variable(2.0)}).save(tmp_path / "c")
    status = Checkpoint(a=Variable(0.0)).restore(path)
    status.assert_existing_objects_matched()
    assert status.unused == ["b/x"]
    with pytest.raises(AssertionError, match=r"nothing in this program.*b/x"):
        status.assert_consumed()


def test_another_optimizer_is_refused_when_its_tree_is_known_or_it_is_used(tmp_path):
    value, optimizer = Variable(ones(2)), Optimizer(optax.adam(0.1))
    optimizer.apply_gradients([(ones(2), value)])
    path = Checkpoint(v=value, o=optimizer).save(tmp_path / "c")
    other = Variable(ones(2) * 5, name="other")
    with pytest.raises(InvalidArgumentError, match=r"'Optimizer'.*'other'"):
        Checkpoint(v=other, o=Optimizer(optax.sgd(0.1), params=[other])).restore(path)
    assert other.numpy().tolist() == [5.0, 5.0]
    plain = Optimizer(optax.sgd(0.1), "plain")
    Checkpoint(v=other, o=plain).restore(path).assert_consumed()
    with pytest.raises(ValueError, match="'other'"):
        plain.apply_gradients([(ones(2), other)])
    np.testing.assert_array_equal(other.numpy(), value.numpy())


ADAM = optax.adam(0.1)
WRAPPED = {
    "chain": optax.chain(optax.clip(9.0), ADAM),
    "decayed": optax.chain(optax.add_decayed_weights(0.1), ADAM, optax.scale(0.5)),
    "finite": optax.apply_if_finite(ADAM, 3),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "several": optax.MultiSteps(ADAM, 2),
    "partition": optax.partition({"a": ADAM, "b": optax.sgd(0.1)}, {"w": "a"}),
}


def trained(transformation, fill=1.0):
    variables = {"w": Variable(np.full((3, 2), fill, "f4"))}
    optimizer = Optimizer(transformation, params=variables)
    for n in range(3):
        optimizer.apply_gradients({"w": np.full((3, 2), fill + n, "f4")}, variables)
    return variables, optimizer


def saved(tmp_path, transformation):
    variables, optimizer = trained(transformation)
    path = Checkpoint(v=variables, o=optimizer).save(tmp_path / "c")
    return variables, optimizer, path


def same(one, other):
    for now, was in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(now, was)


def adams(optimizer):
    """What `optax.adam` keeps, wherever it is."""
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)  # noqa: E731
    found = jax.tree.leaves(optimizer.state, is_leaf=is_adam)
    (state,) = [node for node in found if is_adam(node)]
    return jax.tree.map(np.asarray, state)


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("is_unwrapped", [False, True], ids=["into", "out"])
def test_the_state_of_a_transformation_is_found_where_it_was_wrapped(
    tmp_path, name, is_unwrapped
):
    one, other = ADAM, WRAPPED[name]
    if is_unwrapped:
        one, other = other, one
    _, optimizer, path = saved(tmp_path, one)
    second, restored = trained(other, fill=2.0)
    before = adams(restored)
    checkpoint = Checkpoint(v=second, o=restored)
    if name in ("finite", "injected", "several"):  # which keep more
        error = InvalidArgumentError if is_unwrapped else NotFoundError
        with pytest.raises(error, match="expect_partial=True"):
            checkpoint.restore(path)
        same(adams(restored), before)
        status = checkpoint.restore(path, expect_partial=True)
        assert bool(status.unused) == is_unwrapped
    else:
        checkpoint.restore(path).assert_consumed()
    same(adams(restored), adams(optimizer))
    restored.apply_gradients({"w": ones(3, 2)}, second)


TRACES = optax.chain(optax.trace(0.5), optax.trace(0.9))
RATE = optax.scale_by_schedule(lambda count: 0.1)


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        # Which of two is whose, only their paths would say.
        (
            TRACES,
            optax.chain(optax.clip(1.0), *[optax.trace(x) for x in (0.5, 0.9)]),
            None,
        ),
        # Several that moved together.
        (TRACES, optax.chain(optax.clip(1.0), TRACES), lambda state: state[1]),
        # A count is at the same place in both, and is that of another transformation.
        (
            optax.chain(optax.scale_by_adam(), RATE),
            optax.chain(RATE, optax.scale_by_adam()),
            lambda state: state[::-1],
        ),
    ],
)
def test_a_state_is_found_by_its_kind_or_not_at_all(tmp_path, one, other, place):
    first, optimizer = trained(one)
    is_schedule = lambda path, _: "ScaleByScheduleState" in str(path)  # noqa: E731
    if one is not TRACES:
        optimizer.state = optax.tree_utils.tree_set(
            optimizer.state, is_schedule, count=40
        )
    path = Checkpoint(v=first, o=optimizer).save(tmp_path / "c")
    second, restored = trained(other, fill=3.0)
    checkpoint, before = Checkpoint(v=second, o=restored), restored.state
    if place is None:
        with pytest.raises(InvalidArgumentError):
            checkpoint.restore(path)
        same(restored.state, before)
    else:
        checkpoint.restore(path).assert_consumed()
        same(place(restored.state), optimizer.state)


@pytest.mark.parametrize("knows_its_tree", [True, False])
def test_a_state_of_another_class_with_the_same_fields_is_refused(
    tmp_path, knows_its_tree
):
    first, _, path = saved(tmp_path, optax.adabelief(0.1))
    if knows_its_tree:
        second, restored = trained(optax.chain(optax.clip(9.0), ADAM), fill=2.0)
    else:
        second, restored = {"w": Variable(ones(3, 2))}, Optimizer(ADAM)
    values = second["w"].numpy()
    checkpoint = Checkpoint(v=second, o=restored)
    both = "ScaleByAdamState.*ScaleByBeliefState"
    with pytest.raises(InvalidArgumentError, match=both):
        checkpoint.restore(path)
    np.testing.assert_array_equal(second["w"].numpy(), values)
    before = adams(restored) if knows_its_tree else None
    assert checkpoint.restore(path, expect_partial=True).unused
    np.testing.assert_array_equal(second["w"].numpy(), first["w"].numpy())
    if not knows_its_tree:
        restored.apply_gradients({"w": np.zeros((3, 2), "f4")}, second)
        before = [1, np.zeros((3, 2)), np.zeros((3, 2))]
    same(adams(restored), before)


def test_a_checkpoint_that_does_not_say_the_classes_of_states_is_restored(tmp_path):
    _, optimizer, path = saved(tmp_path, optax.adabelief(0.1))
    manifest = Manifest.of(path)
    recorded = [node.pop("state", None) for node in manifest.objects["nodes"]]
    assert any(recorded)
    (tmp_path / "c-1" / MANIFEST).write_bytes(manifest.encode())
    second, restored = trained(ADAM, fill=2.0)
    Checkpoint(v=second, o=restored).restore(path).assert_consumed()
    same(adams(restored), optimizer.state)


def test_rows_that_were_added_keep_their_values(tmp_path):
    old, new = Variable(np.full((2, 3), 5, "f4")), Variable(np.full((4, 3), 7, "f4"))
    # Its slots begin with the value.
    adagrad = optax.adagrad(0.1, initial_accumulator_value=0.5)
    optimizer = Optimizer(adagrad, params=[old])
    optimizer.apply_gradients([ones(2, 3)], [old])
    path = Checkpoint(t=[old], o=optimizer).save(tmp_path / "c")
    other = Optimizer(adagrad, params=[new])
    checkpoint = Checkpoint(t=[new], o=other)
    with pytest.raises(ValueError, match="'rows'"):
        checkpoint.restore(path, partial="all")
    checkpoint.restore(path, partial="rows").assert_consumed()
    np.testing.assert_array_equal(new.numpy()[:2], old.numpy())
    assert new.numpy()[2:].tolist() == [[7.0] * 3] * 2
    (squares,) = optax.tree_utils.tree_get(other.state, "sum_of_squares")
    assert squares.tolist() == [[1.5] * 3] * 2 + [[0.5] * 3] * 2
    fewer = Checkpoint(t=[zeros(1, 3)], o=Optimizer(adagrad))
    with pytest.raises(InvalidArgumentError, match=r"\[2, 3\]"):
        fewer.restore(path, partial="rows")
    wider = Checkpoint(t=[zeros(4, 4)], o=Optimizer(adagrad))
    with pytest.raises(InvalidArgumentError, match=r"\[2, 3\]"):
        wider.restore(path, partial="rows")


def test_rows_of_slots_that_were_added_need_a_tree_that_is_known(tmp_path):
    """How theirs begin is not known: they were whatever the memory held before."""
    old, new = Variable(np.full((2, 3), 5, "f4")), Variable(np.full((4, 3), 7, "f4"))
    optimizer = Optimizer(optax.adam(0.1))
    optimizer.apply_gradients([ones(2, 3)], [old])
    path = Checkpoint(t=[old], o=optimizer).save(tmp_path / "c")
    checkpoint = Checkpoint(t=[new], o=Optimizer(optax.adam(0.1)))
    with pytest.raises(InvalidArgumentError, match=r"'Optimizer'.*'Variable'.*params="):
        checkpoint.restore(path, partial="rows")
    assert new.numpy().tolist() == [[7.0] * 3] * 4


@pytest.mark.parametrize(
    "wrong", [5, 1.5, "text", np.ones(2), [1, 2], {"w": np.ones(2)}, object()]
)
def test_what_cannot_be_saved_is_refused_at_once(wrong):
    with pytest.raises(TypeError, match=r"zs\.Variable"):
        Checkpoint(x=wrong)
    Checkpoint(x=[None, Variable(1.0)])  # an absent part of a model


@pytest.mark.parametrize(
    "keys", [(1, "1"), (True, "True"), (1.5, "1.5"), (None, "None")]
)
def test_keys_that_are_written_alike_are_refused(keys):
    """One of the two values would not be in the checkpoint."""
    with pytest.raises(TypeError, match=rf"are written '{keys[1]}'"):
        Checkpoint(x={key: Variable(1.0) for key in keys})
    module = Module()
    module.sizes = dict.fromkeys(keys, 3)  # nothing to save, and no error in a module
    Checkpoint(m=module)
    one = Variable(1.0)
    for plain in (3, "text", np.ones(2), [3]):  # as without the other key
        for order in (keys, keys[::-1]):
            with pytest.raises(TypeError, match=r"zs\.Variable|are written"):
                Checkpoint(x={key: one if key == keys[0] else plain for key in order})
    Checkpoint(x={keys[0]: one, keys[1]: None})  # an absent part of a model
    Checkpoint(x=dict.fromkeys(keys, one))  # one value


@pytest.mark.parametrize("plain", [3, "text"])
@pytest.mark.parametrize("order", [(1, "1"), ("1", 1)])
def test_of_keys_that_are_written_alike_what_is_to_be_saved_is_saved(
    order, plain, tmp_path
):
    module = Module()
    module.sizes = {key: Variable(2.0) if key == 1 else plain for key in order}
    path = Checkpoint(m=module).write(tmp_path / "c")
    module.sizes[1].assign(0.0)
    Checkpoint(m=module).restore(path).assert_consumed()
    assert module.sizes[1].numpy() == 2
    module.sizes = dict.fromkeys(order, module.sizes[1])  # one, at both of them
    Checkpoint(m=module).restore(path).assert_consumed()


def test_two_values_for_one_variable_are_refused(tmp_path):
    path = Checkpoint(x=Variable(1.0), y=Variable(2.0), z=Variable(2.0)).write(
        tmp_path / "c"
    )
    tied = Variable(0.0, name="tied")
    with pytest.raises(InvalidArgumentError, match="'tied'"):
        Checkpoint(x=tied, y=tied).restore(path, expect_partial=True)
    assert tied.numpy() == 0
    parts = ShardedVariable([Variable(np.ones(2, "f4")), Variable(np.ones(2, "f4"))])
    cut = Checkpoint(x=parts, y=Variable(np.ones(4, "f4"))).write(tmp_path / "cut")
    whole = Variable(np.zeros(4, "f4"))
    with pytest.raises(InvalidArgumentError, match="'Variable'"):
        Checkpoint(x=whole, y=whole).restore(cut)
    Checkpoint(y=tied, z=tied).restore(path)  # it has the value of both
    assert tied.numpy() == 2
    late = Checkpoint(y=tied)
    late.restore(path)
    with pytest.raises(InvalidArgumentError, match="'tied'"):
        late.x = tied
    assert tied.numpy() == 2


def test_names_of_its_own():
    with pytest.raises(ValueError, match="save_counter"):
        Checkpoint(save_counter=Variable(1))
    with pytest.raises(AttributeError):
        Checkpoint().save_counter = Variable(1)
    checkpoint = Checkpoint(Net(1.0), o=Optimizer(optax.sgd(0.1)))
    assert repr(checkpoint) == "<zstrat.Checkpoint of root, o>"
    del checkpoint.o
    assert repr(checkpoint) == "<zstrat.Checkpoint of root>"


def test_nothing_to_restore(tmp_path):
    status = Checkpoint(a=Variable(1.0)).restore(latest_checkpoint(tmp_path / "none"))
    status.expect_partial()
    with pytest.raises(AssertionError, match="the path was None"):
        status.assert_consumed()
    with pytest.raises(NotFoundError, match=r"manifest\.json"):
        Checkpoint().restore(tmp_path)
    with pytest.raises(NotFoundError):
        Checkpoint().restore(tmp_path / "none")
    Checkpoint(a=Variable(1.0)).save(tmp_path / "c")
    for file in ("checkpoint", "c-1/manifest.json"):
        with pytest.raises(NotFoundError, match="`save`"):
            Checkpoint().restore(tmp_path / file)


@pytest.mark.parametrize("second", [3, 5])
def test_two_momenta_for_one_variable_are_refused(tmp_path, second):
    params = {name: Variable(np.ones(2, "f4"), name=name) for name in "xy"}
    still = optax.sgd(0.0, momentum=0.9)  # the values stay equal
    optimizer = Optimizer(still, params=params)
    optimizer.apply_gradients(
        [(ones(2) * 3, params["x"]), (ones(2) * second, params["y"])]
    )
    path = Checkpoint(**params, optimizer=optimizer).write(tmp_path / "c")
    tied = Variable(np.ones(2, "f4"), name="tied")
    Checkpoint(x=tied, y=tied).restore(path)  # no optimizer takes the momenta
    again = Optimizer(optax.sgd(1.0, momentum=0.9), params={"tied": tied})
    checkpoint = Checkpoint(x=tied, y=tied, optimizer=again)
    if second == 3:
        checkpoint.restore(path)
        again.apply_gradients([(ones(2) * 0, tied)])
        np.testing.assert_allclose(tied.numpy(), 1 - 0.9 * 3, rtol=1e-6)
    else:
        with pytest.raises(InvalidArgumentError, match="'tied'"):
            checkpoint.restore(path)


def test_what_is_created_later_gets_its_value_when_it_is_attached(tmp_path):
    net, optimizer = Net(3.0), Optimizer(optax.sgd(0.5, momentum=0.5))
    optimizer.apply_gradients([(ones(2, 3), net.w)])
    path = Checkpoint(net=net, o=optimizer).save(tmp_path / "c")

    late = Module()
    checkpoint = Checkpoint(net=late)
    status = checkpoint.restore(path)
    assert "net/layers/0" in status.unused
    late.w = zeros(2, 3)
    np.testing.assert_array_equal(late.w.numpy(), net.w.numpy())
    late.layers = [zeros(2), {"b": Variable(0.0)}]
    assert float(late.layers[1]["b"].numpy()) == 3.0
    late.pair = Pair(Variable(0.0), Variable(0.0))
    late.other = [1]  # nothing to restore
    checkpoint.o = Optimizer(optax.sgd(0.5, momentum=0.5))
    late.again = late.w
    status.assert_consumed()
    late.w.assign(np.zeros((2, 3), "f4"))
    late.w = late.w  # was restored once: what was trained since stays
    assert not late.w.numpy().any()
    late.w.assign(net.w.numpy())
    for o, w in ((optimizer, net.w), (checkpoint.o, late.w)):
        o.apply_gradients([(ones(2, 3), w)])
    np.testing.assert_array_equal(late.w.numpy(), net.w.numpy())


def test_modules_within_modules_are_listened_to(tmp_path):
    outer = Module()
    outer.inner = Module()
    outer.inner.v = Variable(4.0)
    path = Checkpoint(m=outer).save(tmp_path / "c")
    checkpoint = Checkpoint()
    checkpoint.restore(path)
    checkpoint.m = Module()
    checkpoint.m.inner = Module()
    checkpoint.m.inner.v = Variable(0.0)
    assert float(checkpoint.m.inner.v.numpy()) == 4.0


def test_containers_that_grew_are_seen_by_assert_consumed(tmp_path):
    path = Checkpoint(l=[Variable(1.0), Variable(2.0)]).save(tmp_path / "c")
    grows = [Variable(0.0)]
    status = Checkpoint(l=grows).restore(path)
    grows[0].assign(9.0)
    grows.append(Variable(0.0))
    status.assert_consumed()
    assert [float(v.numpy()) for v in grows] == [9.0, 2.0]


def test_what_comes_late_and_does_not_fit_is_refused(tmp_path):
    path = Checkpoint(m={"w": Variable(ones(2))}).save(tmp_path / "c")
    checkpoint = Checkpoint()
    checkpoint.restore(path)
    with pytest.raises(InvalidArgumentError):
        checkpoint.m = {"w": zeros(3)}
    with pytest.raises(NotFoundError, match="'Variable'"):
        checkpoint.m = {"w": zeros(2), "new": zeros(1)}


def test_a_module_is_not_kept_by_what_listens(tmp_path):
    path = Checkpoint(m=Net(1.0)).save(tmp_path / "c")
    checkpoint = Checkpoint(m=Net(0.0))
    checkpoint.restore(path)
    checkpoint.restore(path)  # the first restore listens no more
    died = []
    weakref.finalize(checkpoint.m, died.append, 1)
    assert copy.copy(checkpoint.m).w is checkpoint.m.w
    assert b"Restore" not in pickle.dumps(checkpoint.m.__dict__["_zstrat_listeners"])
    assert len(checkpoint.m.__dict__["_zstrat_listeners"]) == 1
    del checkpoint
    gc.collect()
    assert died


def test_the_counter_goes_with_the_checkpoint(tmp_path):
    checkpoint = Checkpoint(a=Variable(1.0))
    assert [checkpoint.save(tmp_path / "c")[-2:] for _ in range(2)] == ["-1", "-2"]
    again = Checkpoint(a=Variable(0.0))
    again.restore(tmp_path / "c-2").assert_consumed()
    assert again.save_counter.numpy() == 2
    assert again.save(tmp_path / "c").endswith("c-3")
    assert latest_checkpoint(tmp_path) == str(tmp_path / "c-3")
    read = Checkpoint(a=Variable(0.0))
    read.read(tmp_path / "c-3").assert_consumed()
    assert read.save_counter.numpy() == 0
    written = read.write(tmp_path / "plain")
    assert written == str(tmp_path / "plain")
    assert set(Manifest.of(written).tensors) == {"a"}
    Checkpoint(a=Variable(0.0)).restore(written).assert_consumed()


async def test_the_async_forms(tmp_path):
    checkpoint = Checkpoint(a=Variable(3.0))
    path = await checkpoint.save_async(tmp_path / "c")
    plain = await checkpoint.write_async(tmp_path / "plain")
    for each in (path, plain):
        other = Variable(0.0)
        await Checkpoint(a=other).restore_async(each)
        assert other.numpy() == 3.0
        (await Checkpoint(a=other).read_async(each)).assert_existing_objects_matched()
    # The blocking forms work where a loop is running, as in a notebook.
    assert checkpoint.save(tmp_path / "c").endswith("c-2")


async def test_a_cancelled_save_leaves_nothing(tmp_path):
    checkpoint = Checkpoint(a=Variable(np.zeros(30_000_000, "u1")))
    saving = asyncio.create_task(checkpoint.save_async(tmp_path / "c"), name="saving")
    while not (tmp_path / "c-1").exists():  # noqa: ASYNC110
        await asyncio.sleep(0)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert [p.name for p in tmp_path.iterdir()] == []
    assert checkpoint.save_counter.numpy() == 0
    assert (await checkpoint.save_async(tmp_path / "c")).endswith("c-1")


def test_two_writers_of_one_folder(tmp_path):
    from zstrat.checkpoint import CheckpointFolder

    checkpoint = Checkpoint(a=Variable(1.0))
    with CheckpointFolder(str(tmp_path / "c-1")):
        with pytest.raises(BusyError, match="c-1"):
            checkpoint.save(tmp_path / "c")
    assert checkpoint.save_counter.numpy() == 0
    assert checkpoint.save(tmp_path / "c").endswith("c-1")


def test_damage_is_found_before_anything_is_restored(tmp_path):
    path = Checkpoint(a=Variable(ones(4)), b=Variable(ones(4))).save(tmp_path / "c")
    (part,) = (tmp_path / "c-1").glob("part-*")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    a, b = zeros(4), zeros(4)
    with pytest.raises(DataLossError, match="'b'") as caught:
        Checkpoint(a=a, b=b).restore(path)
    assert caught.value.file == str(part)
    assert not a.numpy().any()
    part.write_bytes(data[:-2])
    with pytest.raises(DataLossError, match="c-1"):
        Checkpoint(a=a, b=b).restore(path)


def test_a_manifest_with_damaged_objects_is_refused(tmp_path):
    path = Checkpoint(a=Variable(1.0)).save(tmp_path / "c")
    good = Manifest.of(path)
    for nodes in ([], [{}], [{"kind": "group", "path": "", "children": {"a": 9}}], "x"):
        bad = Manifest(good.tensors, good.files, {"nodes": nodes})
        (tmp_path / "c-1" / MANIFEST).write_bytes(bad.encode())
        with pytest.raises(DataLossError, match=r"damaged object|not the objects"):
            Checkpoint(a=Variable(1.0)).restore(path)
    assert json.loads(bad.encode())["manifest"]["version"] == 1


def in_threads(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def test_a_save_and_restores_in_other_threads_do_not_mix(tmp_path):
    """Each of the variables has the same value in every checkpoint."""
    count = 40
    variables = [zeros() for _ in range(count)]
    checkpoint, other = Checkpoint(v=variables), Checkpoint(other=variables[::-1])
    paths = []
    for value in (1.0, 2.0):
        for variable in variables:
            variable.assign(value)
        paths.append((checkpoint.save(tmp_path / "a"), other.save(tmp_path / "b")))

    def restores():
        for _ in range(6):
            for mine, _ in paths:
                checkpoint.restore(mine)

    def restores_other():
        for _ in range(6):
            for _, theirs in paths:
                other.restore(theirs)

    def saves():
        return [checkpoint.save(tmp_path / "c") for _ in range(6)]

    saved, _, _ = in_threads(saves, restores, restores_other)
    assert len({v.numpy().item() for v in variables}) == 1
    for path in saved:
        checkpoint.restore(path)
        assert len({v.numpy().item() for v in variables}) == 1


def test_saves_in_threads_get_numbers_of_their_own(tmp_path):
    checkpoint = Checkpoint(v=zeros(3))
    save = partial(checkpoint.save, tmp_path / "x")
    names = {path.rpartition("/")[2] for path in in_threads(*[save] * 6)}
    assert names == {f"x-{number}" for number in range(1, 7)}
    assert checkpoint.save_counter.numpy() == 6


async def test_a_blocking_save_does_not_wait_for_one_on_its_own_loop(tmp_path):
    checkpoint = Checkpoint(v=zeros(3))
    first = asyncio.create_task(checkpoint.save_async(tmp_path / "x"))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="_async"):
        checkpoint.save(tmp_path / "x")
    assert (await first).endswith("x-1")


async def test_a_blocking_save_does_not_wait_for_what_waits_for_its_own_loop(tmp_path):
    a, b = zeros(3), zeros(3)
    between, has_come = Checkpoint(a=a, b=b), threading.Event()

    async def saves():
        saving = asyncio.create_task(between.save_async(tmp_path / "between"))
        await asyncio.sleep(0)
        has_come.set()
        await saving

    first = asyncio.create_task(Checkpoint(a=a).save_async(tmp_path / "a"))
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    second = loop.run_in_executor(None, asyncio.run, saves())
    has_come.wait()  # on the loop: the first one must not end meanwhile
    with pytest.raises(RuntimeError, match="_async"):
        Checkpoint(b=b).save(tmp_path / "b")
    await asyncio.gather(first, second)


async def test_a_save_that_is_cancelled_while_it_waits_lets_the_others_on(tmp_path):
    checkpoint = Checkpoint(v=zeros(3))
    tasks = [
        asyncio.create_task(checkpoint.save_async(tmp_path / "x")) for _ in range(3)
    ]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert [results[0][-3:], results[2][-3:]] == ["x-1", "x-2"]
