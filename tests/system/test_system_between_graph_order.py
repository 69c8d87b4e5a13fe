"""Programs that share parameter servers stay in step when a creation fails."""

import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.config import Settings, Timeouts
from zstrat.testing import ThreadCluster

IMPATIENT = Settings(timeouts=Timeouts(request=0.3))


@pytest.fixture(scope="module")
def spec():
    with ThreadCluster(num_ps=2, num_workers=0) as cluster:
        ps = cluster.spec.job_tasks("ps")
        yield {"ps": ps, "worker": ["localhost:1", "localhost:2"]}


def program(spec, task, **options):
    resolver = zs.cluster_resolver.SimpleClusterResolver(
        zs.ClusterSpec(spec), task_type="worker", task_id=task
    )
    return zs.BetweenGraphStrategy(resolver, **options)


def variable(strategy, value, name):
    with strategy.scope():
        return zs.Variable(np.asarray(value, np.float32), name=name)


def test_who_gave_up_waiting_asks_for_the_same_again(spec):
    # The other's own requests are short, so it is its handles that are compared.
    with program(spec, 0) as chief, program(spec, 1, settings=IMPATIENT) as other:
        with other.scope():
            for _ in range(2):
                with pytest.raises(
                    zs.DeadlineExceededError,
                    match=r"'a'.*\[2\]",
                ):
                    zs.Variable(np.zeros(2, np.float32), name="a")
            with pytest.raises(zs.DeadlineExceededError, match="'sgd'"):
                zs.Optimizer(optax.sgd(0.5), name="sgd")
        values = {"a": [1, 1], "b": [2, 2, 2], "c": [3]}
        theirs = [variable(chief, value, name) for name, value in values.items()]
        with chief.scope():
            optimizer = zs.Optimizer(optax.sgd(0.5), name="sgd")
        for made, (name, value) in zip(theirs, values.items(), strict=True):
            mine = variable(other, np.zeros_like(value), name)
            assert mine.spec == made.spec
        with other.scope():
            assert zs.Optimizer(optax.sgd(0.5), name="sgd").id == optimizer.id


def refused_initializer(shape, dtype, partition_shape, partition_offset):
    raise RuntimeError("no value")


def test_what_a_server_refused_counts_for_nobody(spec):
    with program(spec, 0) as chief, program(spec, 1) as other:

        def broken(params):
            raise RuntimeError("no state")

        x = variable(chief, [7], "x")
        with chief.scope():
            with pytest.raises(
                ValueError, match=r"'Optimizer'.*RuntimeError.*zs\.Optimizer"
            ):
                zs.Optimizer(optax.GradientTransformation(broken, broken), params=x)
            with pytest.raises(zs.InvalidArgumentError):
                zs.Variable(refused_initializer, shape=(3,), dtype="float32")
            theirs = zs.Optimizer(optax.sgd(0.5))
        assert variable(other, [0], "x").numpy().tolist() == [7]
        assert x.device == "/job:ps/replica:0/task:0/device:CPU:0"
        with other.scope():
            mine = zs.Optimizer(optax.sgd(0.5))
        assert mine.id == theirs.id


def test_what_came_too_late_gives_its_value_to_nobody(spec, monkeypatch):
    with program(spec, 0) as chief, program(spec, 1) as other:
        servers = chief._session.servers
        create, optimize = servers.create_variables, servers.create_optimizer

        def too_late(method):
            async def called(*args):
                await method(*args)
                raise zs.DeadlineExceededError("too late")

            return called

        with monkeypatch.context() as patch, chief.scope():
            patch.setattr(servers, "create_variables", too_late(create))
            patch.setattr(servers, "create_optimizer", too_late(optimize))
            with pytest.raises(zs.DeadlineExceededError):
                zs.create_variables({"a": np.ones(2, "f4"), "b": np.ones(3, "f4")})
            with pytest.raises(zs.DeadlineExceededError):
                zs.Optimizer(optax.sgd(0.5))
        x = variable(chief, [7, 7], "x")
        y = variable(chief, [8, 8, 8], "y")
        assert (x.numpy().tolist(), y.numpy().tolist()) == ([7, 7], [8, 8, 8])
        mine = variable(other, [0, 0], "x")
        assert mine.spec == x.spec
        with chief.scope():
            optimizer = zs.Optimizer(optax.sgd(1.0))  # and not the one of 0.5
        with other.scope():
            zs.Optimizer(optax.sgd(1.0)).apply_gradients([(np.ones(2, "f4"), mine)])
        optimizer.apply_gradients([(np.ones(2, "f4"), x)])
        assert x.numpy().tolist() == [5, 5]


def test_another_order_is_refused_and_the_right_one_is_taken(spec):
    with program(spec, 0) as chief, program(spec, 1) as other:
        p = variable(chief, [1, 2], "p")
        q = variable(chief, [[9, 9]], "q")
        with pytest.raises(
            zs.InvalidArgumentError,
            match=r"'q'.*\[1, 2\].*'p'",
        ):
            variable(other, [[0, 0]], "q")
        assert variable(other, [0, 0], "p").numpy().tolist() == p.numpy().tolist()
        assert variable(other, [[0, 0]], "q").numpy().tolist() == q.numpy().tolist()
