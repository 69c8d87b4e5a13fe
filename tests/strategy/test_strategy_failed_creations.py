"""What cannot be created does not count: keys, turns, numbers go to the next one."""

import contextlib

import hypothesis.strategies as st
import numpy as np
import optax
import pytest
from hypothesis import given

import zstrat.variables as zv
from zstrat.errors import DeadlineExceededError, InvalidArgumentError
from zstrat.strategy.server import Numbers, PlacementRule, VariablePlacement, draft
from zstrat.variables import (
    VariableAggregation,
    VariableRequest,
    VariableSynchronization,
)


def request(rows, name="v"):
    value = np.zeros(rows, np.float32)
    auto = VariableSynchronization.AUTO
    return VariableRequest(
        value, None, None, name, True, VariableAggregation.NONE, auto
    )


class Fails(Exception):
    pass


def keys_and_places(batches, rule):
    """Of those that do not fail: each batch is rows of its variables, and its fate."""
    numbers = Numbers(5, VariablePlacement(3, rule))
    made = []
    for rows, parts, fails in batches:
        partitioner = None if parts is None else lambda parts=parts, **_: [parts]
        with contextlib.suppress(Fails), numbers.taking():
            specs = [
                spec
                for each in rows
                for spec in numbers.components(draft(request(each), partitioner), None)
            ]
            optimizer = numbers.optimizer()
            if fails:
                raise Fails
            made.append(([(spec.key, spec.ps) for spec in specs], optimizer))
    return made


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 9), max_size=4),
            st.none() | st.integers(1, 4),
            st.booleans(),
        ),
        max_size=8,
    ),
    st.sampled_from(PlacementRule),
)
def test_failures_do_not_count(batches, rule):
    successes = [batch for batch in batches if not batch[2]]
    assert keys_and_places(batches, rule) == keys_and_places(successes, rule)


def test_what_failed_is_doubtful_until_it_is_settled():
    numbers = Numbers(5, VariablePlacement(2))
    with contextlib.suppress(Fails), numbers.taking():
        specs = numbers.components(draft(request(2), None), None)
        number = numbers.optimizer()
        raise Fails
    assert numbers.doubtful == (specs, [number])
    assert not numbers.has_variable(specs[0])
    assert not numbers.has_optimizer(number)
    numbers.settled()
    with numbers.taking():
        again = numbers.components(draft(request(2), None), None)
    assert again == specs
    assert numbers.has_variable(specs[0])
    assert numbers.doubtful == ([], [])


@contextlib.contextmanager
def late(session, monkeypatch):
    """The servers carry out what they are asked, and say so too late."""

    def then_fail(method):
        async def called(*args):
            await method(*args)
            raise DeadlineExceededError("too late")

        return called

    with monkeypatch.context() as patch:
        patch.setattr(session, "create_variables", then_fail(session.create_variables))
        yield


def variable(strategy, value, name):
    with strategy.scope():
        return zv.Variable(np.float32(value), name=name)


def test_a_variable_gets_key_and_turn_of_one_that_failed(make_cluster, monkeypatch):
    fake = make_cluster(ps=3)
    first = variable(fake.strategy, [1], "first")
    with late(fake.session, monkeypatch):
        for value in ([5, 5], [6]):
            with pytest.raises(DeadlineExceededError):
                variable(fake.strategy, value, "late")
    # It lies there, where the next one will: without a word that would keep its value.
    assert fake.session.values[first.spec.key + 1].tolist() == [6]
    second = variable(fake.strategy, [7], "second")
    third = variable(fake.strategy, [8], "third")
    assert [v.spec.key - first.spec.key for v in (second, third)] == [1, 2]
    assert [v.spec.ps for v in (first, second, third)] == [0, 1, 2]
    assert (second.numpy().tolist(), third.numpy().tolist()) == ([7], [8])
    assert len(fake.session.values) == 3


def test_what_cannot_be_removed_is_tried_again(make_cluster, monkeypatch):
    fake = make_cluster(ps=1)
    with late(fake.session, monkeypatch), pytest.raises(DeadlineExceededError):
        variable(fake.strategy, [5], "late")
    with monkeypatch.context() as busy:

        async def too_late(specs, optimizers):
            raise DeadlineExceededError("still busy")

        busy.setattr(fake.session, "withdraw", too_late)
        for _ in range(2):
            with pytest.raises(DeadlineExceededError, match="still busy"):
                variable(fake.strategy, [6], "v")
    made = variable(fake.strategy, [7], "v")
    assert made.numpy().tolist() == [7]
    assert list(fake.session.values) == [made.spec.key]
    variable(fake.strategy, [8], "w")
    assert fake.session.requests.count("withdraw") == 1


def test_an_optimizer_gets_the_number_of_one_that_was_refused(make_cluster):
    fake = make_cluster()
    fake.session.refuse = "not here"
    with fake.strategy.scope():
        with pytest.raises(InvalidArgumentError, match="not here"):
            zv.Optimizer(optax.sgd(0.1))
        fake.session.refuse = None
        first = zv.Optimizer(optax.sgd(0.2))
        second = zv.Optimizer(optax.sgd(0.3))
    base = fake.strategy.session.session % 2**40 << 20
    assert (first.id, second.id) == (base + 1, base + 2)


def test_an_optimizer_without_its_counter_does_not_count(make_cluster, monkeypatch):
    fake = make_cluster()
    with fake.strategy.scope():
        with late(fake.session, monkeypatch), pytest.raises(DeadlineExceededError):
            zv.Optimizer(optax.sgd(0.1), count_iterations=True)
        made = zv.Optimizer(optax.sgd(0.2), count_iterations=True)
    base = fake.strategy.session.session % 2**40 << 20
    assert (made.id, made.iterations.spec.key) == (base + 1, base + 1)
    assert list(fake.session.transformations) == [base + 1]
    assert list(fake.session.values) == [base + 1]
