"""Stores that are distributed over parameter servers, and rebalanced among them."""

import pytest
from coordinator_fakes import good
from coordinator_stores import connected, kinds, served
from coordinator_stores import world as world
from hypothesis import given
from hypothesis import strategies as st

from zstrat.coordinator.replication import plan_drain, plan_rebalance
from zstrat.errors import InvalidArgumentError
from zstrat.wire import AttachBackup, DetachBackup


def test_stores_are_distributed_and_rebalanced(world):
    servers, third = connected(world, stores_per_ps=3), world.newcomer(2)
    hosted = [[copy.index for copy in task.copies] for task in world.ps]
    assert hosted == [[2, 4], [3, 5], []]
    opened = world.workers[0].sessions[-1]
    assert (opened.ps[:2], len(set(opened.ps))) == (["ps0:1", "ps1:1"], 6)
    servers.add("ps2:1")
    counts = [served(world).count(f"/job:ps/task:{number}") for number in range(3)]
    assert counts == [2, 2, 2]
    assert sorted(index for index, _ in world.moves()) == [4, 5]
    servers.drain("ps1:1")
    assert "/job:ps/task:1" not in served(world)
    assert len(third.copies) == 3


def test_stores_that_a_failover_brought_to_one_server_are_rebalanced(world):
    servers = connected(world, replicas=1)
    world.on_loop(world.ps[0].kill)
    world.until(lambda: served(world) == ["/job:ps/task:1"] * 2)
    world.on_loop(world.ps[0].come_back)
    world.until(world.paired)
    servers.rebalance()
    assert sorted(served(world)) == ["/job:ps/task:0", "/job:ps/task:1"]
    assert world.paired()
    servers.rebalance()
    assert world.replication.status.statistics()["stores_moved"] == 1


def test_second_copies_are_elsewhere_before_a_server_goes(world):
    servers, coordinator = connected(world, replicas=1), world.coordinator()
    with pytest.raises(InvalidArgumentError):
        servers.drain("ps0:1")
    world.newcomer(2)
    servers.add("ps2:1")
    servers.drain("ps0:1")
    stores = coordinator.metrics()["stores"]
    assert [store["process"] for store in stores] == ["/job:ps/task:1"] * 2
    assert [store["backup"] for store in stores] == ["/job:ps/task:2"] * 2
    assert (world.paired(), world.numbers_of["failovers"]) == (True, 0)
    asked = [kind for task in world.ps for kind in kinds(task)]
    assert DetachBackup not in asked  # no store was alone at any moment
    world.on_loop(world.ps[1].kill)
    world.until(lambda: all(store.primary.process == 2 for store in places(world)))
    assert coordinator.schedule(good).fetch() == 1


def test_a_second_copy_that_becomes_the_first_meanwhile_is_moved_too(world):
    servers = connected(world, replicas=1, stores_per_ps=2)
    for number in (2, 3):
        world.newcomer(number)
        servers.add(f"ps{number}:1")
    # The first process has the second copies of stores that two others serve.
    at = [(store.primary.process, store.backup.process) for store in places(world)]
    assert (at[1], at[2]) == ((1, 0), (2, 0))

    @world.ps[1].wrap
    def lost_meanwhile(handle, message):
        if isinstance(message, AttachBackup) and message.beside:
            world.ps[2].kill()
        return handle(message)

    servers.drain("ps0:1", timeout=10.0)
    assert not world.ps[2].alive
    assert world.numbers_of["failovers"] == 1
    assert set(served(world)) == {"/job:ps/task:1", "/job:ps/task:3"}
    assert world.paired()


def places(world):
    return world.replication.placement.stores


SERVING = st.lists(st.integers(0, 4), min_size=1, max_size=12)


@given(SERVING, st.sets(st.integers(0, 4), min_size=1))
def test_rebalancing_moves_as_few_stores_as_can_be(serving, processes):
    moves = plan_rebalance(serving, processes)
    after = list(serving)
    for store, target in moves:
        assert (after[store] in processes, target in processes) == (True, True)
        after[store] = target
    counts = sorted(after.count(process) for process in processes)
    assert counts[-1] - counts[0] <= 1
    # Who serves more than his share gives the rest away, and no store moves twice.
    before = sorted(serving.count(process) for process in processes)
    assert len({store for store, _ in moves}) == len(moves)
    assert len(moves) == sum(max(0, b - a) for b, a in zip(before, counts, strict=True))


@given(SERVING, st.sets(st.integers(0, 4), min_size=1), st.data())
def test_a_process_that_leaves_has_nothing_left(serving, others, data):
    process = data.draw(st.sampled_from(serving))
    others = others - {process} or {5}
    backups = data.draw(
        st.dictionaries(st.integers(0, len(serving) - 1), st.integers(0, 4))
    )
    moves = plan_drain(serving, backups, process, others)
    assert [store for store, _ in moves] == [
        store for store, at in enumerate(serving) if at == process
    ]
    for store, target in moves:
        assert target in others
        assert backups.get(store) not in others or target == backups[store]
