"""Which logical device is current, of each strategy by itself."""

import contextvars

import pytest

import zstrat as zs
from zstrat.tpu.experimental import DeviceAssignment, initialize_tpu_system


@pytest.fixture
def make():
    """Replicas of ``cores`` neighbours each of the eight devices."""

    def make(cores):
        topology = initialize_tpu_system(mesh_shape=[1, 1, 1, 8])
        assignment = DeviceAssignment.build(
            topology, [1, 1, 1, cores], None, 8 // cores
        )
        return zs.TPUStrategy(None, assignment).extended

    return make


def numbers(extended):
    assert extended.parameter_devices == extended.worker_devices
    return [int(name.rpartition(":")[2]) for name in extended.worker_devices]


def test_every_strategy_has_a_current_logical_device_of_its_own(make):
    two, four, one = make(2), make(4), zs.TPUStrategy().extended
    firsts = {n: sorted(numbers(each)) for n, each in ((2, two), (4, four))}
    assert firsts == {2: [0, 2, 4, 6], 4: [0, 4]}
    with two.experimental_logical_device(1):
        assert sorted(numbers(two)) == [1, 3, 5, 7]
        assert sorted(numbers(four)) == [0, 4]
        assert numbers(one) == list(range(8))
        with four.experimental_logical_device(3):
            assert sorted(numbers(two)) == [1, 3, 5, 7]
            assert sorted(numbers(four)) == [3, 7]
            with two.experimental_logical_device(0):
                with four.experimental_logical_device(2):
                    assert sorted(numbers(two)) == [0, 2, 4, 6]
                    assert sorted(numbers(four)) == [2, 6]
                assert sorted(numbers(four)) == [3, 7]
            assert sorted(numbers(two)) == [1, 3, 5, 7]
            assert sorted(numbers(four)) == [3, 7]
        assert sorted(numbers(four)) == [0, 4]
    assert sorted(numbers(two)) == [0, 2, 4, 6]


def test_strategies_that_are_alike_are_still_two(make):
    one, other = make(2), make(2)
    with one.experimental_logical_device(1):
        assert sorted(numbers(one)) == [1, 3, 5, 7]
        assert sorted(numbers(other)) == [0, 2, 4, 6]


def test_another_context_has_entered_nothing(make):
    extended = make(2)
    outside = contextvars.copy_context()
    with extended.experimental_logical_device(1):
        assert sorted(outside.run(numbers, extended)) == [0, 2, 4, 6]
