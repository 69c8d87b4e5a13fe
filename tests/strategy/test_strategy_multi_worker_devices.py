"""Where variables of several processes are: each process names its own device."""

from ranks import ranks

import zstrat as zs


def test_each_rank_names_its_own_task():
    def program(strategy, rank):
        with strategy.scope():
            v = zs.Variable(1.0)
        assert strategy.extended.parameter_devices[0] == v.device
        assert strategy.extended.non_slot_devices([v]) == v.device
        return v.device

    assert ranks(2, program) == [
        f"/job:worker/replica:0/task:{rank}/device:CPU:0" for rank in range(2)
    ]
