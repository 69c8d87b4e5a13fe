"""An error of one replica, which meets the others while it cleans up after it."""

import numpy as np
import pytest

import zstrat as zs

MEAN = zs.VariableAggregation.MEAN


@pytest.fixture(scope="module")
def two():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def shared(two):
    with two.scope():
        return zs.Variable(0.0, aggregation=MEAN)


def number():
    return zs.get_replica_context().replica_id_in_sync_group


def meet():
    zs.get_replica_context().merge_call(lambda _: None)


@pytest.mark.parametrize("failing", [0, 1])
def test_the_others_wait_elsewhere(two, shared, failing):
    def fn():
        try:
            if int(number()) == failing:
                raise KeyError("the user's")
            meet()
        finally:
            shared.assign(1.0)

    with pytest.raises(RuntimeError, match="merge_call") as caught:
        two.run(fn)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.args == ("the user's",)
    assert shared.numpy() == 0


@pytest.mark.parametrize("failing", [0, 1])
def test_the_others_have_returned(two, shared, failing):
    def fn():
        if int(number()) != failing:
            return
        try:
            raise KeyError("the user's")
        finally:
            shared.assign(1.0)

    with pytest.raises(RuntimeError, match="merge_call") as caught:
        two.run(fn)
    assert isinstance(caught.value.__cause__, KeyError)


def test_all_clean_up_and_the_error_is_raised(two, shared):
    def fn():
        try:
            if int(number()) == 1:
                raise KeyError("the user's")
        finally:
            shared.assign(1.0)

    with pytest.raises(KeyError, match="the user's"):
        two.run(fn)
    np.testing.assert_array_equal(shared.numpy(), 1)


def test_what_the_caller_handles_is_no_cause(two, shared):
    def fn():
        if int(number()) == 0:
            meet()
        shared.assign(1.0)

    try:
        raise OSError("handled outside")
    except OSError:
        with pytest.raises(RuntimeError, match="merge_call") as caught:
            two.run(fn)
    assert caught.value.__cause__ is None
    assert isinstance(caught.value.__context__, OSError)
