"""Checkpoints of variables of which each replica of several processes has its own."""

import numpy as np
import pytest
from ranks import ranks

import zstrat as zs
from zstrat import VariableAggregation as A
from zstrat.errors import CollectiveTimeoutError
from zstrat.variables import shares_of


def metric(strategy, aggregation, value=0.0):
    with strategy.scope():
        return zs.Variable(
            value,
            name="seen",
            aggregation=aggregation,
            synchronization=zs.VariableSynchronization.ON_READ,
        )


@pytest.mark.parametrize(
    ("aggregation", "merged", "each"),
    [
        (A.SUM, 4.0, 2.0),
        (A.MEAN, 2.0, 2.0),
        (A.ONLY_FIRST_REPLICA, 1.0, 1.0),
    ],
)
def test_a_checkpoint_has_the_value_of_all_processes(
    tmp_path, aggregation, merged, each
):
    def program(strategy, rank):
        v = metric(strategy, aggregation)
        strategy.run(lambda: v.assign(1.0 + 2 * rank))
        saved = zs.Checkpoint(v=v)
        path = saved.save(str(tmp_path / f"rank{rank}"))
        strategy.run(lambda: v.assign(100.0))
        saved.restore(path)
        found = [float(v.numpy()), float(v.local_value)]
        plain = zs.Variable(0.0)
        zs.Checkpoint(v=plain).restore(path)
        plain_value = float(plain.numpy())
        plain.assign(10.0)
        zs.Checkpoint(v=v).restore(zs.Checkpoint(v=plain).save(f"{path}-plain"))
        return [*found, plain_value, float(v.numpy())]

    assert ranks(2, program) == [[merged, each, merged, 10.0]] * 2


def test_a_sum_of_integers_is_whole_after_a_restore(tmp_path):
    def program(strategy, rank):
        v = metric(strategy, A.SUM, np.int32(0))
        strategy.run(lambda: v.assign(np.int32(-3 - rank)))
        saved = zs.Checkpoint(v=v)
        saved.restore(saved.save(str(tmp_path / f"rank{rank}")))
        return int(v.numpy()), int(v.local_value)

    # -12 over three ranks, and -7 over two.
    assert ranks(3, program) == [(-12, -4)] * 3
    assert ranks(2, program) == [(-7, -3), (-7, -4)]


def test_without_aggregation_each_process_saves_its_own(tmp_path):
    def program(strategy, rank):
        v = metric(strategy, A.NONE)
        strategy.run(lambda: v.assign(1.0 + rank))
        saved = zs.Checkpoint(v=v)
        path = saved.save(str(tmp_path / f"rank{rank}"))
        strategy.run(lambda: v.assign(0.0))
        saved.restore(path)
        return float(v.local_value)

    assert ranks(2, program) == [1.0, 2.0]


def test_a_process_that_saves_alone_gets_the_reason(tmp_path, monkeypatch):
    def program(strategy, rank):
        v = metric(strategy, A.SUM)
        if rank:
            return True

        def all_reduce(tree, op="sum"):
            raise CollectiveTimeoutError("all_reduce", "rank 1 did not come")

        monkeypatch.setattr(strategy._channel.collective, "all_reduce", all_reduce)
        with pytest.raises(CollectiveTimeoutError) as caught:
            zs.Checkpoint(v=v).save(str(tmp_path / "alone"))
        (note,) = (note for note in caught.value.__notes__ if "'seen'" in note)
        assert "all of them save" in note
        assert not list(tmp_path.glob("alone*"))
        return True

    assert ranks(2, program) == [True, True]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64", "float32"])
@pytest.mark.parametrize("count", [1, 3, 300])
def test_shares_make_up_the_value(dtype, count):
    value = np.array([[0, 1], [7, 120]], dtype)
    found = shares_of(value, count)
    assert found.shape == (count, 2, 2)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.sum(0, dtype=dtype), value, rtol=1e-5)
    assert np.ptp(found.astype(float), axis=0).max() <= 1
