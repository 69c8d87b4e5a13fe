"""Which copies a program goes on with that another one has left."""

import pytest

from zstrat.coordinator.replication import (
    Attach,
    Detach,
    Drop,
    Promote,
    Serve,
    StorePlacement,
    successors,
)
from zstrat.errors import InvalidArgumentError, PSUnavailableError
from zstrat.wire import OrphanedCopy

FORMER, SESSION = 11, 12


def primary(store=0, view=5, *, sure=False, origin=FORMER, variables=2, partner=0):
    return OrphanedCopy(
        store, view, "", 1, origin, True, True, sure, variables, partner
    )


def backup(store=0, view=5, *, sure=False, whole=True, partner=0):
    address = f"b{store}:1"
    return OrphanedCopy(store, view, address, 2, FORMER, False, whole, sure, 2, partner)


def chosen(*told, stores=1):
    """The process of each store, and whether it is the primary there."""
    found = successors("run", SESSION, dict(enumerate(told)), stores)
    return [
        (found[store].chosen.process, found[store].chosen.copy.is_primary)
        for store in sorted(found)
    ]


@pytest.mark.parametrize(
    ("told", "goes_on"),
    [
        (([primary()], [backup()]), (0, True)),  # nothing was lost
        (([primary(sure=True)], []), (0, True)),  # it was alone, or is for long
        (([], [backup(sure=True)]), (1, False)),
        (([primary()], [backup(whole=False)]), (0, True)),
        # It was alone, and had not heard of the copy that was to be its backup.
        (([primary(sure=True)], [backup(view=6, whole=False)]), (0, True)),
        # Of a store without second copies, which was to move.
        (([primary(view=0, sure=True)], [backup(view=2, whole=False)]), (0, True)),
        (([primary(view=5)], [primary(view=6, sure=True)]), (1, True)),  # a failover
        (([primary(view=5)], [primary(view=8)], [backup(view=8)]), (1, True)),
        (([backup(view=5)], [], [primary(view=8, sure=True)]), (2, True)),
        # One that was started again has a store that is new, and empty.
        (([primary(view=0, origin=SESSION)], [backup(sure=True)]), (1, False)),
    ],
)
def test_a_copy_of_the_newest_view_goes_on(told, goes_on):
    assert chosen(*told) == [goes_on]


@pytest.mark.parametrize(
    "told",
    [
        ([primary()], []),  # the other one may have taken its place
        ([], [backup()]),  # the other one may have gone on alone
        ([], [backup(sure=True, whole=False)]),
        ([primary()], [backup(view=6, whole=False)]),  # of one that had replaced it
        # It was started again, and somebody else had it.
        ([primary(view=0, sure=True, variables=0)], [backup(view=6, whole=False)]),
        ([primary(view=5, sure=True)], [backup(view=8)]),  # nor is an older one taken
        ([], [], [primary(store=1, sure=True)]),
        ([primary(sure=True)], [primary(1, sure=True, origin=10)]),
    ],
)
def test_without_one_that_is_known_to_have_all_the_session_is_lost(told):
    with pytest.raises(PSUnavailableError, match="'run'") as error:
        chosen(*told, stores=2 if told[-1] and told[-1][0].store else 1)
    assert error.value.lost


@pytest.mark.parametrize("views", [(5, 5), (6, 5)])
def test_two_that_name_each_other_stay_together(views):
    """Whether both or one of them had heard of the last view of a program before."""
    placement = StorePlacement(["p0:1", "p1:1", "p2:1"])
    for process in range(3):
        placement.joined(process, 0)
    told = {
        0: [primary(view=views[0], partner=2)],
        1: [backup(view=views[1], partner=1)],
        2: [primary(view=4)],
    }
    left = successors("run", SESSION, told, 1)
    serve, attach, drop = placement.take_over_stores(left, [0, 0, 0])
    view = views[0] + 1
    assert (type(serve), serve.view, serve.primary.incarnation) == (Serve, view, 1)
    assert (type(attach), attach.view, attach.backup.address) == (Attach, view, "b0:1")
    assert drop == Drop(0, view, 2)
    # Either may be lost from now on.
    (promote,) = placement.process_lost(0, "killed")
    assert (type(promote), promote.view, promote.backup.process) == (
        Promote,
        view + 1,
        1,
    )


@pytest.mark.parametrize(
    "told",
    [
        ([primary(sure=True)], [backup(view=6, whole=False, partner=1)]),
        ([primary(partner=2)], [backup()]),
        ([primary()], [backup(partner=1)]),
        ([primary(partner=3)], [backup(partner=1)]),
    ],
)
def test_two_that_do_not_are_no_pair(told):
    left = successors("run", SESSION, dict(enumerate(told)), 1)
    assert not left[0].is_pair


def test_more_stores_than_this_program_would_have_are_no_loss():
    told = {0: [primary(0, sure=True), primary(2, sure=True)]}
    with pytest.raises(InvalidArgumentError, match=r"\b2\b.*stores_per"):
        successors("run", SESSION, told, 2)


def test_a_backup_that_has_come_home_is_not_dropped_when_it_takes_the_place():
    """A failover had brought its primary elsewhere."""
    placement = StorePlacement(["p0:1", "p1:1"])
    for process in (0, 1):
        placement.joined(process, 0)
    told = {0: [backup(sure=True)], 1: []}
    promote, *orders = placement.take_over_stores(
        successors("run", SESSION, told, 1), [0, 0]
    )
    assert (promote.view, promote.backup.process) == (6, 0)
    orders += placement.process_lost(0, "its line broke")
    orders += placement.joined(0, 0)
    (again,) = [each for each in orders if type(each) is Promote]
    orders += placement.promoted(again)
    dropped = [each for each in orders if type(each) is Drop and each.store == 0]
    assert {each.process for each in dropped} == {1}


def test_views_go_on_behind_that_of_a_copy_that_was_never_filled():
    told = {0: [primary(sure=True)], 1: [backup(view=7, whole=False)]}
    left = successors("run", SESSION, told, 1)
    placement = StorePlacement(["p0:1", "p1:1"])
    for process in (0, 1):
        placement.joined(process, 0)
    assert left[0].view == 7
    assert placement.take_over_stores({0: left[0]}, [0, 0])[:2] == [
        Detach(0, 8),
        Drop(0, 8, 1),
    ]


def test_where_nothing_was_created_all_begins_anew():
    assert chosen([primary(variables=0)], []) == []
    assert chosen([primary(view=0, origin=SESSION)], []) == []


def test_each_goes_on_alone_in_a_newer_view_and_others_are_dropped():
    placement = StorePlacement(["p0:1", "p1:1"])
    for process in (0, 1):
        placement.joined(process, 0)
    told = {0: [primary(0), backup(1, sure=True)], 1: [backup(0)]}
    orders = placement.take_over_stores(successors("run", SESSION, told, 2), [0, 0])
    detach, promote, dropped = orders
    assert detach == Detach(0, 6)
    assert isinstance(promote, Promote)
    assert (promote.store, promote.view, promote.backup.address) == (1, 6, "b1:1")
    assert dropped == Drop(1, 6, 1)
    assert Drop(0, 6, 1) in placement.detached(detach)
