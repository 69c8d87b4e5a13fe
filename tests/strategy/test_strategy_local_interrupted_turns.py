"""Errors and settings of jax around a meeting of replicas in turns: the others are
ended, the first error is raised, and no setting is left behind or is another's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_replicas import meet, number
from jax.extend import source_info_util

import zstrat as zs

MEAN = zs.VariableAggregation.MEAN


@pytest.fixture
def shared(two):
    with two.scope():
        return zs.Variable(0.0, aggregation=MEAN)


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


def settings():
    return (
        jax.config.jax_default_matmul_precision,
        jax.config.jax_enable_x64,
        jax.config.jax_default_device,
        jax.config.jax_disable_jit,
        jax.sharding.get_abstract_mesh(),
        str(source_info_util.current_name_stack()),
    )


def contexts():
    yield "default_matmul_precision", lambda: jax.default_matmul_precision("highest")
    yield "enable_x64", lambda: jax.enable_x64(not jax.config.jax_enable_x64)
    yield "disable_jit", jax.disable_jit
    yield "default_device", lambda: jax.default_device(jax.devices()[5])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("context", list(contexts()), ids=lambda each: each[0])
def test_a_meeting_inside_of_a_setting_is_refused(two, context, inside):
    name, entered = context

    def replica():
        with entered():
            meet()

    run = zs.function(two.run) if inside else two.run
    before = settings()
    with pytest.raises(RuntimeError, match=rf"merge_call inside `with jax.{name}"):
        run(replica)
    assert settings() == before


def test_a_meeting_inside_of_a_mesh_is_refused(two):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])

    def replica():
        meet()
        with jax.set_mesh(mesh):
            meet()

    before = settings()
    with pytest.raises(RuntimeError, match="set_mesh"):
        two.run(replica)
    assert settings() == before


def test_settings_around_the_run_or_between_meetings_are_kept(two):
    seen = []

    def replica():
        meet()
        with jax.default_matmul_precision("highest"):
            seen.append(jax.config.jax_default_matmul_precision)
        meet()
        seen.append(jax.config.jax_default_matmul_precision)

    before = settings()
    with jax.default_matmul_precision("float32"):
        two.run(replica)
    assert seen == ["highest", "highest", "float32", "float32"]
    assert settings() == before


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_names_for_profiles_are_each_replicas_own(two, inside, fails):
    seen = []

    def names():
        return str(source_info_util.current_name_stack())

    def merged(strategy):
        seen.append(names())
        if fails:
            raise KeyError("merge_fn")

    def replica():
        meet()  # so that it is no one program
        with jax.named_scope(f"of_{number()}"):
            seen.append(names())
            meet(merged)
            seen.append(names())
        return jnp.ones(1)

    run = zs.function(two.run) if inside else two.run
    before = settings()
    if fails:
        with pytest.raises(KeyError):
            run(replica)
    else:
        run(replica)
    # A step that is traced twice, say, sees the same each time.
    for start in range(0, len(seen), 3 if fails else 5):
        first, second, *rest = seen[start : start + (3 if fails else 5)]
        assert (first, second) == ("of_0", "of_1")
        assert rest[0] == ""
        assert rest[1:] == ([] if fails else ["of_0", "of_1"])
    assert settings() == before


def test_all_are_ended_and_the_first_error_is_raised():
    strategy = zs.MirroredStrategy([f"CPU:{n}" for n in range(3)])
    ended = []

    def replica():
        meet()  # so that it is no one program
        try:
            meet(lambda strategy: 1 / 0)
        finally:
            ended.append(number())
            if number() < 2:
                raise OSError(f"cannot close {number()}")

    with pytest.raises(ZeroDivisionError) as caught:
        strategy.run(replica)
    assert ended == [0, 1, 2]
    notes = caught.value.__notes__[:2]  # behind them: that frames are hidden
    assert [f"cannot close {n}" in note for n, note in enumerate(notes)] == [True] * 2


def test_an_interrupt_while_ending_is_raised_when_all_have_ended(two):
    ended = []

    def replica():
        meet()  # so that it is no one program
        try:
            meet(lambda strategy: 1 / 0)
        finally:
            ended.append(number())
            if number() == 0:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        two.run(replica)
    assert ended == [0, 1]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_who_is_ended_runs_on_its_own_device(two):
    where = []

    def replica():
        meet()  # so that it is no one program
        try:
            meet(lambda strategy: 1 / 0)
        finally:
            where.append(jnp.zeros(1).devices())

    with pytest.raises(ZeroDivisionError):
        two.run(replica)
    assert where == [{device} for device in np.array(jax.devices()[:2])]
