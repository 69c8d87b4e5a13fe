"""Ranks that do not call, call something else, leave or vanish: who is named, where."""

import numpy as np
import pytest
from collectives_groups import ranks_of

from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.collectives import Group
from zstrat.collectives.group import _traffic as traffic_module
from zstrat.errors import (
    BusyError,
    CancelledError,
    ClosedError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    PeerLostError,
    UnavailableError,
)


@pytest.fixture(params=["ipc", "tcp"])
def trio(request):
    with ranks_of(3, over=request.param) as ranks:
        yield ranks


def test_who_did_not_come_is_named_to_all(trio):
    def come(rank):
        return trio.group(rank, rendezvous_timeout=2.0)

    for error in trio.outcomes(come, [0, 1]):
        assert isinstance(error, CollectiveTimeoutError)
        assert "rank 2 (/job:worker/task:2 at " in str(error)
        assert "2 of 3" in str(error)


def test_rank_0_that_is_not_there_is_named(trio):
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 \(/job:worker/task:0"):
        trio.group(1, rendezvous_timeout=0.5)


def test_rank_0_that_has_not_made_the_group_is_named(trio):
    others = trio.each(
        lambda rank: trio.group(rank, name="other", tasks=["worker:0", "worker:1"]),
        [0, 1],
    )
    assert others[0].size == 2
    with pytest.raises(CollectiveTimeoutError, match="'group'"):
        trio.group(2, rendezvous_timeout=0.5)


def test_ranks_may_come_in_any_order_and_late(trio):
    first = trio.start(trio.group, 2)
    second = trio.start(trio.group, 1)
    assert not first.done()
    assert trio.group(0).size == first.result(60).size == second.result(60).size


def test_a_rank_that_does_not_call_is_named_to_all_others(trio):
    groups = trio.groups()
    found = trio.outcomes(
        lambda group: group.all_reduce(np.ones(1000), timeout=0.6), groups[:2]
    )
    for error in found:
        assert isinstance(error, CollectiveTimeoutError)
        assert "all_reduce(float64[1000], SUM), call 1 of group 'group'" in str(error)
        assert "rank 2 (/job:worker/task:2 at " in str(error)
        assert "has not called it" in str(error)
    assert groups[2]._work.generation._broken_flag.wait(60)
    assert groups[2].is_broken
    with pytest.raises(CollectiveTimeoutError, match=r"all_reduce.*SUM.*'group'"):
        groups[2].all_reduce(np.ones(1000))
    with pytest.raises(UnavailableError, match=r"reform\(\)"):
        groups[2].all_reduce(np.ones(1000))


def test_a_rank_that_is_sent_too_much_before_it_calls_says_what_to_do(monkeypatch):
    monkeypatch.setattr(traffic_module, "EARLY", 2**20)
    data = np.ones(2**20)
    words = r"rank 0.*rank 1.*barrier\(\)"
    with ranks_of(2) as pair:
        groups = pair.groups()
        pair.outcomes(lambda group: group.broadcast(data), groups[:1])
        assert groups[1]._work.generation._broken_flag.wait(60)
        with pytest.raises(BusyError, match=words):
            groups[1].broadcast(data)


def test_who_waits_for_the_guilty_is_not_guilty(trio):
    # In a ring rank 0 waits for 2, which waits for 1.
    groups = trio.groups()
    data = np.ones(300_000)
    found = trio.outcomes(
        lambda group: group.all_reduce(data, timeout=0.8), [groups[0], groups[2]]
    )
    for error in found:
        assert "rank 1 (/job:worker/task:1 " in str(error).split("; ")[0]
        assert "rank 2 (" not in str(error).split("; ")[0]


def test_ranks_that_make_different_calls_are_told_what_each_does(trio):
    groups = trio.groups()
    calls = [
        lambda group: group.all_reduce(np.ones(10)),
        lambda group: group.all_reduce(np.ones(10)),
        lambda group: group.all_gather(np.ones(10)),
    ]
    found = trio.outcomes(lambda group: calls[group.rank](group), groups)
    for error in found:
        assert isinstance(error, InvalidArgumentError)
        assert "all_reduce(float64[10], SUM)" in str(error)
        assert "all_gather(float64[?], axis=0)" in str(error)


@pytest.mark.parametrize(
    "others",
    [
        lambda group: group.all_reduce(np.ones(11)),
        lambda group: group.all_reduce(np.ones(10, np.float32)),
        lambda group: group.all_reduce(np.ones(10), "max"),
        lambda group: group.all_reduce([np.ones(10), np.ones(10)]),
        lambda group: group.broadcast(np.ones(10), 1),
        lambda group: group.reduce_scatter(np.ones(10)),
        lambda group: group.barrier(),
    ],
)
def test_every_difference_is_found(trio, others):
    groups = trio.groups()
    calls = [
        lambda group: group.all_reduce(np.ones(10)),
        others,
        others,
    ]
    found = trio.outcomes(lambda group: calls[group.rank](group), groups)
    assert isinstance(found[0], InvalidArgumentError | UnavailableError), found


@pytest.mark.parametrize("count", [1, 5])
def test_leaves_of_other_names_are_not_summed(trio, count):
    def tree(rank):
        names = "abcde" if rank == 0 else "vwxyz"
        return {name: np.ones(3) for name in names[:count]}

    groups = trio.groups()
    found = trio.outcomes(lambda group: group.all_reduce(tree(group.rank)), groups)
    for error in found:
        assert isinstance(error, InvalidArgumentError | UnavailableError), found
    assert any("['a']" in str(error) and "['v']" in str(error) for error in found)


def test_other_order_of_calls_is_an_error_and_no_hang(trio):
    groups = trio.groups()
    small, large = np.ones(10), np.ones(500_000, np.float32)

    def work(group):
        for data in (large, small) if group.rank == 1 else (small, large):
            group.all_reduce(data)

    for error in trio.outcomes(work, groups):
        assert isinstance(error, InvalidArgumentError)
        assert "same calls in the same order" in str(error)


def test_all_calls_under_way_fail_together(trio):
    groups = trio.groups()
    pending = [
        group.all_reduce_async(np.ones(10 + i), timeout=0.5)
        for group in groups[:2]
        for i in range(5)
    ]
    for each in pending:
        with pytest.raises(CollectiveTimeoutError, match="rank 2"):
            each.result(60)


def test_a_rank_that_leaves_is_named(trio):
    groups = trio.groups()
    trio.each(lambda group: group.all_reduce(np.ones(3)), groups)
    groups[2].close()
    for error in trio.outcomes(lambda group: group.barrier(), groups[:2]):
        assert isinstance(error, PeerLostError)
        assert error.left
        assert "rank 2 (/job:worker/task:2" in error.peer


def test_a_rank_that_has_left_is_named_at_once_where_memory_is_shared(trio):
    groups = trio.groups(transport="shm", timeout=None)
    trio.each(lambda group: group.all_reduce(np.ones(3)), groups)
    trio.start(groups[2].close).result(60)
    calls = {0: lambda group: group.barrier(), 1: lambda group: group.all_reduce(1.0)}
    for error in trio.outcomes(lambda group: calls[group.rank](group), groups[:2]):
        assert isinstance(error, PeerLostError | UnavailableError), error
        assert "it left group 'group'" in str(error)


def test_a_rank_may_leave_after_its_last_call(trio):
    def work(group):
        data = group.broadcast(np.full(3_000_000, group.rank + 1.0))
        group.close()
        return float(data.min())

    assert trio.each(work, trio.groups()) == [1.0] * 3


def test_closing_fails_what_is_under_way_here(trio):
    groups = trio.groups()
    pending = groups[0].all_reduce_async(np.ones(10))
    groups[0].close()
    with pytest.raises(ClosedError):
        pending.result(60)


def test_reform_goes_on_with_a_newcomer(trio):
    groups = trio.groups()
    groups[1].close()
    trio.outcomes(lambda group: group.barrier(timeout=100), [groups[0], groups[2]])
    again = trio.start(trio.group, 1)
    trio.each(lambda group: group.reform(timeout=100), [groups[0], groups[2]])
    groups[1] = again.result(60)
    assert [group.generation for group in groups] == [1, 1, 1]
    sums = trio.each(lambda g: g.all_reduce(np.array([g.rank + 1])), groups)
    np.testing.assert_array_equal(sums, [[6]] * 3)


def test_reform_goes_on_without_and_with_rank_0(trio):
    groups = trio.groups()
    groups[0].close()
    found = trio.outcomes(lambda group: group.barrier(timeout=100), groups[1:])
    assert {type(error) for error in found} == {PeerLostError}
    trio.each(lambda group: group.reform(ranks=[1, 2]), groups[1:])
    assert [group.rank for group in groups[1:]] == [0, 1]
    assert [group.generation for group in groups[1:]] == [1, 1]
    sums = trio.each(lambda g: g.all_reduce(np.array([g.rank + 1])), groups[1:])
    np.testing.assert_array_equal(sums, [[3], [3]])
    again = trio.start(trio.group, 0)
    trio.each(lambda group: group.reform(), groups[1:])
    groups[0] = again.result(60)
    assert [group.generation for group in groups] == [2, 2, 2]
    assert [group.rank for group in groups] == [0, 1, 2]
    trio.each(lambda group: group.barrier(), groups)


def test_reform_without_need_starts_afresh(trio):
    groups = trio.groups()
    trio.each(lambda group: group.reform(), groups)
    sums = trio.each(lambda g: g.all_reduce(np.array([g.rank])), groups)
    np.testing.assert_array_equal(sums, [[3]] * 3)


def test_reform_that_fails_can_be_tried_again(trio):
    groups = trio.groups()
    groups[2].close()
    for error in trio.outcomes(lambda group: group.reform(timeout=0.7), groups[:2]):
        assert isinstance(error, CollectiveTimeoutError)
        assert "rank 2" in str(error)
    trio.each(lambda group: group.reform(ranks=[0, 1]), groups[:2])
    trio.each(lambda group: group.barrier(), groups[:2])


def test_ranks_of_reform_have_to_fit(trio):
    groups = trio.groups()
    for ranks in ([1, 2], [0, 3], []):
        with pytest.raises(ValueError, match="ranks="):
            groups[0].reform(ranks=ranks)
    with pytest.raises(ValueError, match="not both"):
        groups[0].reform(ranks=[0], tasks=["worker:0"])


def test_a_call_that_breaks_here_is_told_to_the_others(trio):
    groups = trio.groups()

    def interrupted(group):
        group._work.interrupt("all_reduce()")

    others = [trio.start(group.barrier) for group in groups[1:]]
    trio.start(interrupted, groups[0]).result(60)
    for each in others:
        error = each.exception(60)
        assert isinstance(error, CancelledError)
        assert "rank 0" in str(error)
        assert "interrupted" in str(error)


def test_the_process_must_be_a_member():
    spec = ClusterSpec({"worker": ["ipc:///tmp/a", "ipc:///tmp/b"], "ps": ["ipc:///c"]})
    for job, index, words in (
        ("ps", 0, "/job:ps/task:0"),
        ("worker", 7, "/job:worker/task:7"),
        (None, None, r"task_type.*task_id"),
    ):
        resolver = SimpleClusterResolver(spec, task_type=job, task_id=index)
        with pytest.raises(ValueError, match=words):
            Group(resolver)
    resolver = SimpleClusterResolver(spec, task_type="worker", task_id=0)
    for tasks in (["worker:5"], ["worker"], ["worker:0", "worker:0"], []):
        with pytest.raises(ValueError, match=r"task"):
            Group(resolver, tasks=tasks)
    with pytest.raises(ValueError, match="transport="):
        Group(resolver, transport="pigeon")
