"""Options of one collective: honoured where they mean something, else refused."""

import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ranks

import zstrat as zs
from zstrat.cluster import ClusterSpec, SimpleClusterResolver, free_ports
from zstrat.errors import CollectiveTimeoutError
from zstrat.program.stages import Channel
from zstrat.strategy.reduce import ChosenGroup, called_with
from zstrat.strategy.replica import Team

SOON = zs.CommunicationOptions(timeout_seconds=1.0)
RING = zs.CommunicationOptions(implementation="RING", bytes_per_pack=7)
X = np.arange(6.0, dtype=np.float32).reshape(3, 2)


def reduced(options):
    return zs.get_replica_context().all_reduce("SUM", jnp.asarray(X), options)


def gathered(options):
    return zs.get_replica_context().all_gather(jnp.asarray(X), 0, options)


COLLECTIVES = {"all_reduce": (reduced, 2 * X), "all_gather": (gathered, [*X, *X])}


@pytest.mark.parametrize("is_step", [True, False], ids=["step", "eager"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_processes_are_brought_together_with_the_options(name, is_step):
    collective, expected = COLLECTIVES[name]

    def program(strategy, rank):
        def step():
            return strategy.run(collective, (SOON,)), strategy.run(collective, (None,))

        found = zs.function(step)() if is_step else step()
        asked = [call[2:] for call in collective_of(strategy).board.calls]
        return jax.tree.map(np.asarray, found), asked

    for found, asked in ranks(2, program):
        for value in found:
            np.testing.assert_array_equal(value, expected)
        # Those of a step that have nothing to do with each other go in any order.
        assert sorted(asked, key=len) == [(), (SOON,)]


def collective_of(strategy):
    return strategy._team().channel.collective


def test_reduce_to_is_given_them_too():
    def program(strategy, rank):
        total = strategy.extended.reduce_to("SUM", X, X, SOON)
        return np.asarray(total), collective_of(strategy).board.calls

    for total, calls in ranks(2, program):
        np.testing.assert_array_equal(total, 2 * X)
        assert [call[2:] for call in calls] == [(SOON,)]


def test_gradients_of_a_call_have_its_options():
    def program(strategy, rank):
        def loss(x):
            return zs.get_replica_context().all_reduce("SUM", x * x, SOON).sum()

        found = zs.function(lambda x: strategy.run(jax.grad(loss), (x,)))(X)
        return np.asarray(found), collective_of(strategy).board.calls

    for found, calls in ranks(2, program):
        np.testing.assert_allclose(found, 4 * X)
        assert {call[2:] for call in calls} == {(SOON,)}


class Recording:
    """A group that says how it was called."""

    rank, size, generation = 0, 2, 0

    def __init__(self):
        self.calls = []

    def all_reduce(self, tree, op, **how):
        self.calls.append(how)
        return tree

    def all_gather(self, tree, axis, **how):
        self.calls.append(how)
        return tree


def test_what_a_call_leaves_out_is_as_the_strategy_says():
    made = zs.CommunicationOptions(timeout_seconds=9.0, implementation="TREE")
    group = Recording()
    chosen = ChosenGroup(group, made)
    chosen.under(RING).all_reduce([X])
    chosen.under(SOON).all_reduce([X])
    chosen.under(SOON).all_gather([X])
    chosen.all_reduce([X])
    assert group.calls == [
        {"algorithm": "ring", "timeout": 9.0, "bytes_per_pack": 7},
        {"algorithm": "double_tree", "timeout": 1.0, "bytes_per_pack": None},
        {"timeout": 1.0},
        {"algorithm": "double_tree", "timeout": 9.0, "bytes_per_pack": None},
    ]


@pytest.mark.parametrize("is_step", [True, False], ids=["step", "eager"])
def test_a_call_gives_up_when_its_own_time_is_over(is_step):
    spec = ClusterSpec({"worker": [f"127.0.0.1:{p}" for p in free_ports(2)]})
    given_up, found = threading.Event(), {}

    def one(rank):
        resolver = SimpleClusterResolver(spec, task_type="worker", task_id=rank)
        options = zs.CommunicationOptions(timeout_seconds=60)
        with zs.MultiWorkerMirroredStrategy(resolver, options) as strategy:
            if rank:
                given_up.wait(100)  # if that is over it leaves: another error
                return
            try:
                found["error"] = late(strategy)
            finally:
                given_up.set()

    def late(strategy):
        def step():
            return strategy.run(reduced, (SOON,))

        compiled = zs.function(step)
        if is_step:
            compiled.plan()
        with pytest.raises(CollectiveTimeoutError) as error:
            compiled() if is_step else step()
        return error.value

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert "error" in found


def channel_of(**parts):
    return Channel(SimpleNamespace(rank=0, size=2, generation=0), **parts)


def test_an_implementation_that_the_strategy_was_not_made_for_is_refused():
    for name in ("XLA", "NCCL"):
        options = zs.CommunicationOptions(implementation=name)
        with pytest.raises(
            ValueError, match=f"all_reduce: .*={name}.* to the strategy"
        ):
            called_with(Team(1, channel_of()), options, "all_reduce")


@pytest.mark.parametrize(
    ("options", "words"),
    [(SOON, r"timeout_seconds=1\.0"), (RING, "implementation=RING")],
)
def test_what_xla_does_not_do_in_a_step_is_refused(options, words):
    team = Team(1, channel_of(mesh=SimpleNamespace()))
    seen = []

    @zs.function
    def step():
        with pytest.raises(ValueError, match=words):
            called_with(team, options, "all_reduce")
        seen.append(True)
        return 0

    step()
    assert seen
    # Elsewhere the group carries it out.
    assert called_with(team, options, "all_reduce").channel.options is options


def test_what_are_no_options_is_refused():
    strategy = zs.OneDeviceStrategy("CPU:0")
    for collective in (reduced, gathered):
        with pytest.raises(TypeError, match=r"zs\.CommunicationOptions"):
            strategy.run(collective, ("fast",))


def test_one_process_waits_for_nobody():
    strategy = zs.OneDeviceStrategy("CPU:0")
    for options in (SOON, RING, zs.CommunicationOptions(implementation="NCCL")):
        np.testing.assert_array_equal(strategy.run(reduced, (options,)), X)


def test_replicas_that_take_turns_say_the_same_options(two_replicas):
    def disagreeing():
        context = zs.get_replica_context()
        context.merge_call(lambda strategy: None)  # which makes them take turns
        number = int(context.replica_id_in_sync_group)
        return context.all_reduce("SUM", 1.0, SOON if number % 2 else None)

    with pytest.raises(RuntimeError, match=r"timeout_seconds=1\.0"):
        two_replicas(disagreeing)


@pytest.fixture
def two_replicas():
    """Runs a function as two replicas of one of several processes."""
    device = jax.local_devices()[0]

    def run(fn):
        def program(strategy, rank):
            team = strategy._team()
            strategy._team = lambda: Team(2, team.channel)
            strategy._devices = lambda: (device, device)
            return strategy.run(fn)

        return ranks(2, program)

    return run
